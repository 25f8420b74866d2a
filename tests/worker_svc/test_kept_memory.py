"""Weights and cache that outlive a worker's fork.

A second `ModelRunner` with the same memory stands for the next fork. `tests/faults` kills real
forks.
"""

from __future__ import annotations

import errno
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from shared.errors import FailedPreconditionError
from tests.worker_svc.device import DEVICE
from tests.worker_svc.harness import Batch, batch_for, limits, save_model, worker_settings
from tests.worker_svc.quantization import writers
from worker_svc import kept_memory
from worker_svc.kept_memory import KeptMemory, WeightMemory, kept_version
from worker_svc.kernels import cpu_features
from worker_svc.model_runner import ModelRunner

pytestmark = pytest.mark.skipif(DEVICE.type != "cpu", reason="memory of a GPU is not kept")

NUM_BLOCKS = 16
FORMATS: dict[str, dict[str, Any]] = {
    "float32": {},
    "bfloat16": {"dtype": "bfloat16"},
    "int8, cache too": {"quantization": "int8", "kv_dtype": "int8"},
    "int4": {"quantization": "int4", "dtype": "bfloat16", "kv_dtype": "int8"},
    "fp8": {"quantization": "fp8"},
}
KV_FORMATS = {name: FORMATS[name] for name in ("float32", "bfloat16", "int8, cache too")}
formats = pytest.mark.parametrize("options", FORMATS.values(), ids=FORMATS)
kv_formats = pytest.mark.parametrize("options", KV_FORMATS.values(), ids=KV_FORMATS)


def runner_of(model: Path, memory: KeptMemory, **options: Any) -> ModelRunner:
    return ModelRunner(worker_settings(model, **options), memory=memory)


@pytest.fixture
def memory() -> KeptMemory:
    return KeptMemory()


@pytest.fixture
def limited_files(monkeypatch: pytest.MonkeyPatch) -> None:
    """No file may grow (RLIMIT_FSIZE)."""
    truncate = os.ftruncate

    def limited(file: int, size: int) -> None:
        if size:
            raise OSError(errno.EFBIG, os.strerror(errno.EFBIG))
        truncate(file, size)

    def write(file: int, data: bytes, at: int) -> int:
        raise OSError(errno.EFBIG, os.strerror(errno.EFBIG))

    monkeypatch.setattr(os, "ftruncate", limited)
    monkeypatch.setattr(os, "pwrite", write)


def state(seed: int = 0) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {
        "codes": torch.randint(-128, 128, (5, 7), dtype=torch.int8, generator=generator),
        "scales": torch.rand(3, generator=generator),
        "nothing": torch.empty(0, 2),
        "large": torch.rand(1 << 21, generator=generator).bfloat16(),
    }


def assert_equal(found: Any, expected: Any) -> None:
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert found[name].dtype == tensor.dtype
        assert torch.equal(found[name], tensor), name


