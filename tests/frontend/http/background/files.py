"""Files of responses for tests: their ids, full disks and descriptors."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from frontend.http.background.store import ResponseStore, StoredResponse

CANCELLED = {"end": "cancelled"}


def new_id(number: int = 0) -> str:
    return f"resp_{number:032x}"


def create(store: ResponseStore, number: int = 0, owner: str = "", **header: Any) -> StoredResponse:
    """Stores a response, whose lock the result has."""
    return store.create(owner, new_id(number), {"response": {"id": new_id(number)}, **header})


def adopt(store: ResponseStore) -> StoredResponse:
    """Takes over the only response that nobody generates."""
    (found,) = store.unfinished()
    return found


def opened(store: ResponseStore, number: int = 0, owner: str = "") -> StoredResponse:
    found = store.open(owner, new_id(number))
    assert found is not None
    return found


def num_descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def fill_disk(monkeypatch: pytest.MonkeyPatch, directory: Path, room: int) -> Callable[[], None]:
    """Lets only `room` more bytes be written to files in `directory`. Returns a function that makes
    room again."""
    write, left = os.write, [room]

    def limited(descriptor: int, data: bytes) -> int:
        path = os.readlink(f"/proc/self/fd/{descriptor}")
        if not path.startswith(f"{directory}/"):
            return write(descriptor, data)
        if not left[0]:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        count = write(descriptor, data[: left[0]])
        left[0] -= count
        return count

    def make_room() -> None:
        left[0] = 1 << 30

    monkeypatch.setattr(os, "write", limited)
    return make_room


def state(found: StoredResponse) -> tuple[list[int], object]:
    found.refresh()
    return found.tokens, found.end
