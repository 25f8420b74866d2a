"""Transfers over real gRPC, beside the steps of a small model."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import structlog
import torch

from shared.pb import worker_pb2
from tests.waiting import until
from tests.worker_svc.harness import save_model, worker_settings
from tests.worker_svc.serving import (
    INVALID,
    NUM_BLOCKS,
    PRECONDITION,
    Worker,
    end_of,
    rejected,
    running,
)
from worker_svc.errors import StartError
from worker_svc.model_runner import ModelRunner
from worker_svc.tier import tier as tier_module
from worker_svc.tier.directory import BlockDirectory

SAVE, LOAD, ERASE = worker_pb2.TransferKind.values()[1:]


class Client:
    """A stream of transfers of an epoch."""

    def __init__(self, worker: Worker, epoch: int) -> None:
        self.call: Any = worker.stub.Transfer()
        self._epoch = epoch
        self._last = 0

    async def contents(self) -> tuple[list[bytes], int]:
        answer = await self.call.read()
        assert answer.transfer_id == 0
        return [answer.names[i : i + 16] for i in range(0, len(answer.names), 16)], answer.capacity

    async def send(self, kind: int, names: Sequence[int], blocks: Sequence[int]) -> None:
        self._last += 1
        await self.call.write(
            worker_pb2.TransferRequest(
                epoch=self._epoch,
                transfer_id=self._last,
                kind=kind,
                names=b"".join(bytes([each]) * 16 for each in names),
                blocks=np.array(blocks, "<i4").tobytes(),
            )
        )

    async def make(self, kind: int, names: Sequence[int], blocks: Sequence[int] = ()) -> list[bool]:
        await self.send(kind, names, blocks)
        answer = await self.call.read()
        assert answer.transfer_id == self._last
        self.capacity = answer.capacity
        return [bool(each) for each in answer.done]


@pytest.fixture
async def worker(tiny_dir: Path, tmp_path: Path) -> AsyncIterator[Worker]:
    cache_dir = str(tmp_path / "blocks")
    async with running(tiny_dir, tmp_path, cache_dir=cache_dir, block_size=16) as started:
        await started.service.execution.load()
        yield started
        started.service.tier.close()


def cache(worker: Worker) -> torch.Tensor:
    """All of the cache, by block."""
    runner = worker.service.execution.runner
    assert runner is not None
    blocks = runner.cache_blocks()
    buffer = blocks.buffer()
    found = []
    for block in range(blocks.num_blocks):
        blocks.read(block, buffer)
        found.append(buffer.clone())
    return torch.stack(found)


async def test_blocks_are_saved_loaded_and_erased(worker: Worker) -> None:
    batch = await worker.configure(1)
    call = await worker.execute(batch.request([(0, [*range(1, 41)])]))
    await call.read()
    before = cache(worker)
    client = Client(worker, 1)
    assert await client.contents() == ([], worker.service.tier._directory.capacity)
    assert await client.make(SAVE, [1, 2], [0, 1]) == [True, True]
    assert await client.make(LOAD, [2, 1, 3, 1], [9, 11, 10, 12]) == [True, True, False, False]
    after = cache(worker)
    assert (after[9] == before[1]).all()
    assert (after[11] == before[0]).all()
    others = [block for block in range(NUM_BLOCKS) if block not in (9, 11)]
    assert (after[others] == before[others]).all()
    assert await client.make(ERASE, [1, 3]) == [True, True]
    assert await client.make(LOAD, [2, 1], [12, 13]) == [True, False]
    client.call.cancel()

    await worker.configure(2)
    names, _ = await Client(worker, 2).contents()
    assert names == [bytes([2]) * 16]


async def test_malformed_transfers_and_those_of_other_epochs_end_the_stream(
    worker: Worker,
) -> None:
    await worker.configure(1)
    for kind, names, blocks, text in (
        (SAVE, [1], [], "blocks"),
        (LOAD, [1], [NUM_BLOCKS], "blocks"),
        (SAVE, [1], [-1], "blocks"),
        (ERASE, [1], [1], "blocks"),
        (7, [1], [1], "kind"),
    ):
        client = Client(worker, 1)
        await client.contents()
        await client.send(kind, names, blocks)
        assert text in await rejected(end_of(client.call), INVALID)
    client = Client(worker, 3)
    await client.contents()
    await client.send(ERASE, [1], [])
    await rejected(end_of(client.call), PRECONDITION)


async def test_a_load_of_an_older_epoch_writes_nothing(
    worker: Worker, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun, go = threading.Event(), threading.Event()
    load = BlockDirectory.load

    def held(*args: Any) -> bool:
        begun.set()
        assert go.wait(30)
        return load(*args)

    await worker.configure(1)
    client = Client(worker, 1)
    await client.contents()
    assert await client.make(SAVE, [1], [0]) == [True]
    monkeypatch.setattr(BlockDirectory, "load", held)
    monkeypatch.setattr(tier_module, "_MAX_BLOCK_S", 30.0)
    await client.send(LOAD, [1], [5])
    await until(begun.is_set, "the load")
    await worker.configure(2)
    before = cache(worker)
    go.set()
    assert not any((await client.call.read()).done)
    assert (cache(worker) == before).all()


@pytest.mark.parametrize("fault", ["full", "slow"])
async def test_a_full_or_slow_disk_turns_the_tier_off_with_one_line(
    worker: Worker, monkeypatch: pytest.MonkeyPatch, fault: str
) -> None:
    release = threading.Event()

    def save(*_: object) -> None:
        if fault == "slow":
            assert release.wait(30)
        raise OSError(28, "no space left on device")

    await worker.configure(1)
    client = Client(worker, 1)
    await client.contents()
    assert await client.make(SAVE, [1], [0]) == [True]
    monkeypatch.setattr(BlockDirectory, "save", save)
    monkeypatch.setattr(tier_module, "_MAX_BLOCK_S", 0.1 if fault == "slow" else 30.0)
    with structlog.testing.capture_logs() as logs:
        assert await client.make(SAVE, [2, 3], [1, 2]) == [False, False]
        assert client.capacity == 0
        for kind, names in ((LOAD, [1]), (SAVE, [4])):
            assert await client.make(kind, names, [5]) == [False]
        release.set()
    (line,) = [each for each in logs if "cache_dir" in each["event"]]
    assert ("no space" if fault == "full" else "0.1 s") in line["reason"]
    await worker.check_next_epoch(2)
    assert await Client(worker, 2).contents() == ([], 0)


async def test_a_directory_that_cannot_be_listed_in_time_is_turned_off(
    worker: Worker, monkeypatch: pytest.MonkeyPatch
) -> None:
    release = threading.Event()
    monkeypatch.setattr(BlockDirectory, "find", lambda _: [] if release.wait(30) else None)
    monkeypatch.setattr(tier_module, "_MAX_LIST_S", 0.1)
    await worker.configure(1)
    with structlog.testing.capture_logs() as logs:
        assert await Client(worker, 1).contents() == ([], 0)
        assert await Client(worker, 1).contents() == ([], 0)
    release.set()
    (line,) = [each for each in logs if "cache_dir" in each["event"]]
    assert "0.1 s" in line["reason"]


async def test_saves_are_paced_and_loads_do_not_wait_for_them(
    worker: Worker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The sum of all pauses is what the rate allows."""
    pauses: list[float] = []
    sleep, open_gate = asyncio.sleep, asyncio.Event()

    async def paused(seconds: float) -> None:
        pauses.append(seconds)
        await (open_gate.wait() if seconds > 0.5 else sleep(0))

    await worker.configure(1)
    client = Client(worker, 1)
    await client.contents()
    assert await client.make(SAVE, [1], [0]) == [True]
    monkeypatch.setattr(tier_module.asyncio, "sleep", paused)
    tier = worker.service.tier
    size = tier._blocks.block_bytes
    tier._settings = tier._settings.model_copy(update={"cache_dir_mb_per_s": size / 1e6})
    await client.send(SAVE, [2, 3, 4], [1, 2, 3])
    loads = Client(worker, 1)
    await loads.contents()
    assert await loads.make(LOAD, [1], [7]) == [True]  # answered before the save
    open_gate.set()
    assert list((await client.call.read()).done) == [1, 1, 1]
    assert sum(each > 0.5 for each in pauses) == 2
    assert pauses[-1] == pytest.approx(2, abs=0.5)


