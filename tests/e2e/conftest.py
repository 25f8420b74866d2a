"""A stack of real processes, started as a user starts a private one."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import grpc
import pytest

from tests.e2e.oracle import Oracle

ROOT = Path(__file__).parents[2]


@contextmanager
def running_stack(model: Path, **variables: object) -> Iterator[str]:
    """Its public address; everything is gone afterwards."""
    flags = [f"--{name.replace('_', '-')}={value}" for name, value in variables.items()]
    process = subprocess.Popen(
        [sys.executable, "-m", "deploy", "run", "--port=0", f"--model={model}", *flags],
        cwd=ROOT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        ready = process.stdout.readline().split()
        assert ready[:1] == ["READY"], "the stack did not start, see its stderr"
        yield ready[1]
    finally:
        process.stdin.close()
        process.stdout.close()
        assert process.wait(60) == 0


@pytest.fixture(scope="session")
def demo_model() -> Path:
    return ROOT / "models" / "demo"


@pytest.fixture(scope="session")
def demo_stack(demo_model: Path) -> Iterator[str]:
    """One ordinary stack for all tests that only send requests."""
    with running_stack(demo_model, dtype="float32") as address:
        yield address


@pytest.fixture(scope="session")
def oracle(demo_model: Path) -> Oracle:
    return Oracle(demo_model)


@pytest.fixture
def demo_channel(demo_stack: str) -> Iterator[grpc.Channel]:
    with grpc.insecure_channel(demo_stack) as channel:
        yield channel
