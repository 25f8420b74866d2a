"""A process that burns a share of a core."""

from __future__ import annotations

import time
from multiprocessing.connection import Connection

_PERIOD_S = 0.01


def burn(pipe: Connection, share: float) -> None:
    """Sends a message, then burns this share of a core until the pipe is closed."""
    pipe.send("ready")
    while not pipe.poll():
        began_at, burnt_s = time.monotonic(), time.process_time()
        while time.process_time() - burnt_s < share * _PERIOD_S:
            pass
        time.sleep(max(0.0, began_at + _PERIOD_S - time.monotonic()))
