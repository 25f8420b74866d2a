"""The workers of an engine, one per rank, behind the `Executor` interface."""

from __future__ import annotations

import asyncio
import time
from array import array
from collections import deque
from collections.abc import Awaitable
from collections.abc import Sequence as Seq
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import grpc
import structlog
from grpc import aio

from nano_vllm_grpc.tls import FileError
from scheduler_svc.block_records import BlockRecords, RecordedCache
from scheduler_svc.core.sampling import SamplingParams
from scheduler_svc.core.sequence import Row, Sequence
from scheduler_svc.core.step import DROPPED, Answer, Step
from scheduler_svc.core.swaps import TierContents, Transfer, TransferAnswer
from scheduler_svc.engine import WorkersLostError
from scheduler_svc.metrics import EngineMetrics
from scheduler_svc.rpc.prompt_graphs import PromptGraphs
from scheduler_svc.rpc.rank_stream import RankStream, together
from scheduler_svc.rpc.step_encoding import encode_step, read_answer
from scheduler_svc.rpc.step_features import MalformedAnswerError
from scheduler_svc.rpc.transfers import Transfers
from scheduler_svc.rpc.worker_group import WorkerGroup, WorkerMismatchError, agree
from scheduler_svc.settings import SchedulerSettings
from shared.backoff import Backoff
from shared.pb import worker_pb2
from shared.pb.worker_pb2_grpc import WorkerServiceStub

if TYPE_CHECKING:
    from shared.pb.worker_pb2_grpc import WorkerServiceAsyncStub

log = structlog.get_logger(__name__)

# Workers that do not serve are asked again after this share of the time so far.
_RETRY_SHARE, _MIN_RETRY_S, _MAX_RETRY_S = 0.2, 0.01, 0.1
_INFO_TIMEOUT_S = 10.0
_MAX_RUN = 4  # steps
# A channel that cannot connect is replaced after that share of the time, and at the latest after
# this long: gRPC waits at least 0.1 s before it connects again, and maybe two minutes before it
# looks up a name again.
_REOPEN_S = 10.0
# Workers that fail at every step are tried again after this long, then twice as long, ...
_MIN_PROOF_RETRY_S, _MAX_PROOF_RETRY_S = 0.5, 10.0
# Shares of `hang_timeout_s`, within which a silent rank is found. The first is the time between
# polls. Once two polls in a row have seen no progress, the second is the time to answer a call.
_POLL_SHARE, _ANSWER_SHARE = 0.12, 0.7


