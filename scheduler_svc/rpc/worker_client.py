"""The workers of an engine, one per tensor-parallel rank, behind the `Executor` interface."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Coroutine
from collections.abc import Sequence as Seq
from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypeVar

import grpc
import structlog
from grpc import aio

from nano_vllm_grpc.tls import FileError
from scheduler_svc.core.sampling import SamplingParams
from scheduler_svc.core.sequence import Row, Sequence
from scheduler_svc.core.step import Answer, Step
from scheduler_svc.engine import WorkersLostError
from scheduler_svc.metrics import EngineMetrics
from scheduler_svc.rpc import profiles
from scheduler_svc.rpc.execute_stream import ExecuteStream
from scheduler_svc.rpc.step_encoding import MalformedAnswerError, encode_step, read_answer
from scheduler_svc.rpc.worker_group import WorkerGroup, WorkerMismatchError, agree
from shared.backoff import Backoff
from shared.channels import PLAINTEXT, Dialer
from shared.pb import worker_pb2
from shared.pb.worker_pb2_grpc import WorkerServiceStub

if TYPE_CHECKING:
    from shared.pb.worker_pb2_grpc import WorkerServiceAsyncStub

log = structlog.get_logger(__name__)

Result = TypeVar("Result")

_RETRY_S = 0.1
_INFO_TIMEOUT_S = 10.0
# A channel that cannot connect is replaced after this long, because gRPC may wait two minutes
# before it looks up a name again.
_REOPEN_S = 10.0
# Workers that fail at every step are tried again after this long, then twice as long, ...
_MIN_PROOF_RETRY_S, _MAX_PROOF_RETRY_S = 0.5, 10.0
# Shares of `hang_timeout_s`, within which a silent rank is found. The first is the time between
# polls. Once two polls in a row have seen no progress, the second is the time to answer a call.
_POLL_SHARE, _ANSWER_SHARE = 0.12, 0.7


class WorkerClient:
    """Connects to all ranks, configures them and runs steps on them.

    Args:
        addresses: gRPC addresses in order of rank.
        max_num_seqs: of a step, sent to the workers.
        max_num_batched_tokens: of a step, sent to the workers; None: as the workers report.
        hang_timeout_s: a rank that stays silent this long is lost.
        dialer: opens the channels.
        metrics: the metrics that count epochs.

    Raises:
        FileError: a certificate file cannot be used.
    """

    def __init__(
        self,
        addresses: Seq[str],
        max_num_seqs: int,
        max_num_batched_tokens: int | None,
        hang_timeout_s: float,
        dialer: Dialer = PLAINTEXT,
        metrics: EngineMetrics | None = None,
    ) -> None:
        self._addresses = addresses
        self._dialer = dialer
        self._max_num_seqs = max_num_seqs
        self._max_num_batched_tokens = max_num_batched_tokens
        self._hang_timeout_s = hang_timeout_s
        self._stamp = dialer.stamp()
        self._channels = [dialer.open(address) for address in addresses]
        self._stubs: list[WorkerServiceAsyncStub] = [WorkerServiceStub(c) for c in self._channels]
        self._opened = time.monotonic()
        self._streams: list[ExecuteStream] = []
        self._num_blocks = 0
        self._block_size = 0
        self._epoch = 0
        self._step_id = 0
        self._num_answers = 0
        self._metrics = metrics or EngineMetrics()
        self._sent: deque[worker_pb2.StepRequest] = deque()  # not answered yet

    async def connect(self, num_blocks: int | None = None) -> WorkerGroup:
        """Waits for every rank, however long it loads, then configures all ranks for one epoch.

        Args:
            num_blocks: size of the cache; None: as large as fits.

        Raises:
            WorkerMismatchError: the ranks contradict each other or the settings.
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
                await self._reopen_channels()
            else:
                log.info("workers ready", epoch=self._epoch, num_blocks=group.num_blocks)
                return group

    async def recover(self) -> None:
        """Starts a new epoch with a cache of the same size as before, and waits until all ranks
        have run a step in it. That step contains no request, so no request is blamed for it."""
        backoff = Backoff(_MIN_PROOF_RETRY_S, _MAX_PROOF_RETRY_S)
        while True:
            self._hang_up()
            await self.connect(self._num_blocks)
            try:
                await self._prove()
            except WorkersLostError as error:
                log.error("workers fail whatever they are asked", reason=str(error))
                await asyncio.sleep(backoff.next_s())
            else:
                return

    async def watch(self) -> str:
        """Waits until a rank has ended its stream or stopped answering, and returns the reason. A
        step may take long: a worker knows how long one should take, and ends itself if one hangs.
        """
        while True:
            before = self._num_answers
            await asyncio.sleep(_POLL_SHARE * self._hang_timeout_s)
            for stream in self._streams:
                if stream.done():
                    return await stream.end_reason()
            if self._num_answers == before and (reason := await self._silent_rank()):
                self._hang_up()
                return reason

    async def send(self, step: Step) -> None:
        self._step_id += 1
        request = encode_step(step, self._block_size, self._epoch, self._step_id)
        await _together([stream.write(request) for stream in self._streams])
        self._sent.append(request)

    async def receive(self) -> Answer:
        request = self._sent.popleft()
        answers = await _together([stream.read() for stream in self._streams])
        for answer in answers:
            if answer.step_id != request.step_id:
                raise WorkersLostError(f"answer to step {answer.step_id}, not {request.step_id}")
        self._num_answers += 1
        try:
            return read_answer(request, answers[0])
        except MalformedAnswerError as error:
            raise WorkersLostError(str(error)) from error

    async def start_profile(self, request: worker_pb2.StartProfileRequest) -> list[str]:
        return await profiles.start_profile(self._stubs, request)

    async def stop_profile(self) -> list[str]:
        return await profiles.stop_profile(self._stubs)

    async def close(self) -> None:
        for channel in self._channels:
            await channel.close()

    async def _reopen_channels(self) -> None:
        """Reopens all channels if the certificates have changed since they were opened. Otherwise
        reopens the channels that cannot connect, every `_REOPEN_S`."""
        stamp, replaced = self._dialer.stamp(), [*range(len(self._channels))]
        if stamp == self._stamp:
            if time.monotonic() - self._opened < _REOPEN_S:
                return
            replaced = [rank for rank in replaced if _cannot_connect(self._channels[rank])]
        try:
            channels = {rank: self._dialer.open(self._addresses[rank]) for rank in replaced}
        except FileError as error:  # perhaps only some are replaced yet; the next call retries
            log.warning("certificates not reloaded", reason=str(error))
            return
        self._stamp, self._opened = stamp, time.monotonic()
        for rank, channel in channels.items():
            await self._channels[rank].close()
            self._channels[rank], self._stubs[rank] = channel, WorkerServiceStub(channel)

    def _hang_up(self) -> None:
        for stream in self._streams:
            stream.cancel()

    async def _silent_rank(self) -> str | None:
        """Names a rank that accepts calls but does not answer them, if there is one."""
        timeout_s = _ANSWER_SHARE * self._hang_timeout_s
        request = worker_pb2.GetInfoRequest()
        answers = await asyncio.gather(
            *(stub.GetInfo(request, timeout=timeout_s) for stub in self._stubs),
            return_exceptions=True,
        )
        for rank, answer in enumerate(answers):
            late = isinstance(answer, aio.AioRpcError) and (
                answer.code() is grpc.StatusCode.DEADLINE_EXCEEDED
            )
            if late:
                return f"rank {rank} answers nothing for {timeout_s:g} s"
        return None

    async def _prove(self) -> None:
        """Makes all ranks run a step of one token, in a block that no sequence uses yet.

        Raises:
            WorkersLostError: a rank fails to run it.
        """
        seq = Sequence((-1, 0), [0], SamplingParams(max_tokens=1, temperature=0.0))
        seq.block_table.append(0)
        watching = asyncio.ensure_future(self.watch())
        try:
            await self.send(
                Step(1, [Row(seq, start=0, num_tokens=1, samples=True)], has_features=False)
            )
            await self.receive()
        finally:
            watching.cancel()

    async def _configure(self, num_blocks: int | None) -> WorkerGroup:
        request_info = worker_pb2.GetInfoRequest()
        infos = await asyncio.gather(
            *(stub.GetInfo(request_info, timeout=_INFO_TIMEOUT_S) for stub in self._stubs)
        )
        group = agree(infos)
        self._epoch = max(self._epoch, group.epoch) + 1
        self._num_blocks = num_blocks or group.num_blocks
        self._block_size = group.block_size
        self._step_id = 0
        self._sent.clear()
        max_num_batched_tokens = self._max_num_batched_tokens or group.max_num_batched_tokens
        request = worker_pb2.ConfigureRequest(
            epoch=self._epoch,
            num_blocks=self._num_blocks,
            max_num_seqs=self._max_num_seqs,
            max_num_batched_tokens=max_num_batched_tokens,
        )
        # At the same time, because the ranks meet each other in this call.
        await asyncio.gather(*(stub.Configure(request) for stub in self._stubs))
        self._streams = [ExecuteStream(stub) for stub in self._stubs]
        self._metrics.epochs += 1
        return replace(
            group,
            num_blocks=self._num_blocks,
            max_num_batched_tokens=max_num_batched_tokens,
            epoch=self._epoch,
        )


def _cannot_connect(channel: aio.Channel) -> bool:
    return channel.get_state() is grpc.ChannelConnectivity.TRANSIENT_FAILURE


async def _together(calls: Seq[Coroutine[Any, Any, Result]]) -> Seq[Result]:
    """`asyncio.gather`, but without a task for a lone rank, which saves two loop iterations."""
    if len(calls) == 1:
        return [await calls[0]]
    return await asyncio.gather(*calls)
