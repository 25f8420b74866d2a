"""A stack shared by many tests, and the reference model that tells them what is right."""

from __future__ import annotations

from collections.abc import Iterator

import grpc
import pytest

from tests.e2e.transformers_model import TransformersModel
from tests.stack import DEMO_MODEL, running_stack


@pytest.fixture(scope="session")
def demo_stack() -> Iterator[str]:
    """The address of an ordinary stack, shared by all tests that only send requests."""
    with running_stack() as stack:
        yield stack.address


@pytest.fixture(scope="session")
def oracle() -> TransformersModel:
    return TransformersModel(DEMO_MODEL)


@pytest.fixture
def demo_channel(demo_stack: str) -> Iterator[grpc.Channel]:
    with grpc.insecure_channel(demo_stack) as channel:
        yield channel
