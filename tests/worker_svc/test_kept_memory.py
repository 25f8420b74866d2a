"""Weights and cache that outlive a worker's fork, in files or on a device.

A second `ModelRunner` with the same memory stands for the next fork. `tests/faults` and `tests/gpu`
kill real forks.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import torch

from shared.errors import FailedPreconditionError
from tests.worker_svc.device import ON_GPU, by_device, cpu_only
from tests.worker_svc.device_memory import device_memory, stand_in
from tests.worker_svc.harness import Batch, batch_for, limits, save_model, worker_settings
from tests.worker_svc.quantization import writers
from worker_svc.devices.cpu import CpuPlatform
from worker_svc.kept_memory import host
from worker_svc.kept_memory import memory as kept_memory
from worker_svc.kept_memory.host import HostMemory
from worker_svc.kept_memory.memory import KeptMemory, kept_version
from worker_svc.kernels import cpu_features
from worker_svc.model_runner import ModelRunner

NUM_BLOCKS = 16
BFLOAT16: dict[str, Any] = {"dtype": "bfloat16"}
KV_FORMATS: dict[str, dict[str, Any]] = by_device(
    cpu={
        "float32": {},
        "bfloat16": BFLOAT16,
        "int8, cache too": {"quantization": "int8", "kv_dtype": "int8"},
    },
    gpu={"bfloat16": BFLOAT16, "fp8 cache": {"kv_dtype": "fp8", **BFLOAT16}},
)
FORMATS: dict[str, dict[str, Any]] = KV_FORMATS | {
    "int4": {"quantization": "int4", "kv_dtype": by_device(cpu="int8", gpu="auto"), **BFLOAT16},
    "fp8": {"quantization": "fp8"},
}
on_device = pytest.mark.parametrize("memory", ["device"], indirect=True)
formats = pytest.mark.parametrize("options", FORMATS.values(), ids=FORMATS)
kv_formats = pytest.mark.parametrize("options", KV_FORMATS.values(), ids=KV_FORMATS)


def runner_of(model: Path, memory: KeptMemory, **options: Any) -> ModelRunner:
    return ModelRunner(worker_settings(model, **options), memory=memory)


@pytest.fixture(params=by_device(cpu=["host", "device"], gpu=["device"]))
def memory(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> KeptMemory:
    """Kept memory as a fork has it."""
    if request.param == "device" and not ON_GPU:
        monkeypatch.setattr(CpuPlatform, "memory", stand_in)
    found = KeptMemory()
    fork(found)
    return found


def fork(memory: KeptMemory) -> None:
    """Lets `memory` be that of the next fork."""
    on_host = CpuPlatform.memory is not stand_in and not ON_GPU
    memory.use(HostMemory() if on_host else device_memory())


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
        assert torch.equal(found[name].cpu(), tensor), name


@pytest.mark.parametrize("collapses", [True, False])
def test_states(memory: KeptMemory, collapses: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """They are equal before and after `keep`, in the next fork, and do not overlap, whether or not
    the kernel collapses pages."""
    if not collapses:
        monkeypatch.setattr(host, "_MADV_COLLAPSE", -1)
    weights, given = memory.weights, [state(seed) for seed in range(20)]
    weights.reserve([10 << 20])
    kept = []
    for number, each in enumerate(given):
        if number % 2:  # some in the reserved memory, and more than that holds
            each = {name: weights.new(t.shape, t.dtype).copy_(t) for name, t in each.items()}
        added = weights.add(each)
        copied = [added[name] is not each[name] for name in ("codes", "large")]
        assert copied == [not number % 2 or ON_GPU] * 2
        kept.append(added)
    assert weights.notes("key") is None
    weights.keep("key", {"some": "notes"})
    fork(memory)
    weights = memory.weights
    assert weights.notes("another key") is None
    assert weights.notes("key") == {"some": "notes"}
    for states in (kept, list(weights.states())):
        assert len(states) == len(given)
        for found, expected in zip(states, given, strict=True):
            assert_equal(found, expected)
            assert all(tensor.data_ptr() % 64 == 0 for tensor in found.values() if len(tensor))


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


@cpu_only
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
    assert memory._weights.value() is None
    # Nor does oneDNN compute a row in the same way in any batch.
    runner_of(tmp_path, memory, batch_invariant=True)
    assert memory._weights.value()


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
    fork(memory)
    assert memory.cache.find(cache_id, NUM_BLOCKS) == is_kept
    found = memory.cache.tensor([3, 5], torch.float32)
    assert (found == (7 if is_kept else 0)).all()


def written_on_device(memory: KeptMemory) -> torch.Tensor:
    """Keeps weights and a cache on a device -> a tensor of the weights."""
    kept = memory.weights.add(state())
    memory.weights.keep("key", "notes")
    memory.cache.tensor([3, 5], torch.float32)
    memory.cache.new_id(NUM_BLOCKS)
    return kept["large"]


@on_device
@pytest.mark.parametrize(("status", "is_kept"), [(-signal.SIGKILL, True), (70, False)])
def test_what_weights_on_a_device_survive(memory: KeptMemory, status: int, is_kept: bool) -> None:
    """They are not sealed, and a kernel that failed may have written anywhere."""
    written_on_device(memory)
    memory.fork_ended(status)
    fork(memory)
    assert memory.weights.notes("key") == ("notes" if is_kept else None)


@on_device
def test_weights_on_a_device_that_have_changed_are_loaded_again(memory: KeptMemory) -> None:
    written_on_device(memory)[-1] += 1
    fork(memory)
    assert memory.weights.notes("key") is None
    memory.reset()
    assert memory.cache.id == ""


def test_a_cache_that_cannot_be_mapped_is_forgotten(
    tiny_dir: Path, memory: KeptMemory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise it would be asked for in each epoch."""
    runner_of(tiny_dir, memory).configure(1, NUM_BLOCKS)
    runner = runner_of(tiny_dir, memory)
    monkeypatch.setattr(memory.cache, "tensor", Mock(side_effect=RuntimeError("of this test")))
    with pytest.raises(RuntimeError, match="of this test"):
        runner.configure(2, NUM_BLOCKS, keep=runner.cache_id)
    monkeypatch.undo()
    assert runner.cache_id == memory.cache.id == ""
    runner.configure(3, NUM_BLOCKS)
    assert runner.cache_id


def test_a_cache_of_fewer_tensors_is_not_filled_up(memory: KeptMemory) -> None:
    memory.cache.tensor([3, 5], torch.float32)
    cache_id = memory.cache.new_id(NUM_BLOCKS)
    fork(memory)
    assert memory.cache.find(cache_id, NUM_BLOCKS)
    memory.cache.tensor([3, 5], torch.float32)
    with pytest.raises(RuntimeError, match="fewer tensors"):
        memory.cache.tensor([3, 5], torch.float32)


@on_device
def test_memory_of_another_device_is_not_mapped(memory: KeptMemory) -> None:
    written_on_device(memory)
    device = device_memory()
    device.name = "another"
    memory.use(device)
    assert memory.weights.notes("key") is None


@on_device
def test_memory_of_a_forgotten_cache_is_given_back(memory: KeptMemory) -> None:
    """Before there is another: both may not fit."""
    written_on_device(memory)
    (descriptor,) = memory.cache._descriptors
    memory.cache.forget()
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(descriptor)
    assert memory.cache.id == ""


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


@cpu_only
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
