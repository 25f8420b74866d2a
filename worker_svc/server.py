"""Implements WorkerService: epochs and streams of steps. `execution` runs the model."""

from __future__ import annotations

import asyncio
import os
import time
import uuid
from collections import deque
from collections.abc import AsyncIterator, Callable
from collections.abc import Sequence as Seq
from contextlib import aclosing
from dataclasses import asdict, replace
from typing import Any

import numpy as np
import structlog
from grpc import aio

from shared.errors import FailedPreconditionError, InvalidArgumentError, UnavailableError
from shared.pb.worker_pb2 import (
    ConfigureRequest,
    ConfigureResponse,
    GetInfoRequest,
    GetInfoResponse,
    ProfileRequest,
    ProfileResponse,
    StepRequest,
    StepResponse,
    TransferRequest,
    TransferResponse,
)
from shared.pb.worker_pb2_grpc import WorkerServiceServicer
from shared.telemetry.tracing import open_tracing
from worker_svc.errors import StartError
from worker_svc.execution import EXIT_DEVICE_LOST, Epoch, Execution, Launch, end_if_device_lost
from worker_svc.kept_memory.memory import KeptMemory
from worker_svc.metrics import WorkerMetrics
from worker_svc.model_runner import ModelRunner
from worker_svc.settings import WorkerSettings
from worker_svc.step.decode import StepLimits, decode_run
from worker_svc.step_result import StepResult
from worker_svc.tier.tier import Tier
from worker_svc.transfers import answer_transfers

log = structlog.get_logger(__name__)

Context = aio.ServicerContext[Any, Any]

# The maximum by which one message may raise the epoch, so that no message uses up all epochs. A new
# process joins the epoch of the other ranks, so its first epoch may be higher.
MAX_EPOCHS_AHEAD = 1 << 32
MAX_FIRST_EPOCH = 1 << 63
# The maximum number of steps of a stream that are received but not answered. Further steps stay
# unread. A scheduler sends one step ahead, or a run of up to four.
MAX_STEPS_AHEAD = 8
_MAX_SPANS = 16  # per step
# Joining the other ranks has its own timeout; allocating and capturing have none.
_MAX_CONFIGURE_S = 600.0


# A step of an Execute stream that has not been answered yet, and its trace contexts.
Running = tuple[Launch, Seq[str]]


