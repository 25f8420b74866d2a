"""The workers of an engine, one per tensor-parallel rank, behind the `Executor` interface."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Coroutine
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

import grpc
import structlog
from grpc import aio

from scheduler_svc.engine import WorkersLostError
from scheduler_svc.step import Answer, Step
from scheduler_svc.step_encoding import MalformedAnswerError, encode_step, read_answer
from shared.pb import worker_pb2
from shared.pb.worker_pb2_grpc import WorkerServiceStub

if TYPE_CHECKING:
    from shared.pb.worker_pb2_grpc import WorkerServiceAsyncStub

Result = TypeVar("Result")
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
        self._sent: deque[worker_pb2.StepRequest] = deque()  # not answered

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
        self._sent.append(request)

    async def receive(self) -> Answer:
        request = self._sent.popleft()
        answers = await _together([_read(call) for call in self._calls])
        for answer in answers:
            if answer.step_id != request.step_id:
                raise WorkersLostError(f"answer to step {answer.step_id}, not {request.step_id}")
        try:
            return read_answer(request, answers[0])
        except MalformedAnswerError as error:
            raise WorkersLostError(str(error)) from error

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


async def _together(calls: Seq[Coroutine[Any, Any, Result]]) -> Seq[Result]:
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
