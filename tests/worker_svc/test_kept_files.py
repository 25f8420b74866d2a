"""Kept memory of the host: files have limits, and weights are sealed."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest
import torch

from tests.worker_svc.device import cpu_only
from tests.worker_svc.harness import batch_for
from tests.worker_svc.test_kept_memory import NUM_BLOCKS, assert_equal, runner_of, state
from worker_svc.kept_memory.host import HostMemory
from worker_svc.kept_memory.memory import KeptMemory

pytestmark = cpu_only


@pytest.fixture
def memory() -> KeptMemory:
    memory = KeptMemory()
    memory.use(HostMemory())
    return memory


@pytest.fixture
def limited_files(monkeypatch: pytest.MonkeyPatch) -> None:
    """No file may grow (RLIMIT_FSIZE)."""

    def truncate(file: int, size: int) -> None:
        raise OSError(errno.EFBIG, os.strerror(errno.EFBIG))

    monkeypatch.setattr(os, "ftruncate", truncate)


def test_memory_that_was_reserved_in_vain_is_used(memory: KeptMemory) -> None:
    memory.weights.reserve([16 << 20])
    memory.weights.add(state())
    assert memory.weights._sizes == [16 << 20]


def test_nothing_can_write_to_sealed_weights(memory: KeptMemory) -> None:
    kept = memory.weights.add(state())
    memory.weights.keep("key", None)
    for file in memory._weights.read()[1]:
        with pytest.raises(OSError, match=os.strerror(errno.EPERM)):
            os.pwrite(file, b"x", 0)
        os.close(file)
    inside = False
    for line in Path("/proc/self/maps").read_text().splitlines():
        begin, end = (int(each, 16) for each in line.split()[0].split("-"))
        if begin <= kept["large"].data_ptr() < end:
            inside = True
            assert line.split()[1] == "r--p"
    assert inside


@pytest.mark.usefixtures("limited_files")
def test_weights_that_do_not_fit_into_files_are_private(memory: KeptMemory) -> None:
    kept = memory.weights.add(state())
    memory.weights.keep("key", {})
    assert_equal(kept, state())
    assert memory.weights.notes("key") is None


@pytest.mark.usefixtures("limited_files")
def test_a_limit_on_the_size_of_files_keeps_no_worker_from_serving(tiny_dir: Path) -> None:
    memory = KeptMemory()
    runner = runner_of(tiny_dir, memory)
    runner.configure(1, NUM_BLOCKS)
    runner.run(batch_for(runner, NUM_BLOCKS).step([(0, [1, 2, 3])]))
    assert runner.cache_id
    assert memory.cache.id == ""
    assert runner_of(tiny_dir, memory).cache_id == ""


def test_an_unused_cache_takes_no_memory(memory: KeptMemory) -> None:
    memory.cache.tensor([1 << 28], torch.int8)
    (file,) = memory.cache._descriptors
    assert os.fstat(file).st_blocks == 0
