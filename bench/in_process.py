"""Runs the services' model and scheduler code in one process and thread, without gRPC or a
tokenizer."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import deque
from collections.abc import AsyncIterator, Callable
from collections.abc import Sequence as Seq
from typing import Protocol

from bench.metrics import Trace, summarize
from bench.stack import EngineStats, Received, Run
from bench.workload import TEMPERATURE, BenchError, WorkloadRequest
from nano_vllm_grpc import ModelInfo
from scheduler_svc.core.admission import Limits
from scheduler_svc.core.block_manager import BlockManager
from scheduler_svc.core.sampling import SamplingParams
from scheduler_svc.core.scheduler import Scheduler
from scheduler_svc.core.sequence import Sequence
from scheduler_svc.core.step import Answer, Output, Step
from scheduler_svc.engine import Engine
from scheduler_svc.rpc.step_encoding import encode_step
from shared.config import SettingsError, load_settings
from worker_svc.errors import StartError
from worker_svc.kept_memory import KeptMemory
from worker_svc.model_runner import ModelRunner
from worker_svc.settings import WorkerSettings
from worker_svc.step import decode as worker_step
from worker_svc.step_result import StepResult

_EPOCH = 1


class Pending(Protocol):
    """A step that the device may still be working on, as `PendingStep` is."""

    def wait(self) -> StepResult: ...


class Runner(Protocol):
    """Runs steps, as `ModelRunner` does."""

    def configure(self, epoch: int, num_blocks: int) -> None: ...

    def launch(self, step: worker_step.StepArrays) -> Pending: ...


class InProcessExecutor:
    """Runs steps on a `Runner` in this process, with the columns that gRPC would carry."""

    def __init__(self, runner: Runner, limits: worker_step.StepLimits) -> None:
        self._runner = runner
        self._limits = limits
        self._last: worker_step.StepArrays | None = None
        self._pending: deque[Pending] = deque()
        self._step_id = 0

    @property
    def max_run(self) -> int:
        return 1

    async def send(self, run: Seq[Step]) -> None:
        (step,) = run
        self._step_id += 1
        request = encode_step(step, self._limits.block_size, _EPOCH, self._step_id)
        self._last = worker_step.decode_step(request, self._limits, self._last)
        self._pending.append(self._runner.launch(self._last))

    async def cut(self) -> None:
        pass

    async def receive(self) -> Answer:
        return Answer(self._pending.popleft().wait()[0].tolist())

    async def watch(self) -> str:
        """Waits for ever, because no worker can be lost: steps run in this process."""
        never: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        return await never

    async def recover(self, *, keep: bool) -> bool:
        """Empties the cache, as after the loss of a worker."""
        self._pending.clear()
        self._runner.configure(_EPOCH, self._limits.num_blocks)
        return False


class RunnerEngine:
    """Schedules sequences and runs them on a runner that is configured with the blocks of `limits`.

    Args:
        max_waiting: maximum number of waiting sequences.
        max_num_prefill_tokens: maximum number of prompt tokens in a step that also has decodes.
    """

    def __init__(
        self,
        runner: Runner,
        limits: worker_step.StepLimits,
        max_waiting: int,
        max_num_prefill_tokens: int = Limits.max_num_prefill_tokens,
    ) -> None:
        self._scheduler = Scheduler(
            Limits(
                max_num_seqs=limits.max_num_seqs,
                max_num_batched_tokens=limits.max_num_batched_tokens,
                max_model_len=limits.max_model_len,
                max_waiting=max_waiting,
                max_waiting_tokens=max_waiting * limits.max_model_len,
                max_num_prefill_tokens=max_num_prefill_tokens,
                vocab_size=limits.vocab_size,
            ),
            BlockManager(limits.num_blocks, limits.block_size),
        )
        self._engine = Engine(self._scheduler, InProcessExecutor(runner, limits), self._emit)
        self._traces: dict[int, Trace] = {}
        self._unfinished = 0
        self._done = asyncio.Event()
        self._received: Received = lambda tokens: None

    async def run(
        self,
        warm_up: WorkloadRequest,
        requests: list[WorkloadRequest],
        received: Received,
        begin: Callable[[], None] = lambda: None,
    ) -> Run:
        """Runs `warm_up`, calls `begin`, and measures `requests` in the way of `run_stack`."""
        async with self._running():
            await self._finish([_sequence(0, warm_up)])
            before = EngineStats.of(self._scheduler.stats)
            self._received = received
            begin()
            await self._finish([_sequence(*each) for each in enumerate(requests)])
        stats = EngineStats.of(self._scheduler.stats).since(before)
        traces = list(self._traces.values())
        return Run("in process", traces, summarize(traces), stats)

    async def complete(self, sequences: list[Sequence]) -> None:
        """Runs sequences, numbered from 0, until they end."""
        async with self._running():
            await self._finish(sequences)

    @contextlib.asynccontextmanager
    async def _running(self) -> AsyncIterator[None]:
        """Runs steps in a background task. If a step fails, the caller is cancelled."""
        async with asyncio.TaskGroup() as group:
            steps = group.create_task(self._engine.run())
            yield
            steps.cancel()

    async def _finish(self, sequences: list[Sequence]) -> None:
        self._traces = {}
        self._unfinished = len(sequences)
        self._done.clear()
        for number, sequence in enumerate(sequences):
            self._traces[number] = Trace(sequence.num_prompt_tokens, sent=time.perf_counter())
            self._engine.submit(sequence)
        await self._done.wait()

    def _emit(self, outputs: list[Output]) -> None:
        now = time.perf_counter()
        for output in outputs:
            if output.token is not None:
                self._traces[output.seq.key.number].arrivals.append((now, 1))
                self._received(1)
            if output.finished is not None:
                self._unfinished -= 1
        if not self._unfinished:
            self._done.set()


def _sequence(number: int, request: WorkloadRequest) -> Sequence:
    params = SamplingParams(request.output_len, temperature=TEMPERATURE, seed=request.seed)
    return Sequence((0, number), request.prompt, params)


def load_engine(directory: str, model: ModelInfo) -> RunnerEngine:
    """Loads a model; `model` describes the server whose limits the engine takes.

    Raises:
        BenchError: the server runs more ranks than fit into one process, or the model directory
            cannot be loaded.
    """
    capacity = model.capacity
    if capacity.tensor_parallel_size > 1:
        raise BenchError("--in-process: runs one rank; start the server with TP=1")
    flags = {
        "--model": directory,
        "--max-num-seqs": capacity.max_num_seqs,
        "--max-num-batched-tokens": capacity.max_num_batched_tokens,
        "--max-model-len": model.max_model_len,
        "--kv-blocks": capacity.num_blocks,
        "--block-size": capacity.block_size,
    }
    args = [str(part) for pair in flags.items() for part in pair]
    try:
        runner = ModelRunner(load_settings(WorkerSettings, args), memory=KeptMemory())
    except (SettingsError, StartError) as error:
        raise BenchError(f"--in-process: {error}") from error
    runner.configure(_EPOCH, capacity.num_blocks)
    limits = worker_step.StepLimits(
        vocab_size=model.vocab_size,
        num_blocks=capacity.num_blocks,
        block_size=capacity.block_size,
        max_num_seqs=capacity.max_num_seqs,
        max_num_batched_tokens=capacity.max_num_batched_tokens,
        max_model_len=model.max_model_len,
    )
    return RunnerEngine(runner, limits, capacity.max_waiting)
