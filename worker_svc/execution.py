"""Runs a model on threads that a hang watch observes."""

from __future__ import annotations

import asyncio
import os
import threading
import time
from collections import deque
from collections.abc import AsyncGenerator, Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from typing import TypeVar

import structlog

from shared.errors import FailedPreconditionError, InternalError
from worker_svc.errors import CaptureError, RanksLostError, SupersededError, is_device_lost
from worker_svc.hang_watch import HangWatch
from worker_svc.kept_memory.memory import KeptMemory
from worker_svc.model_runner import ModelRunner
from worker_svc.profiling.profiler import Profiler
from worker_svc.ranks.distributed import COLLECTIVE_TIMEOUT
from worker_svc.settings import WorkerSettings
from worker_svc.step.arrays import StepArrays
from worker_svc.step.decode import StepLimits
from worker_svc.step_result import PendingStep, StepResult

log = structlog.get_logger(__name__)

Result = TypeVar("Result")

EXIT_DEVICE_LOST = 70  # EX_SOFTWARE of sysexits.h
_MAX_LAUNCHED = 2  # steps on the device: one that runs, and the next
_ANY_NUMBER = 1 << 30
_MAX_PROFILE_S = 60.0  # to start a profile, or to write a piece of it


@dataclass
class Epoch:
    """A configuration of the model runner and the last step received in it."""

    number: int
    limits: StepLimits
    last_step: StepArrays | None = None  # has been received, but may not have run yet
    ended: bool = False  # a newer epoch or a failed step ends it


@dataclass(frozen=True, eq=False)
class Launch:
    """A step that waits for its turn, runs or has run."""

    runner: ModelRunner
    epoch: Epoch
    step: StepArrays
    result: asyncio.Future[StepResult | None]  # None: it was dropped


