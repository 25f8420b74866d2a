"""Kept weights that a fork can neither use nor free. `tests/faults` has them in a real stack."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from shared.process.kept import UnusableFileError
from tests.worker_svc.device import DEVICE
from tests.worker_svc.harness import batch_for
from tests.worker_svc.test_kept_memory import inherit, runner_of, state
from worker_svc.kept_memory import KeptMemory

pytestmark = pytest.mark.skipif(DEVICE.type != "cpu", reason="memory of a GPU is not kept")


def is_open(descriptor: os.stat_result) -> bool:
    return any(
        os.path.samestat(each.stat(), descriptor)
        for each in Path("/proc/self/fd").iterdir()
        if each.exists()
    )


def test_weights_whose_fork_died_before_it_wrote_the_index_are_dropped() -> None:
    memory = KeptMemory()
    memory.weights.add(state())
    memory.weights.seal("key", "notes")
    memory.weights._index.clear()  # as if it had not been written
    sealed = os.fstat(memory.weights._file)
    memory.fork_ended(-signal.SIGKILL)
    assert not is_open(sealed)
    memory.weights.add(state())
    memory.weights.seal("key", "other notes")
    memory.fork_ended(-signal.SIGKILL)
    assert memory.weights.notes("key") == "other notes"


def test_a_fork_with_other_settings_or_another_model_does_not_load_beside_the_weights(
    tiny_dir: Path,
) -> None:
    memory = KeptMemory("of this test")
    first = runner_of(tiny_dir, memory)
    sealed = os.fstat(memory.weights._file)
    with pytest.raises(UnusableFileError):
        runner_of(tiny_dir, memory, dtype="bfloat16")
    assert first.info.dtype == "float32"
    inherit(memory.weights)  # the program starts again
    found = KeptMemory("of this test")
    assert not is_open(sealed)
    other = runner_of(tiny_dir, found, dtype="bfloat16")
    assert other.info.dtype == "bfloat16"
    other.configure(1, 16)
    other.run(batch_for(other, 16).step([(0, [1, 2, 3])]))
