from __future__ import annotations

import os
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from frontend.http.background.store import ResponseStore, StoredResponse
from tests.frontend.fake_scheduler import FakeScheduler
from tests.frontend.http.background.rig import LocalServer, Rig


@pytest.fixture(autouse=True)
def close_responses(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Closes the files that a test leaves open, as the end of a process does."""
    left: set[StoredResponse] = set()
    begin, close = StoredResponse.__init__, StoredResponse.close

    def note(self: StoredResponse, path: Path, descriptor: int) -> None:
        begin(self, path, descriptor)
        left.add(self)

    def forget(self: StoredResponse) -> None:
        left.remove(self)
        close(self)

    monkeypatch.setattr(StoredResponse, "__init__", note)
    monkeypatch.setattr(StoredResponse, "close", forget)
    yield
    for each in left:
        os.close(each._descriptor)


@pytest.fixture
async def rig(scheduler: FakeScheduler, tmp_path: Path) -> AsyncIterator[Rig]:
    scheduler.automatic = False
    async with Rig(tmp_path, scheduler.address).running() as rig:
        yield rig


@pytest.fixture
async def a(rig: Rig) -> LocalServer:
    return await rig.local()


@pytest.fixture
async def b(rig: Rig, a: LocalServer) -> LocalServer:
    return await rig.local()


@pytest.fixture
def store(tmp_path: Path) -> ResponseStore:
    return ResponseStore(str(tmp_path / "responses"))


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    return tmp_path / "responses"
