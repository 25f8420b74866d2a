"""A stack that many tests share, and the reference model with the right answers."""

from __future__ import annotations

from collections.abc import Iterator

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