class WorkerClient:
    """Connects to all ranks, configures them and runs steps on them. `stubs` call the ranks.

    Args:
        metrics: counts the epochs.
        records: the cache that they describe may be kept.

    Raises:
        FileError: a certificate file cannot be used.
    """

    def __init__(
        self, settings: SchedulerSettings, metrics: EngineMetrics, records: BlockRecords
    ) -> None:
        self._settings = settings
        self._metrics = metrics
        self._records = records
        self._dialer = settings.dialer
        self._stamp = self._dialer.stamp()
        self._channels = [self._dialer.open(address) for address in settings.worker_addresses]
        self.stubs: list[WorkerServiceAsyncStub] = [WorkerServiceStub(c) for c in self._channels]
        self._opened = time.monotonic()
        self._streams: list[RankStream[worker_pb2.StepRequest, worker_pb2.StepResponse]] = []
        self._transfers: Transfers | None = None
        self._group: WorkerGroup | None = None  # as configured last
        self._graphs = PromptGraphs()
        self._epoch = self._step_id = 0
        self._num_answers = 0
        # The ids of the steps that are not answered yet, and the messages that had them.
        self._sent: deque[tuple[int, worker_pb2.StepRequest]] = deque()

    async def connect(self, *, keep: bool = False) -> tuple[WorkerGroup, bool]:
        """Waits for every rank, however long it loads, then configures all ranks for one epoch. The
        size of the cache never changes.

        Args:
            keep: see `Executor.recover`.

        Returns:
            The ranks, and whether the cache is kept.

        Raises:
            WorkerMismatchError: the ranks contradict each other or the settings.
        """
        reason, began = None, time.monotonic()
        while True:
            try:
                group, kept = await self._configure(keep)
            except aio.AioRpcError as error:
                if error.code() is grpc.StatusCode.INVALID_ARGUMENT:
                    raise WorkerMismatchError(error.details()) from error
                if error.details() != reason:
                    reason = error.details()
                    log.info("waiting for workers", reason=reason)
                share_s = _RETRY_SHARE * (time.monotonic() - began)
                await asyncio.sleep(min(max(share_s, _MIN_RETRY_S), _MAX_RETRY_S))
                await self._reopen_channels(min(share_s, _REOPEN_S))
            else:
                log.info("workers ready", epoch=self._epoch, num_blocks=group.num_blocks)
                return group, kept

    async def recover(self, *, keep: bool) -> bool:
        """Starts a new epoch. Unless the cache is kept, waits until all ranks have run a step in
        it. The step contains no request, so no request is blamed for it."""
        backoff = Backoff(_MIN_PROOF_RETRY_S, _MAX_PROOF_RETRY_S)
        while True:
            self._hang_up()
            _, kept = await self.connect(keep=keep)
            if kept:
                return True
            keep = False
            try:
                await self._prove()
            except WorkersLostError as error:
                log.error("workers fail at every step; configuring them again", reason=str(error))
                await asyncio.sleep(backoff.next_s())
            else:
                return False

    async def watch(self) -> str:
        """Waits until a rank has ended its stream or stopped answering, and returns the reason. A
        step may take long: a worker knows how long one should take, and ends itself if one hangs.
        """
        while True:
            before = self._num_answers
            await asyncio.sleep(_POLL_SHARE * self._settings.hang_timeout_s)
            for stream in self._all_streams:
                if stream.done():
                    return await stream.end_reason()
            if self._num_answers == before and (reason := await self._silent_rank()):
                self._hang_up()
                return reason

    @property
    def max_run(self) -> int:
        # Several ranks would not drop the same steps.
        return _MAX_RUN if len(self.stubs) == 1 else 1

    async def send(self, run: Seq[Step]) -> None:
        assert self._group is not None
        first = self._step_id + 1
        request = encode_step(run[0], self._group.paging, self._epoch, first, len(run))
        has_features = request.HasField("features") or request.HasField("pooling")
        if not (has_features or request.HasField("prompt_logprobs")):
            request.graph = self._graphs.has(run[0], first)
        await together([stream.write(request) for stream in self._streams])
        self._step_id += len(run)
        self._sent.extend((step_id, request) for step_id in range(first, self._step_id + 1))

    async def cut(self) -> None:
        request = worker_pb2.StepRequest(epoch=self._epoch, cut=True)
        await together([stream.write(request) for stream in self._streams])

    async def receive(self) -> Answer:
        step_id, request = self._sent.popleft()
        answers = await together([stream.read() for stream in self._streams])
        for answer in answers:
            if answer.step_id != step_id:
                raise WorkersLostError(f"answer to step {answer.step_id}, not {step_id}")
        self._num_answers += 1
        self._graphs.answered(step_id)
        if answers[0].dropped:
            return DROPPED
        try:
            return read_answer(request, answers[self._sampling_rank])
        except MalformedAnswerError as error:
            raise WorkersLostError(str(error)) from error

    @property
    def _sampling_rank(self) -> int:
        """The rank whose answers have the tokens: the first one of the last stage."""
        assert self._group is not None
        return len(self.stubs) - len(self.stubs) // self._group.num_stages

    async def send_transfer(self, transfer: Transfer) -> None:
        assert self._transfers is not None
        await self._transfers.send(transfer)

    async def receive_transfer(self, *, loads: bool) -> TransferAnswer | TierContents:
        if self._transfers is None:
            await asyncio.get_running_loop().create_future()  # forever
        assert self._transfers is not None
        return await self._transfers.receive(loads=loads)

    async def close(self) -> None:
        for channel in self._channels:
            await channel.close()

    async def _reopen_channels(self, after_s: float) -> None:
        """Reopens all channels if the certificates have changed since they were opened. Otherwise
        reopens the channels that cannot connect, unless some were reopened in the last `after_s`
        seconds."""
        stamp, ranks = self._dialer.stamp(), [*range(len(self._channels))]
        if stamp == self._stamp:
            if time.monotonic() - self._opened < after_s:
                return
            failed = grpc.ChannelConnectivity.TRANSIENT_FAILURE
            ranks = [rank for rank in ranks if self._channels[rank].get_state() is failed]
        try:
            addresses = self._settings.worker_addresses
            channels = {rank: self._dialer.open(addresses[rank]) for rank in ranks}
        except FileError as error:  # perhaps only some are replaced yet; the next call retries
            log.warning("certificates not reloaded; retrying", reason=str(error))
            return
        self._stamp, self._opened = stamp, time.monotonic()
        for rank, channel in channels.items():
            await self._channels[rank].close()
            self._channels[rank], self.stubs[rank] = channel, WorkerServiceStub(channel)

    @property
    def _all_streams(self) -> list[RankStream[Any, Any]]:
        return [*self._streams, *(self._transfers.streams if self._transfers else ())]

    def _hang_up(self) -> None:
        for stream in self._all_streams:
            stream.cancel()

    async def _silent_rank(self) -> str | None:
        """Names a rank that accepts calls but does not answer them, if there is one."""
        timeout_s = _ANSWER_SHARE * self._settings.hang_timeout_s
        answers = await asyncio.gather(*self._ask_info(timeout_s), return_exceptions=True)
        late = grpc.StatusCode.DEADLINE_EXCEEDED
        for rank, answer in enumerate(answers):
            if isinstance(answer, aio.AioRpcError) and answer.code() is late:
                return f"rank {rank} has not answered for {timeout_s:g} s"
        return None

    def _ask_info(self, timeout_s: float) -> list[Awaitable[worker_pb2.GetInfoResponse]]:
        request = worker_pb2.GetInfoRequest()
        return [stub.GetInfo(request, timeout=timeout_s) for stub in self.stubs]

    async def _prove(self) -> None:
        """Makes all ranks run a step of one token, in a block that no sequence uses yet.

        Raises:
            WorkersLostError: a rank fails to run it.
        """
        seq = Sequence((-1, 0), [0], SamplingParams(max_tokens=1, temperature=0.0))
        assert self._group is not None
        seq.blocks.tables = [array("i", [0]) for _ in self._group.paging.tables]
        watching = asyncio.ensure_future(self.watch())
        try:
            row = Row(seq, start=0, num_tokens=1, samples=True)
            await self.send([Step(1, [row], has_features=False)])
            await self.receive()
        finally:
            watching.cancel()

    async def _configure(self, keep: bool) -> tuple[WorkerGroup, bool]:
        settings = self._settings
        infos = await asyncio.gather(*self._ask_info(_INFO_TIMEOUT_S))
        group = agree(infos)
        ids = [info.cache_id for info in infos]
        cache = self._records.cache if keep and all(ids) else None
        found = ids, group.paging, group.model_fingerprint
        if cache and found != (cache.ids, cache.paging, cache.model_fingerprint):
            cache = None
        num_blocks, num_tokens = settings.kv_blocks, settings.max_num_batched_tokens
        if num_blocks == "auto":
            num_blocks = (cache or self._group or group).num_blocks
        if num_tokens == "auto":
            num_tokens = group.max_num_batched_tokens
        self._epoch = max(self._epoch, group.epoch) + 1
        self._step_id = 0
        self._sent.clear()
        self._graphs.begin(settings.max_num_seqs, group.graph_tokens)
        requests = [
            worker_pb2.ConfigureRequest(
                epoch=self._epoch,
                num_blocks=num_blocks,
                max_num_seqs=settings.max_num_seqs,
                max_num_batched_tokens=num_tokens,
                keep_cache_id=cache_id if cache else "",
                graph_tokens=group.graph_tokens,
            )
            for cache_id in ids
        ]
        # At the same time, because the ranks meet each other in this call.
        calls = zip(self.stubs, requests, strict=True)
        configured = await asyncio.gather(*(stub.Configure(each) for stub, each in calls))
        if not cache:
            ids = [each.cache_id for each in configured]
            recorded = RecordedCache(ids, num_blocks, group.paging, group.model_fingerprint)
            self._records.begin(recorded)
        self._streams = [RankStream(stub.Execute()) for stub in self.stubs]
        self._transfers = Transfers(self.stubs, self._epoch) if group.has_tier else None
        self._metrics.epochs += 1
        self._group = replace(group, num_blocks=num_blocks, max_num_batched_tokens=num_tokens)
        return self._group, cache is not None