class Execution:
    """Loads, configures and runs a model without blocking the RPC loop.

    One thread launches the steps in turn, so that the RPC loop can answer health checks and GetInfo
    meanwhile. Another thread waits for the tokens, so that on a GPU a step can be launched before
    the previous step is done. More than one step ahead would keep a new prompt waiting.
    """

    def __init__(self, settings: WorkerSettings, memory: KeptMemory | None = None) -> None:
        self._memory = memory
        self.runner: ModelRunner | None = None  # None until the model is loaded
        self._settings = settings
        self._waiting: deque[Launch] = deque()  # for their turn; threads take from both ends
        # Several ranks run no runs, and a new epoch must not wait for what hangs in a collective.
        self._room = threading.Semaphore(_MAX_LAUNCHED if settings.num_ranks == 1 else _ANY_NUMBER)
        self._launches = ThreadPoolExecutor(1, thread_name_prefix="execution")
        self._results = ThreadPoolExecutor(1, thread_name_prefix="results")
        self._watch = HangWatch(settings.hang_timeout_s, self._waits_for_ranks, self._compiles)
        self._profiler = Profiler()
        self._min_step_s = 0.0

    async def load(self) -> None:
        """Loads the model and warms it up.

        Raises:
            StartError: the model or the settings cannot be served.
        """
        loop = asyncio.get_running_loop()
        self.runner = await loop.run_in_executor(
            self._launches, lambda: ModelRunner(self._settings, memory=self._memory)
        )
        if self._settings.num_ranks > 1 and self.runner.info.device != "cpu":
            # On GPUs, a collective waits on the device. The host cannot tell which rank hangs.
            self._min_step_s = self._settings.pp * COLLECTIVE_TIMEOUT.total_seconds()
        self._watch.start()

    def close(self) -> None:
        """Drops waiting steps and returns when the running step has ended."""
        self._watch.stop()
        self._waiting.clear()
        self._launches.shutdown(cancel_futures=True)
        self._results.shutdown(cancel_futures=True)
        self._profiler.close()

    async def profile(self, runner: ModelRunner, num_steps: int) -> AsyncGenerator[bytes]:
        """Records the steps after those submitted so far -> the pieces of a gzip file.

        Raises:
            ServiceError: as `Profiler.start`, or a piece cannot be made.
        """
        loop, pieces = asyncio.get_running_loop(), asyncio.Queue[Future[bytes] | None]()

        def send(piece: Future[bytes] | None) -> None:
            loop.call_soon_threadsafe(pieces.put_nowait, piece)

        def start() -> None:
            self._profiler.start(num_steps, runner.info.device, send)

        try:
            await self.between_steps(start, "starting a profile", _MAX_PROFILE_S)
            while (piece := await pieces.get()) is not None:
                yield await asyncio.wrap_future(piece)
        finally:
            with suppress(RuntimeError):  # the process ends
                self._launches.submit(self._profiler.stop, send)

    async def between_steps(self, run: Callable[[], Result], what: str, max_s: float) -> Result:
        """Calls `run` after the steps submitted so far. `what` describes it for the hang watch, and
        `max_s` is the maximum time that it may take."""

        def watched() -> Result:
            with self._watch.doing(what, max_s):
                return run()

        return await asyncio.get_running_loop().run_in_executor(self._launches, watched)

    def submit(self, runner: ModelRunner, epoch: Epoch, step: StepArrays) -> Launch:
        """Runs `step` after the steps submitted before it, unless its result is cancelled or it is
        dropped before its turn.

        The result may raise:
            FailedPreconditionError: the epoch has ended.
            InternalError: the step failed, which ends the epoch.
        """
        launch = Launch(runner, epoch, step, asyncio.get_running_loop().create_future())
        self._waiting.append(launch)
        self._launches.submit(self._launch_next)
        return launch

    def drop(self, launch: Launch) -> None:
        """Drops a step unless it has begun."""
        with suppress(ValueError):
            self._waiting.remove(launch)
            launch.result.set_result(None)

    def _launch_next(self) -> None:
        """Launches the next step on the execution thread, once there is room for it."""
        self._room.acquire()
        launched = False
        try:
            with suppress(IndexError):  # it was dropped
                launched = self._launch(self._waiting.popleft())
        finally:
            if not launched:
                self._room.release()

    def _launch(self, launch: Launch) -> bool:
        """Launches a step -> whether it is still running. Then the results thread sets its result.
        Otherwise the result is set."""
        runner, epoch, step, result = launch.runner, launch.epoch, launch.step, launch.result
        if result.cancelled():
            return False
        running = False
        try:
            if epoch.ended:
                raise FailedPreconditionError(f"epoch: {epoch.number} has ended")
            started = time.monotonic()
            with self._watch.running(step, self._min_step_s), self._profiler.named(step):
                pending = runner.launch(step, lambda: epoch.ended)
            if pending.ready():
                self._watch.record(step, time.monotonic() - started)
                _set_result(result, pending.wait())
            else:
                self._results.submit(self._wait, launch, pending)
                running = True
        except FailedPreconditionError as error:
            _set_result(result, error)
        except Exception as error:
            _set_result(result, _fail(runner, epoch, step.step_id, error))
        if self._profiler.count_step():
            with self._watch.doing("writing a profile", _MAX_PROFILE_S):
                self._profiler.write_piece()
        return running

    def _wait(self, launch: Launch, pending: PendingStep) -> None:
        """Waits for a step on the results thread and sets its result."""
        step, result = launch.step, launch.result
        try:
            started = time.monotonic()
            with self._watch.running(step, self._min_step_s):
                found = pending.wait()
        except Exception as error:
            _set_result(result, _fail(launch.runner, launch.epoch, step.step_id, error))
        else:
            _set_result(result, found)
            self._watch.record(step, time.monotonic() - started)
        finally:
            self._room.release()

    def _waits_for_ranks(self) -> bool:
        return self.runner is not None and self.runner.waits_for_ranks

    def _compiles(self) -> bool:
        return self.runner is not None and self.runner.compiling


def end_if_device_lost(error: Exception) -> None:
    """Ends the process if `error` means that its device is lost, or that a capture failed: torch's
    allocator does not recover from that."""
    if is_device_lost(error) or isinstance(error, CaptureError):
        log.error("the device is lost; ending this process", reason=str(error))
        os._exit(EXIT_DEVICE_LOST)  # a clean exit would wait for the device


def _set_result(result: asyncio.Future[StepResult | None], found: StepResult | Exception) -> None:
    """Sets the result or the exception of a future of the RPC loop, from another thread."""

    def set_result() -> None:
        if result.cancelled():
            return
        if isinstance(found, Exception):
            result.set_exception(found)
        else:
            result.set_result(found)

    result.get_loop().call_soon_threadsafe(set_result)


def _fail(runner: ModelRunner, epoch: Epoch, step_id: int, error: Exception) -> InternalError:
    """Ends the epoch. After a failed step, the contents of the KV cache are unknown, unless only
    another rank failed or a capture was given up."""
    epoch.ended = True
    if not isinstance(error, RanksLostError | SupersededError):
        runner.forget_cache()
    log.error("step failed", epoch=epoch.number, step_id=step_id, exc_info=error)
    end_if_device_lost(error)
    return InternalError(f"step {step_id} failed")