class WorkerService(WorkerServiceServicer):
    """Serves one rank.

    Args:
        stop: called when the worker finds that it cannot start, see `check`.
        ready: called when the worker is configured for the first time.
        memory: see `ModelRunner`.
    """

    def __init__(
        self,
        settings: WorkerSettings,
        stop: Callable[[], object] = lambda: None,
        ready: Callable[[], object] | None = None,
        metrics: WorkerMetrics | None = None,
        memory: KeptMemory | None = None,
    ) -> None:
        self._metrics = metrics or WorkerMetrics()
        self._settings = settings
        self._stop = stop
        self._ready = ready
        self._start_error: StartError | None = None
        self.execution = Execution(settings, memory)
        self.tier = Tier(settings)
        self._tracing = open_tracing(settings.otlp_endpoint, "worker", settings.rank)
        self._incarnation = uuid.uuid4().hex
        self._newest_epoch = 0  # the newest requested epoch, which may not be configured yet
        self._epoch: Epoch | None = None

    def check(self) -> None:
        """Raises the error that ended the start, if there was one.

        Raises:
            StartError: the first epoch could not be configured, so no later epoch could be either.
        """
        if self._start_error:
            raise self._start_error

    async def GetInfo(self, request: GetInfoRequest, context: Context) -> GetInfoResponse:
        runner = self._loaded()
        info = runner.info
        return GetInfoResponse(
            rank=self._settings.rank,
            world_size=self._settings.num_ranks,
            num_stages=self._settings.pp,
            device=info.device,
            dtype=info.dtype,
            model_fingerprint=info.fingerprint,
            attention_backend=info.attention_backend,
            **asdict(info.paging),
            num_blocks=info.num_blocks,
            max_model_len=info.max_model_len,
            vocab_size=info.vocab_size,
            incarnation=self._incarnation,
            epoch=self._newest_epoch,
            max_num_batched_tokens=info.max_num_batched_tokens,
            cache_id=runner.cache_id,
            drafts=runner.drafts,
            graph_tokens=info.graph_tokens,
            has_tier=not self.tier.is_off,
        )

    async def Configure(self, request: ConfigureRequest, context: Context) -> ConfigureResponse:
        runner = self._loaded()
        limits = self._limits(request, runner)
        if request.epoch <= self._newest_epoch:
            raise FailedPreconditionError(
                f"epoch: {request.epoch} is not above {self._newest_epoch}, the newest so far"
            )
        newest = self._newest_epoch
        if request.epoch > (limit := newest + MAX_EPOCHS_AHEAD if newest else MAX_FIRST_EPOCH):
            raise InvalidArgumentError("epoch", f"{request.epoch}; the limit is now {limit}")
        self._newest_epoch = request.epoch
        if self._epoch:
            self._epoch.ended = True
        self.tier.end_epoch()
        try:
            await self.execution.between_steps(
                lambda: runner.configure(
                    request.epoch,
                    request.num_blocks,
                    lambda: self._newest_epoch > request.epoch,
                    request.keep_cache_id,
                    request.graph_tokens,
                ),
                f"configuring epoch {request.epoch}",
                _MAX_CONFIGURE_S,
            )
            if request.epoch == self._newest_epoch:
                await self.tier.begin_epoch(runner.cache_blocks(), is_first=request.epoch == 1)
        except StartError as error:
            if request.epoch > 1:  # epoch 1 was configured, so a new process may succeed
                log.error("epoch cannot be configured; ending this process", reason=str(error))
                os._exit(EXIT_DEVICE_LOST)
            else:
                self._start_error = error
                self._stop()
            raise UnavailableError(f"epoch {request.epoch} cannot be configured") from error
        except RuntimeError as error:
            log.error("configure failed", epoch=request.epoch, exc_info=error)
            end_if_device_lost(error)
            raise UnavailableError(f"epoch {request.epoch} cannot be configured") from error
        if request.epoch == self._newest_epoch:
            self._epoch = Epoch(request.epoch, limits)
        if self._ready is not None:
            self._ready()
            self._ready = None
        log.info(
            "epoch configured",
            epoch=request.epoch,
            num_blocks=request.num_blocks,
            cache_kept=bool(request.keep_cache_id),
        )
        return ConfigureResponse(cache_id=runner.cache_id)

    async def Execute(
        self, request_iterator: AsyncIterator[StepRequest], context: Context
    ) -> AsyncIterator[StepResponse]:
        # Steps wait here in order while earlier steps run. None follows the last step.
        running: asyncio.Queue[Running | None] = asyncio.Queue()
        places = asyncio.Semaphore(MAX_STEPS_AHEAD)
        reader = asyncio.create_task(self._read_steps(request_iterator, running, places))
        try:
            while (oldest := await running.get()) is not None:
                yield await self._answer(*oldest)
                places.release()
            await reader
        finally:
            reader.cancel()
            await asyncio.gather(reader, return_exceptions=True)
            while not running.empty():
                if unanswered := running.get_nowait():
                    _forget(unanswered[0].result)

    async def Transfer(
        self, request_iterator: AsyncIterator[TransferRequest], context: Context
    ) -> AsyncIterator[TransferResponse]:
        async for answer in answer_transfers(request_iterator, self.tier, self._current_epoch):
            yield answer

    async def Profile(  # type: ignore[override]  # writes to the context instead of yielding
        self, request: ProfileRequest, context: Context
    ) -> None:
        async with aclosing(self.execution.profile(self._loaded(), request.num_steps)) as pieces:
            async for piece in pieces:
                await context.write(ProfileResponse(trace=piece))

    async def _read_steps(
        self,
        requests: AsyncIterator[StepRequest],
        running: asyncio.Queue[Running | None],
        places: asyncio.Semaphore,
    ) -> None:
        launches: deque[Launch] = deque(maxlen=MAX_STEPS_AHEAD)  # the last ones
        try:
            async for request in requests:
                epoch = self._current_epoch(request.epoch)
                if request.cut:
                    self._drop(launches, epoch)
                    continue
                traceparents = [*request.traceparents[:_MAX_SPANS]]
                for step in decode_run(request, epoch.limits, epoch.last_step):
                    await places.acquire()
                    launch = self.execution.submit(self._loaded(), epoch, step)
                    launches.append(launch)
                    running.put_nowait((launch, traceparents))
                    epoch.last_step = step
        finally:
            running.put_nowait(None)

    async def _answer(self, launch: Launch, traceparents: Seq[str]) -> StepResponse:
        step_id, result = launch.step.step_id, await launch.result
        if result is None:
            return StepResponse(step_id=step_id, dropped=True)
        self._metrics.execution.observe(result.seconds)
        self._metrics.stage_wait_s = launch.runner.stage_wait_s
        if self._tracing:
            began_at = time.monotonic() - result.seconds
            for traceparent in traceparents:
                self._tracing.add("execution", traceparent, began_at, rank=self._settings.rank)
        response = StepResponse(step_id=step_id, step_time_s=result.seconds)
        if self._settings.is_sampling_rank:
            response.token_ids = result.token_ids.tobytes()
            response.logprob_ids = result.logprob_ids.tobytes()
            response.logprob_values = result.logprob_values.tobytes()
            response.draft_ids = result.draft_ids.tobytes()
            response.hidden_states = result.hidden_states.tobytes()
        return response

    def _drop(self, launches: deque[Launch], epoch: Epoch) -> None:
        """Drops the steps that have not begun, the last one first, so that none of them begins
        after a step that was dropped."""
        while launches:
            self.execution.drop(launches.pop())
        if step := epoch.last_step:  # perhaps dropped: the next step cannot take its tokens
            epoch.last_step = replace(step, samples=np.zeros_like(step.samples))

    def _current_epoch(self, number: int) -> Epoch:
        if self._epoch is None:
            raise FailedPreconditionError("epoch: none is configured")
        if number != self._epoch.number:
            raise FailedPreconditionError(f"epoch: {number}, the current is {self._epoch.number}")
        if self._epoch.ended:
            raise FailedPreconditionError(f"epoch: {number} has ended")
        return self._epoch

    def _loaded(self) -> ModelRunner:
        if self.execution.runner is None:
            raise UnavailableError("the model is still loading")
        return self.execution.runner

    def _limits(self, request: ConfigureRequest, runner: ModelRunner) -> StepLimits:
        maxima = {
            # The limit is not `num_blocks`, an estimate that varies from start to start: an engine
            # that lost a worker requests as many blocks as before. But there must be a limit. A CPU
            # can promise more memory than it has, and the process is killed when it uses too much.
            "num_blocks": runner.info.max_num_blocks,
            "max_num_seqs": self._settings.max_num_seqs,
            "max_num_batched_tokens": runner.info.max_num_batched_tokens,
        }
        for field, limit in maxima.items():
            value = getattr(request, field)
            if not 1 <= value <= limit:
                raise InvalidArgumentError(field, f"{value} is not in 1..{limit}")
        if not 0 <= request.graph_tokens <= (limit := runner.info.graph_tokens):
            # A worker that was started again meanwhile may have measured less.
            raise FailedPreconditionError(
                f"graph_tokens: {request.graph_tokens} is not in 0..{limit}"
            )
        return StepLimits(
            vocab_size=runner.info.vocab_size,
            num_blocks=request.num_blocks,
            paging=runner.info.paging,
            max_num_seqs=request.max_num_seqs,
            max_num_batched_tokens=request.max_num_batched_tokens,
            max_model_len=runner.info.max_model_len,
            drafts=runner.drafts,
            graph_tokens=request.graph_tokens,
        )


def _forget(result: asyncio.Future[StepResult | None]) -> None:
    """Discards a result or an error that nobody will read."""
    if not result.cancel() and not result.cancelled():
        result.exception()
