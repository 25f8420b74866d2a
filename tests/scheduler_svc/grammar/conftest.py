"""A grammar host for all tests here, and grammars on it."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from contextlib import closing

import pytest

from scheduler_svc.grammar.grammars import Grammars
from tests.scheduler_svc.grammar.host import TestHost, wait_dead


@pytest.fixture(scope="session")
def _host() -> Iterator[TestHost]:
    with closing(TestHost()) as host:
        yield host


@pytest.fixture
async def host(_host: TestHost) -> AsyncIterator[TestHost]:
    yield _host
    wait_dead(*(child.pid for child in _host.children()))


@pytest.fixture
async def grammars(host: TestHost) -> AsyncIterator[Grammars]:
    grammars = Grammars(host.link)
    yield grammars
    grammars.close()
