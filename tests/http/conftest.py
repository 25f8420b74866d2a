"""A stack with a gateway."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from deploy.ports import free_service_port
from tests.stack import RealStack, running_stack

NAME = "acme/fox-1.5"  # of its model


@pytest.fixture(scope="package")
def door() -> str:
    """Where its frontend serves the engine protocol."""
    return f"127.0.0.1:{free_service_port()}"


@pytest.fixture(scope="package")
def stack(door: str) -> Iterator[RealStack]:
    given = {"NANO_ENGINE_ADDRESSES": door}
    with running_stack(given, http_port="auto", served_model_name=NAME) as running:
        yield running
