"""Watchers of the prefix cache over real gRPC: their number, and the events they receive."""

from __future__ import annotations

from pathlib import Path

import grpc
import pytest
from google.rpc import error_details_pb2, status_pb2
from grpc import aio

from scheduler_svc.block_records import BlockRecords
from scheduler_svc.block_watch import MAX_WATCHES
from scheduler_svc.core.blocks import block_manager
from scheduler_svc.core.blocks.block_manager import BlockManager
from scheduler_svc.core.blocks.cache_listener import StoredBlock
from scheduler_svc.core.sampling import SamplingParams
from scheduler_svc.core.sequence import Sequence
from shared.pb import scheduler_pb2 as pb
from tests.fake_worker import FakeWorker
from tests.scheduler_svc.stacks import Stack, stack_of
from tests.turns import counting_turns

BLOCK, AT_ONCE = 4, 512
Call = aio.UnaryStreamCall[pb.WatchBlocksRequest, pb.BlockEvents]


@pytest.fixture
def caches(monkeypatch: pytest.MonkeyPatch) -> list[BlockManager]:
    """The caches of the schedulers that run in this process."""
    made: list[BlockManager] = []

    make = BlockRecords.block_manager

    def noted(records: BlockRecords, num_blocks: int, block_size: int) -> BlockManager:
        made.append(make(records, num_blocks, block_size))
        return made[-1]

    monkeypatch.setattr(BlockRecords, "block_manager", noted)
    return made


def compute(blocks: BlockManager, prompt: list[int]) -> bytes:
    """Has a prompt computed and ended; returns the last block's name."""
    seq = Sequence((0, 0), prompt, SamplingParams(max_tokens=1))
    assert blocks.allocate_prompt(seq)
    seq.begin_at(len(prompt))
    blocks.advance(seq)
    blocks.free(seq)
    return seq.blocks.names[0][-1]


def fill(blocks: BlockManager) -> None:
    for number in range(blocks.num_blocks // 32):
        compute(blocks, [number] * BLOCK * 32)


def watch(stack: Stack) -> Call:
    return stack.stub.WatchBlocks(pb.WatchBlocksRequest(), wait_for_ready=True)


async def test_one_watcher_too_many_is_refused_until_another_goes(tmp_path: Path) -> None:
    async with stack_of(tmp_path, FakeWorker()) as stack:
        watches = [watch(stack) for _ in range(MAX_WATCHES)]
        for each in watches:
            assert (await each.read()).HasField("snapshot")
        with pytest.raises(aio.AioRpcError) as caught:
            await watch(stack).read()
        error = caught.value
        assert error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert error.details() == f"{MAX_WATCHES} callers watch the prefix cache, and no more may"
        assert retry_after_s(error) > 0
        watches[3].cancel()
        while await is_refused(watch(stack)):
            pass  # until the scheduler has noticed


async def is_refused(call: Call) -> bool:
    try:
        await call.read()
    except aio.AioRpcError as error:
        return error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    return False


def retry_after_s(error: aio.AioRpcError) -> float:
    trailers = dict(error.trailing_metadata() or ())
    (detail,) = status_pb2.Status.FromString(trailers["grpc-status-details-bin"]).details
    retry = error_details_pb2.RetryInfo()
    assert detail.Unpack(retry)
    return retry.retry_delay.ToTimedelta().total_seconds()


async def test_snapshots_for_many_take_little_of_each_turn(
    tmp_path: Path, caches: list[BlockManager], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A turn makes one message."""
    with counting_turns() as turns:

        class Counted(StoredBlock):
            @property
            def parent(self) -> bytes | None:  # type: ignore[override]
                turns.done(1)
                return self[1]

        monkeypatch.setattr(block_manager, "StoredBlock", Counted)
        async with stack_of(tmp_path, FakeWorker(num_blocks=16 * AT_ONCE)) as stack:
            await stack.load()
            fill(caches[0])
            watches = [watch(stack) for _ in range(4)]
            for each in watches:
                for _ in range(16):
                    assert len((await each.read()).events) == AT_ONCE
        assert turns.total == len(watches) * 16 * AT_ONCE
        assert turns.max <= 2 * AT_ONCE