@pytest.mark.parametrize(
    ("kind", "overrides"),
    [
        ("plain", {}),
        ("int8", {"kv_dtype": "int8"}),
        ("windows", {"kv_dtype": "int8"}),
    ],
)
def test_a_restored_cache_gives_the_same_bits(
    tmp_path: Path, kind: str, overrides: dict[str, Any]
) -> None:
    """Keys, values, scales and token ids, of models with one block table and with two."""
    from transformers import Gemma3ForCausalLM, Qwen3ForCausalLM

    shape: dict[str, Any] = {}
    if kind == "windows":
        layers = ["sliding_attention", "sliding_attention", "full_attention"]
        shape = {"sliding_window": 32, "layer_types": layers}
    save_model(tmp_path, family=Gemma3ForCausalLM if shape else Qwen3ForCausalLM, **shape)
    settings = worker_settings(tmp_path, block_size=16, max_num_seqs=4, **overrides)
    runner = ModelRunner(settings)
    runner.configure(1, NUM_BLOCKS)
    blocks = runner.cache_blocks()
    rng = np.random.default_rng(0)
    for half in [*runner._model.tensors, runner._tokens.slots]:
        data = half.view(torch.uint8)
        data.copy_(torch.from_numpy(rng.integers(0, 256, data.shape, np.uint8)))
    before = [each.clone() for each in (*runner._model.tensors, runner._tokens.slots)]
    buffers = [blocks.buffer() for _ in range(NUM_BLOCKS)]
    for block, buffer in enumerate(buffers):
        blocks.read(block, buffer)
    for each in (*runner._model.tensors, runner._tokens.slots):
        each.zero_()
    for block, buffer in enumerate(buffers):
        blocks.write(block, buffer)
    for each, expected in zip((*runner._model.tensors, runner._tokens.slots), before, strict=True):
        assert (each.view(torch.uint8) == expected.view(torch.uint8)).all()
    assert NUM_BLOCKS * blocks.block_bytes == sum(each.numel() * each.itemsize for each in before)


def test_a_key_names_all_that_bits_depend_on(tiny_dir: Path, tmp_path: Path) -> None:
    save_model(tmp_path, rope_theta=5e5)

    def key(model: Path = tiny_dir, **overrides: Any) -> str:
        runner = ModelRunner(worker_settings(model, **overrides))
        runner.configure(1, NUM_BLOCKS)
        return runner.cache_blocks().key()

    keys = [
        key(),
        key(tmp_path),
        key(kv_dtype="int8"),
        key(block_size=32),
        key(dtype="bfloat16"),
        key(quantization="int8"),
    ]
    assert len(set(keys)) == len(keys)
    assert keys[0] == key() == key(max_num_seqs=4, kv_blocks=100)


async def test_an_impossible_directory_ends_the_start(tiny_dir: Path, tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.touch()
    async with running(tiny_dir, tmp_path, cache_dir=str(file / "below")) as worker:
        await worker.service.execution.load()
        with pytest.raises(Exception, match="epoch 1 cannot be configured"):
            await worker.configure(1)
        with pytest.raises(StartError, match="cache_dir: "):
            worker.service.check()
