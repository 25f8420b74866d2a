"""Helps threads to work beside the event loop."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from typing import TypeVar

Item = TypeVar("Item")

_PAUSE_S = 1e-5


def in_pieces(items: Sequence[Item], size: int) -> Iterator[Sequence[Item]]:
    """Yields `items`, `size` at a time, for a thread that works on them in Python.

    Sleeps in between, so that the event loop, which needs the interpreter's lock, waits for one
    piece at most rather than until the lock is taken from this thread (`sys.getswitchinterval`).
    """
    for start in range(0, len(items), size):
        yield items[start : start + size]
        time.sleep(_PAUSE_S)
