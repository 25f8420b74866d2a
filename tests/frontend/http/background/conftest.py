from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from frontend.http.background.store import ResponseStore
from tests.frontend.fake_scheduler import FakeScheduler
from tests.frontend.http.background.rig import LocalServer, Rig


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
