"""Sets how the OpenMP threads of torch wait for work.

Call `let_threads_spin_briefly` before importing torch: OpenMP reads its settings only once, when it
is loaded.
"""

from __future__ import annotations

import os


def let_threads_spin_briefly() -> None:
    """Makes threads spin for about 0.1 ms before they sleep, unless the environment says otherwise.

    Operations of torch and oneDNN are short parallel regions. A sleeping thread takes 70 us to wake
    for one, a spinning thread 2 us. By default threads spin for much longer, and would occupy cores
    that the threads of `kernels.cpu` need.
    """
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    os.environ.setdefault("GOMP_SPINCOUNT", "5000")