@pytest.mark.parametrize("collapses", [True, False])
def test_states(collapses: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """They are equal before and after sealing, in the next fork, and do not overlap, whether or not
    the kernel collapses pages."""
    if not collapses:
        monkeypatch.setattr(kept_memory, "_MADV_COLLAPSE", -1)
    weights, given = WeightMemory(), [state(seed) for seed in range(20)]
    weights.reserve([10 << 20])
    kept = []
    for number, each in enumerate(given):
        if number % 2:  # some in the reserved memory, and more than that holds
            each = {name: weights.new(t.shape, t.dtype).copy_(t) for name, t in each.items()}
        added = weights.add(each)
        assert all((added[name] is each[name]) == bool(number % 2) for name in ("codes", "large"))
        kept.append(added)
    assert weights.notes("key") is None
    weights.seal("key", {"some": "notes"})
    assert weights.notes("another key") is None
    assert weights.notes("key") == {"some": "notes"}
    for states in (kept, list(weights.states())):
        assert len(states) == len(given)
        for found, expected in zip(states, given, strict=True):
            assert_equal(found, expected)
            assert all(tensor.data_ptr() % 64 == 0 for tensor in found.values() if len(tensor))


def test_memory_that_was_reserved_in_vain_is_used() -> None:
    weights = WeightMemory()
    weights.reserve([16 << 20])
    size = os.fstat(weights._file).st_size
    weights.release()
    weights.add(state())
    assert os.fstat(weights._file).st_size == size


def inherit(weights: WeightMemory) -> None:
    """Does what a program does before another one replaces it."""
    for file in (weights._file, weights._index._file):
        os.set_inheritable(file, True)


def test_the_next_program_finds_weights_unless_they_are_sealed_but_not_complete() -> None:
    version, given = "of this test", state()
    weights = WeightMemory(version)
    weights.add(given)
    weights.seal("key", "notes")
    inherit(weights)
    found = WeightMemory(version)
    assert found.notes("key") == "notes"
    assert_equal(*found.states(), given)

    found._index.clear()  # as if a fork had died before it was written
    inherit(found)
    empty = WeightMemory(version)
    assert empty.notes("key") is None
    empty.add(given)
    empty.seal("key", "other notes")
    assert empty.notes("key") == "other notes"


def test_a_version_covers_settings_and_files_of_the_model(tmp_path: Path) -> None:
    save_model(tmp_path)
    settings = worker_settings(tmp_path)
    version = kept_version(settings)
    assert kept_version(settings) == version
    assert kept_version(worker_settings(tmp_path, kv_dtype="int8")) != version
    (weights,) = tmp_path.glob("*.safetensors")
    weights.write_bytes(weights.read_bytes())
    assert kept_version(settings) != version
    weights.unlink()
    assert kept_version(settings) != kept_version(settings)


def test_nothing_can_write_to_sealed_weights() -> None:
    weights = WeightMemory()
    kept = weights.add(state())
    weights.seal("key", None)
    file = next(
        int(each.name)
        for each in Path("/proc/self/fd").iterdir()
        if each.exists() and os.path.samestat(each.stat(), os.fstat(weights._file))
    )
    with pytest.raises(OSError, match=os.strerror(errno.EPERM)):
        os.pwrite(file, b"x", 0)
    inside = False
    for line in Path("/proc/self/maps").read_text().splitlines():
        begin, end = (int(each, 16) for each in line.split()[0].split("-"))
        if begin <= kept["large"].data_ptr() < end:
            inside = True
            assert line.split()[1] == "r--p"
    assert inside


def test_a_fork_that_died_while_it_loaded_leaves_nothing() -> None:
    weights = WeightMemory()
    weights.add(state(1))
    for address, _, size in weights._chunks:  # as when the process has ended
        kept_memory._map_at(address, size, 0, kept_memory._NOTHING)
    successor = WeightMemory()
    successor._file, successor._index = weights._file, weights._index
    assert successor.notes("key") is None
    successor.reset()
    successor.add(state(2))
    successor.seal("key", {})
    assert_equal(next(successor.states()), state(2))


@pytest.mark.usefixtures("limited_files")
def test_weights_that_do_not_fit_into_files_are_private() -> None:
    weights = WeightMemory()
    kept = weights.add(state())
    weights.seal("key", {})
    assert_equal(kept, state())
    assert weights.notes("key") is None


@formats
def test_the_next_fork_reads_only_the_configuration_and_computes_the_same(
    tmp_path: Path, memory: KeptMemory, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    has = cpu_features.has  # weights for AMX cannot be kept
    monkeypatch.setattr(cpu_features, "has", lambda name: name != "amx-bf16" and has(name))
    shape: dict[str, Any] = {
        "hidden_size": 96,
        "intermediate_size": 128,
        "tie_word_embeddings": False,
    }
    save_model(tmp_path, **shape, attention_bias=True)
    first = runner_of(tmp_path, memory, **options)
    for each in tmp_path.iterdir():
        if each.name != "config.json":
            each.unlink()
    second = runner_of(tmp_path, memory, **options)
    assert second.info == first.info
    found = []
    for runner in (first, second):
        runner.configure(1, NUM_BLOCKS)
        text = [*range(7, 40)]
        found.append(
            runner.logits(batch_for(runner, NUM_BLOCKS).step([(0, text)]), every_token=True)
        )
    assert torch.equal(*found)


@pytest.mark.parametrize("format", writers.FORMATS.values(), ids=writers.FORMATS)
def test_weights_of_a_quantized_checkpoint_are_kept(
    tmp_path: Path, memory: KeptMemory, format: writers.Format
) -> None:
    writers.save_quantized(tmp_path, format)
    first = runner_of(tmp_path, memory)
    (tmp_path / "model.safetensors").unlink()
    assert runner_of(tmp_path, memory).info == first.info


def test_weights_that_cannot_be_kept_are_loaded_again(
    tmp_path: Path, memory: KeptMemory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only oneDNN's, which AMX uses, cannot."""
    if not torch.ops.mkldnn._is_mkldnn_bf16_supported():
        pytest.skip("oneDNN has no bfloat16 on this CPU")
    save_model(tmp_path, dtype=torch.bfloat16)
    monkeypatch.setattr(cpu_features, "has", lambda feature: True)
    runner_of(tmp_path, memory)
    assert runner_of(tmp_path, memory).info.dtype == "bfloat16"
    assert memory.weights._index.read() is None


@pytest.mark.usefixtures("limited_files")
def test_a_limit_on_the_size_of_files_keeps_no_worker_from_serving(
    tiny_dir: Path, memory: KeptMemory
) -> None:
    runner = runner_of(tiny_dir, memory)
    runner.configure(1, NUM_BLOCKS)
    runner.run(batch_for(runner, NUM_BLOCKS).step([(0, [1, 2, 3])]))
    assert runner.cache_id
    assert memory.cache.id == ""
    assert runner_of(tiny_dir, memory).cache_id == ""


@kv_formats
def test_the_next_fork_continues_on_the_cache(
    tiny_dir: Path, memory: KeptMemory, options: dict[str, Any]
) -> None:
    text = [*range(3, 60)]
    alone = runner_of(tiny_dir, KeptMemory(), **options)
    alone.configure(1, NUM_BLOCKS)
    expected_batch = batch_for(alone, NUM_BLOCKS)
    alone.run(expected_batch.step([(0, text)]))
    expected = alone.logits(expected_batch.step([(0, [5])]))

    first = runner_of(tiny_dir, memory, **options)
    first.configure(1, NUM_BLOCKS)
    batch = batch_for(first, NUM_BLOCKS)
    first.run(batch.step([(0, text)]))
    cache_id = first.cache_id
    second = runner_of(tiny_dir, memory, **options)
    assert second.cache_id == cache_id
    second.configure(2, NUM_BLOCKS, keep=cache_id)
    assert second.cache_id == cache_id
    assert torch.equal(second.logits(batch.step([(0, [5])])), expected)


def test_only_the_cache_that_is_there_is_kept(tiny_dir: Path, memory: KeptMemory) -> None:
    runner = runner_of(tiny_dir, memory)
    runner.configure(1, NUM_BLOCKS)
    first = runner.cache_id
    with pytest.raises(FailedPreconditionError, match="keep_cache_id"):
        runner.configure(2, NUM_BLOCKS, keep="another")
    with pytest.raises(FailedPreconditionError, match="keep_cache_id"):
        runner.configure(2, NUM_BLOCKS - 1, keep=first)
    runner.configure(3, NUM_BLOCKS)  # a scheduler that does not know the contents
    assert runner.cache_id not in ("", first)
    with pytest.raises(FailedPreconditionError, match="keep_cache_id"):
        runner.configure(4, NUM_BLOCKS, keep=first)
    runner.forget_cache()
    assert runner.cache_id == memory.cache.id == ""
    successor = runner_of(tiny_dir, memory)
    assert successor.cache_id == ""
    successor.configure(5, NUM_BLOCKS + 3)
    successor.run(batch_for(successor, NUM_BLOCKS).step([(0, [1, 2, 3])]))


@pytest.mark.parametrize(
    ("status", "is_kept"),
    [
        (-signal.SIGKILL, True),
        (-signal.SIGTERM, True),
        (0, True),
        (-signal.SIGSEGV, False),
        (-signal.SIGBUS, False),
        (-signal.SIGABRT, False),
        (1, False),
        (70, False),
    ],
)
def test_what_the_cache_survives(memory: KeptMemory, status: int, is_kept: bool) -> None:
    written = memory.cache.tensor([3, 5], torch.float32)
    written.fill_(7)
    cache_id = memory.cache.new_id(NUM_BLOCKS)
    memory.fork_ended(status)
    assert memory.cache.id == (cache_id if is_kept else "")
    memory.cache.rewind()
    found = memory.cache.tensor([3, 5], torch.float32)
    assert (found == (7 if is_kept else 0)).all()


def test_no_cache_is_kept_when_memory_was_short(
    memory: KeptMemory, monkeypatch: pytest.MonkeyPatch
) -> None:
    memory.cache.new_id(NUM_BLOCKS)
    kills = kept_memory._oom_kills()
    monkeypatch.setattr(kept_memory, "_oom_kills", lambda: kills + 1)
    memory.fork_ended(-signal.SIGKILL)
    assert memory.cache.id == ""
    memory.cache.new_id(NUM_BLOCKS)
    memory.fork_ended(-signal.SIGKILL)  # for another reason
    assert memory.cache.id


def test_an_unused_cache_takes_no_memory(memory: KeptMemory) -> None:
    memory.cache.tensor([1 << 28], torch.int8)
    assert os.fstat(memory.cache._file).st_blocks == 0


@kv_formats
def test_a_token_is_written_to_no_other_tokens_bytes(
    tmp_path: Path, memory: KeptMemory, options: dict[str, Any]
) -> None:
    """A step that was not answered must not damage other tokens. So a slot has bytes of its
    own, in keys, values, scales and token ids."""
    save_model(tmp_path, num_hidden_layers=2, head_dim=24)
    runner = runner_of(tmp_path, memory, block_size=8, **options)
    runner.configure(1, 2)
    parts = [
        *(cache.view(torch.uint8) for cache in runner._model.caches),
        runner._tokens.slots.view(torch.uint8),
    ]

    def written_by(run: Callable[[Batch], object]) -> set[tuple[int, int]]:
        """The bytes (part, place) that a run changes, whatever they were."""
        found = set()
        for pattern in (0x00, 0x37, 0x5A, 0xFF):
            for part in parts:
                part.fill_(pattern)
            run(Batch(limits(num_blocks=2, block_size=8)))
            for number, part in enumerate(parts):
                places = np.flatnonzero(part.numpy().reshape(-1) != pattern)
                found |= {(number, int(place)) for place in places}
        return found

    def after(batch: Batch, num_tokens: int) -> Batch:
        batch.contexts[0] = num_tokens
        batch.tables[0] = [1, 0]
        return batch

    of_slot = [
        written_by(lambda batch, at=at: runner.run(after(batch, at).step([(0, [9 + at])])))
        for at in range(16)
    ]
    assert all(of_slot)
    assert sum(map(len, of_slot)) == len(set().union(*of_slot)), "two slots share a byte"
    whole = written_by(lambda batch: runner.run(after(batch, 0).step([(0, [*range(9, 25)])])))
    assert whole == set().union(*of_slot)
    some = written_by(lambda batch: runner.run(after(batch, 3).step([(0, [*range(9, 16)])])))
    assert some == set().union(*of_slot[3:10])
