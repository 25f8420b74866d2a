"""The workers of an engine, one per tensor-parallel rank, behind the `Executor` interface."""

from __future__ import annotations

import asyncio
from array import array
from collections import deque
from collections.abc import Coroutine
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from itertools import chain
from typing import TYPE_CHECKING, Any, TypeVar

import grpc
import numpy as np
import numpy.typing as npt
import structlog
from grpc import aio

from scheduler_svc.engine import WorkersLostError
from scheduler_svc.scheduler import Row, Step
from shared.pb import worker_pb2
from shared.pb.worker_pb2_grpc import WorkerServiceStub

if TYPE_CHECKING:
    from shared.pb.worker_pb2_grpc import WorkerServiceAsyncStub

Answer = TypeVar("Answer")
log = structlog.get_logger(__name__)

_RETRY_S = 0.2
_CHANNEL_OPTIONS = [
    ("grpc.max_receive_message_length", -1),
    ("grpc.max_send_message_length", -1),
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 1000),
]
ExecuteCall = aio.StreamStreamCall[worker_pb2.StepRequest, worker_pb2.StepResponse]


class WorkerMismatchError(Exception):
    """The workers contradict each other or the settings: no retry can help."""


@dataclass(frozen=True)
class WorkerGroup:
    """What all ranks agree on."""

    num_blocks: int  # what the rank with the least memory can hold
    block_size: int
    max_model_len: int
    vocab_size: int
    epoch: int  # the highest that any rank has seen


class WorkerClient:
    """Connects to all ranks, configures them and runs steps on them.

    Args:
        addresses: gRPC addresses in order of rank.
        max_num_seqs, max_num_batched_tokens: limits of a step, passed on to the workers.
    """

    def __init__(self, addresses: Seq[str], max_num_seqs: int, max_num_batched_tokens: int) -> None:
        self._addresses = addresses
        self._max_num_seqs = max_num_seqs
        self._max_num_batched_tokens = max_num_batched_tokens
        self._channels = [aio.insecure_channel(a, options=_CHANNEL_OPTIONS) for a in addresses]
        self._stubs: list[WorkerServiceAsyncStub] = [WorkerServiceStub(c) for c in self._channels]
        self._calls: list[ExecuteCall] = []
        self._num_blocks = 0
        self._block_size = 0
        self._epoch = 0
        self._step_id = 0
        self._sent: deque[tuple[int, int]] = deque()  # steps not answered: id, number of rows

    async def connect(self, num_blocks: int | None = None) -> WorkerGroup:
        """Waits for every rank, however long it loads, and configures them all for one epoch.

        Args:
            num_blocks: size of the cache; None for as much as fits.

        Raises:
            WorkerMismatchError: see there.
        """
        reason = None
        while True:
            try:
                group = await self._configure(num_blocks)
            except aio.AioRpcError as error:
                if error.code() is grpc.StatusCode.INVALID_ARGUMENT:
                    raise WorkerMismatchError(error.details()) from error
                if error.details() != reason:
                    reason = error.details()
                    log.info("waiting for workers", reason=reason)
                await asyncio.sleep(_RETRY_S)
            else:
                log.info("workers ready", epoch=self._epoch, num_blocks=group.num_blocks)
                return group

    async def recover(self) -> None:
        """Starts a new epoch with a cache of the same size as before."""
        for call in self._calls:
            call.cancel()
        await self.connect(self._num_blocks)

    async def send(self, step: Step) -> None:
        self._step_id += 1
        request = encode_step(step, self._block_size, self._epoch, self._step_id)
        await _together([_write(call, request) for call in self._calls])
        self._sent.append((self._step_id, len(step.rows)))

    async def receive(self) -> Seq[int]:
        step_id, num_rows = self._sent.popleft()
        answers = await _together([_read(call) for call in self._calls])
        for answer in answers:
            if answer.step_id != step_id:
                raise WorkersLostError(f"answer to step {answer.step_id}, not {step_id}")
        token_ids: list[int] = np.frombuffer(answers[0].token_ids, "<i4").tolist()
        if len(token_ids) != num_rows:
            raise WorkersLostError(f"{len(token_ids)} tokens for {num_rows} rows")
        return token_ids

    async def close(self) -> None:
        for channel in self._channels:
            await channel.close()

    async def _configure(self, num_blocks: int | None) -> WorkerGroup:
        infos = await asyncio.gather(
            *(s.GetInfo(worker_pb2.GetInfoRequest(), wait_for_ready=True) for s in self._stubs)
        )
        group = agree(infos)
        self._epoch = max(self._epoch, group.epoch) + 1
        self._num_blocks = num_blocks or group.num_blocks
        self._block_size = group.block_size
        self._step_id = 0
        self._sent.clear()
        request = worker_pb2.ConfigureRequest(
            epoch=self._epoch,
            num_blocks=self._num_blocks,
            max_num_seqs=self._max_num_seqs,
            max_num_batched_tokens=self._max_num_batched_tokens,
        )
        # Together: the ranks meet each other in this call.
        await asyncio.gather(*(stub.Configure(request) for stub in self._stubs))
        self._calls = [stub.Execute() for stub in self._stubs]
        return WorkerGroup(
            self._num_blocks, group.block_size, group.max_model_len, group.vocab_size, self._epoch
        )


