"""A worker whose kept weights can neither be used nor freed: its program starts again without them,
and streams continue."""

from __future__ import annotations

import fcntl
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from deploy.native.processes import parent_processes
from tests.faults.streams import LONG, REQUESTS, assert_undamaged, open_streams, undisturbed
from tests.faults.transcript import Transcript
from tests.stack import DEMO_MODEL, RealStack, running_stack

STREAMS = {name: REQUESTS[name] for name in LONG[:4]}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return Path(shutil.copytree(DEMO_MODEL, tmp_path_factory.mktemp("models") / "copy"))


@pytest.fixture(scope="module")
def stack(model: Path) -> Iterator[RealStack]:
    limits = {"max_num_batched_tokens": 32, "max_num_seqs": 32, "speculation": "none"}
    with running_stack(model=model, **limits) as started:
        yield started


@pytest.fixture
def expected(stack: RealStack) -> dict[str, Transcript]:
    stack.wait_serving()
    return undisturbed(stack.address, STREAMS)


def parents(stack: RealStack) -> dict[str, psutil.Process]:
    return parent_processes(stack.directory)


def kept(stack: RealStack, name: str) -> list[Path]:
    """The memory files that the worker's parent process has with this name."""
    folder = Path(f"/proc/{parents(stack)['worker-0'].pid}/fd")
    begin = f"/memfd:nanovllm-kept-{name}-"
    return [
        each
        for each in folder.iterdir()
        if str(target := each.readlink()).startswith(begin)
        and ("index" in str(target)) == ("index" in name)
    ]


def assert_one_copy(stack: RealStack) -> None:
    """The weights of the present fork lie in the only file."""
    stack.wait_serving()
    (weights,), (index,) = kept(stack, "weights"), kept(stack, "weights-index")
    assert index.stat().st_size
    with weights.open("rb") as file:
        assert fcntl.fcntl(file, fcntl.F_GET_SEALS) & fcntl.F_SEAL_WRITE


def test_sealed_weights_without_an_index(stack: RealStack, expected: dict[str, Transcript]) -> None:
    """A fork that dies between the seal and the index leaves them so."""
    before, lost = parents(stack), stack.load().lost_tokens
    with open_streams(stack.address, STREAMS) as streams:
        streams.wait_for_tokens(10, *STREAMS)
        (index,) = kept(stack, "weights-index")
        pid = stack.stop("worker")
        streams.require_open(*STREAMS)
        os.truncate(index, 0)
        os.kill(pid, 9)
        assert_undamaged(streams.wait_ended(), expected)
    assert_one_copy(stack)
    assert parents(stack) == before
    assert stack.load().lost_tokens == lost  # the cache has been kept


def test_a_configuration_that_changes_before_a_fork(
    stack: RealStack, expected: dict[str, Transcript], model: Path
) -> None:
    before = parents(stack)
    file = model / "config.json"
    text = file.read_text().replace('"rms_norm_eps": 1e-06', '"rms_norm_eps": 0.01')
    file.write_text(text)
    pid = stack.kill("worker")
    stack.wait_replaced("worker", 0, pid)
    assert_one_copy(stack)
    assert parents(stack) == before
    found = undisturbed(stack.address, {"greedy": STREAMS["greedy"]})
    assert found["greedy"].compare(expected["greedy"]).differences  # it is another model
