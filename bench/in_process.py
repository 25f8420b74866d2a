"""Runs the services' model and scheduler code in one process and thread, without gRPC or a
tokenizer."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import deque
from collections.abc import AsyncIterator
from collections.abc import Sequence as Seq

from bench.metrics import Trace, summarize
from bench.stack import EngineStats, Run
from bench.workload import TEMPERATURE, WorkloadRequest
from nano_vllm_grpc import ModelInfo
from scheduler_svc.core.admission import Limits
from scheduler_svc.core.blocks.block_manager import BlockManager
from scheduler_svc.core.sampling import SamplingParams
from scheduler_svc.core.scheduler import Scheduler
from scheduler_svc.core.sequence import Sequence
from scheduler_svc.core.step import Answer, Output, Step
from scheduler_svc.engine import Engine
from scheduler_svc.rpc.step_encoding import encode_step
from shared.config import load_settings
from worker_svc.kept_memory.memory import KeptMemory
from worker_svc.model_runner import ModelRunner
from worker_svc.settings import WorkerSettings
from worker_svc.step import decode as worker_step
from worker_svc.step.arrays import StepArrays
from worker_svc.step_result import PendingStep

_EPOCH = 1


class InProcessExecutor:
    """Runs steps in this process, with the columns that gRPC would carry."""

    def __init__(self, runner: ModelRunner, limits: worker_step.StepLimits) -> None:
        self._runner = runner
        self._limits = limits
        self._last: StepArrays | None = None
        self._pending: deque[PendingStep] = deque()
        self._step_id = 0

    @property
    def max_run(self) -> int:
        return 1

    async def send(self, run: Seq[Step]) -> None:
        (step,) = run
        self._step_id += 1
        request = encode_step(step, self._limits.paging, _EPOCH, self._step_id)
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


class InProcessEngine:
    """Schedules sequences and runs them on a model in this process.

    Args:
        directory: of the model.
        model: the server whose limits the engine takes.

    Raises:
        SettingsError, StartError: the model directory cannot be loaded.
    """

    def __init__(self, directory: str, model: ModelInfo) -> None:
        capacity = model.capacity
        flags = {
            "--model": directory,
            "--max-num-seqs": capacity.max_num_seqs,
            "--max-num-batched-tokens": capacity.max_num_batched_tokens,
            "--max-model-len": model.max_model_len,
            "--kv-blocks": capacity.num_blocks,
        }
        args = [str(part) for pair in flags.items() for part in pair]
        runner = ModelRunner(load_settings(WorkerSettings, args), memory=KeptMemory())
        runner.configure(_EPOCH, capacity.num_blocks)
        self._scheduler = Scheduler(
            Limits(
                max_num_seqs=capacity.max_num_seqs,
                max_num_batched_tokens=capacity.max_num_batched_tokens,
                max_model_len=model.max_model_len,
                max_waiting=capacity.max_waiting,
                max_waiting_tokens=capacity.max_waiting * model.max_model_len,
                vocab_size=model.vocab_size,
            ),
            BlockManager(capacity.num_blocks, runner.info.paging),
        )
        limits = worker_step.StepLimits(
            vocab_size=model.vocab_size,
            num_blocks=capacity.num_blocks,
            paging=runner.info.paging,
            max_num_seqs=capacity.max_num_seqs,
            max_num_batched_tokens=capacity.max_num_batched_tokens,
            max_model_len=model.max_model_len,
        )
        self._engine = Engine(self._scheduler, InProcessExecutor(runner, limits), self._emit)
        self._traces: dict[int, Trace] = {}
        self._unfinished = 0
        self._done = asyncio.Event()

    async def run(self, warm_up: WorkloadRequest, requests: list[WorkloadRequest]) -> Run:
        """Runs `warm_up`, then measures `requests` in the way of `run_stack`."""
        async with self._running():
            await self._finish([warm_up])
            before = EngineStats.of(self._scheduler.stats)
            await self._finish(requests)
        stats = EngineStats.of(self._scheduler.stats).since(before)
        traces = list(self._traces.values())
        return Run("in process", traces, summarize(traces), stats)

    @contextlib.asynccontextmanager
    async def _running(self) -> AsyncIterator[None]:
        """Runs steps in a background task. If a step fails, the caller is cancelled."""
        async with asyncio.TaskGroup() as group:
            steps = group.create_task(self._engine.run())
            yield
            steps.cancel()

    async def _finish(self, requests: list[WorkloadRequest]) -> None:
        self._traces = {}
        self._unfinished = len(requests)
        self._done.clear()
        for number, each in enumerate(requests):
            params = SamplingParams(each.output_len, temperature=TEMPERATURE, seed=each.seed)
            self._traces[number] = Trace(len(each.prompt), sent=time.perf_counter())
            self._engine.submit(Sequence((0, number), each.prompt, params))
        await self._done.wait()

    def _emit(self, outputs: list[Output]) -> None:
        now = time.perf_counter()
        for output in outputs:
            if output.token is not None:
                self._traces[output.seq.key.number].arrivals.append((now, 1))
            if output.end is not None:
                self._unfinished -= 1
        if not self._unfinished:
            self._done.set()