def agree(infos: Seq[worker_pb2.GetInfoResponse]) -> WorkerGroup:
    """What holds for all ranks; block counts and lengths are the smallest of any.

    Raises:
        WorkerMismatchError: ranks are out of order or missing, or loaded different things.
    """
    for rank, info in enumerate(infos):
        if (info.rank, info.world_size) != (rank, len(infos)):
            raise WorkerMismatchError(
                f"worker_addresses: rank {rank} of {len(infos)} expected at place {rank}, "
                f"found rank {info.rank} of {info.world_size}"
            )
        for name in ("model_fingerprint", "dtype", "block_size", "vocab_size"):
            if getattr(info, name) != getattr(infos[0], name):
                raise WorkerMismatchError(
                    f"{name}: {getattr(infos[0], name)} on rank 0, "
                    f"{getattr(info, name)} on rank {rank}"
                )
    return WorkerGroup(
        num_blocks=min(info.num_blocks for info in infos),
        block_size=infos[0].block_size,
        max_model_len=min(info.max_model_len for info in infos),
        vocab_size=infos[0].vocab_size,
        epoch=max(info.epoch for info in infos),
    )


def encode_step(step: Step, block_size: int, epoch: int, step_id: int) -> worker_pb2.StepRequest:
    """The columns of `worker.proto` for a step: T tokens of S sequences."""
    rows, seqs = step.rows, [row.seq for row in step.rows]
    starts = np.array([row.start for row in rows], np.int32)
    query_lens = np.array([row.num_tokens for row in rows], np.int32)
    context_lens = starts + query_lens
    num_blocks = -(-context_lens // block_size)
    tables = [seq.block_table for seq in seqs]
    if int(num_blocks.sum()) < sum(map(len, tables)):  # a prompt has its later chunks' blocks too
        tables = [table[:n] for table, n in zip(tables, num_blocks.tolist(), strict=True)]
    block_table = b"".join(tables)
    table_offsets = _offsets(num_blocks)

    # positions: start, start + 1, ... of each row, all rows in one go
    first_tokens = _offsets(query_lens)[:-1]
    positions = np.arange(query_lens.sum(), dtype=np.int32)
    positions += np.repeat(starts - first_tokens, query_lens)
    block_index, block_offset = np.divmod(positions, block_size)
    block_index += np.repeat(table_offsets[:-1], query_lens)
    slots = np.frombuffer(block_table, np.int32)[block_index] * block_size + block_offset

    return worker_pb2.StepRequest(
        epoch=epoch,
        step_id=step_id,
        input_ids=array("i", chain.from_iterable(map(_input_ids, rows))).tobytes(),
        positions=positions.tobytes(),
        slot_mapping=slots.astype(np.int32).tobytes(),
        query_lens=query_lens.tobytes(),
        context_lens=context_lens.tobytes(),
        block_table=block_table,
        block_table_offsets=table_offsets.tobytes(),
        samples=bytes([row.samples for row in rows]),
        temperatures=array("f", [seq.params.temperature for seq in seqs]).tobytes(),
        seeds=array("Q", [seq.params.seed for seq in seqs]).tobytes(),
    )


def _offsets(lengths: npt.NDArray[np.int32]) -> npt.NDArray[np.int32]:
    """int32[n+1]: where each of n parts begins, and the end of the last."""
    offsets = np.zeros(len(lengths) + 1, np.int32)
    np.cumsum(lengths, out=offsets[1:])
    return offsets


def _input_ids(row: Row) -> Seq[int]:
    """A token that the step before will sample is -1 - its row there."""
    if row.previous_row is not None:
        return (-1 - row.previous_row,)
    return row.seq.tokens[row.start : row.start + row.num_tokens]


async def _together(calls: Seq[Coroutine[Any, Any, Answer]]) -> Seq[Answer]:
    """`asyncio.gather`, without a task for a lone rank: two fewer turns of the loop per step."""
    if len(calls) == 1:
        return [await calls[0]]
    return await asyncio.gather(*calls)


async def _write(call: ExecuteCall, request: worker_pb2.StepRequest) -> None:
    try:
        await call.write(request)
    except (aio.AioRpcError, asyncio.InvalidStateError) as error:
        raise WorkersLostError(await _reason(call)) from error


async def _read(call: ExecuteCall) -> worker_pb2.StepResponse:
    try:
        response = await call.read()
    except (aio.AioRpcError, asyncio.InvalidStateError) as error:
        raise WorkersLostError(await _reason(call)) from error
    if not isinstance(response, worker_pb2.StepResponse):
        raise WorkersLostError(await _reason(call))
    return response


async def _reason(call: ExecuteCall) -> str:
    return f"{(await call.code()).name}: {await call.details()}"
