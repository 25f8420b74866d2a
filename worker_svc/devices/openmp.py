"""How the threads of a step wait. OpenMP reads this once, when it is loaded: before torch and numba
start their threads, call `let_threads_spin_briefly`."""

from __future__ import annotations

import os


def let_threads_spin_briefly() -> None:
    """Has threads look for work for about 0.1 ms before they sleep, unless the environment says
    otherwise.

    A step is hundreds of short parallel regions: to wake a sleeping thread for one takes 70 us, a
    spinning one 2 us. By default threads spin for much longer, and those of torch's pool on cores
    that numba's need.
    """
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    os.environ.setdefault("GOMP_SPINCOUNT", "5000")
