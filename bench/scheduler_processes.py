"""Runs a scheduler and an instant worker as processes, on Unix sockets of their own."""

from __future__ import annotations

import contextlib
import subprocess
import sys
import tempfile
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import grpc
import psutil
from grpc import aio

from bench.errors import BenchError
from bench.machine import cpu_s
from shared.pb import scheduler_pb2
from shared.pb.scheduler_pb2_grpc import SchedulerServiceStub

if TYPE_CHECKING:
    from shared.pb.scheduler_pb2_grpc import SchedulerServiceAsyncStub

_START_TIMEOUT_S = 60.0
_POLL_S = 0.2
_LOG_LINES = 12
_ANY_SIZE = [("grpc.max_receive_message_length", -1), ("grpc.max_send_message_length", -1)]


@dataclass(frozen=True)
class Sizes:
    """Settings for both processes: sizes in tokens, microseconds of a simulated step."""

    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int
    num_blocks: int
    block_size: int = 16
    step_us: float = 0.0
    token_us: float = 0.0


class SchedulerUnderTest:
    """A running scheduler: its stub, its counters, and the CPU time it and its worker have used."""

    def __init__(self, stub: SchedulerServiceAsyncStub, scheduler_pid: int, worker_pid: int):
        self.stub = stub
        self._scheduler = psutil.Process(scheduler_pid)
        self._worker = psutil.Process(worker_pid)

    async def load(self) -> scheduler_pb2.GetLoadResponse:
        return await self.stub.GetLoad(scheduler_pb2.GetLoadRequest())

    def scheduler_cpu_s(self) -> float:
        return cpu_s(self._scheduler)

    def worker_cpu_s(self) -> float:
        return cpu_s(self._worker)


@contextlib.asynccontextmanager
async def running_scheduler(sizes: Sizes) -> AsyncIterator[SchedulerUnderTest]:
    """Starts both processes, and stops them at the end.

    Raises:
        BenchError: one ended (the message has the end of its log), or they were not ready in time.
    """
    with tempfile.TemporaryDirectory(prefix="bench-") as directory, contextlib.ExitStack() as stack:
        worker_address = f"unix:{directory}/worker.sock"
        scheduler_address = f"unix:{directory}/scheduler.sock"
        worker = _Process(
            stack,
            Path(directory, "worker.log"),
            "bench.instant_worker",
            address=worker_address,
            num_blocks=sizes.num_blocks,
            max_model_len=sizes.max_model_len,
            block_size=sizes.block_size,
            step_us=sizes.step_us,
            token_us=sizes.token_us,
        )
        scheduler = _Process(
            stack,
            Path(directory, "scheduler.log"),
            "scheduler_svc",
            scheduler_address=scheduler_address,
            worker_addresses=worker_address,
            max_num_seqs=sizes.max_num_seqs,
            max_num_batched_tokens=sizes.max_num_batched_tokens,
            kv_blocks="auto",
            exit_with_parent=True,
        )
        async with aio.insecure_channel(scheduler_address, options=_ANY_SIZE) as channel:
            stub: SchedulerServiceAsyncStub = SchedulerServiceStub(channel)
            await _wait_ready(stub, worker, scheduler)
            yield SchedulerUnderTest(stub, scheduler.pid, worker.pid)


class _Process:
    """`python -m MODULE --FLAG VALUE ...`, which ends with `stack`."""

    def __init__(
        self, stack: contextlib.ExitStack, log: Path, module: str, **flags: object
    ) -> None:
        args = [part for name, value in flags.items() for part in (_flag(name), str(value))]
        self._log = log
        self._module = module
        with log.open("wb") as file:
            command = [sys.executable, "-m", module, *args]
            self._popen = subprocess.Popen(command, stdout=file, stderr=subprocess.STDOUT)
        self.pid = self._popen.pid
        stack.callback(self._stop)

    def check(self) -> None:
        if self._popen.poll() is not None:
            lines = self._log.read_text(errors="replace").splitlines()[-_LOG_LINES:]
            raise BenchError("\n".join([f"{self._module} ended:", *lines]))

    def _stop(self) -> None:
        self._popen.kill()  # neither has anything to lose
        self._popen.wait()


async def _wait_ready(stub: SchedulerServiceAsyncStub, *processes: _Process) -> None:
    """Waits until the scheduler answers GetLoad, which it does once its engine is ready."""
    for _ in range(round(_START_TIMEOUT_S / _POLL_S)):
        try:
            await stub.GetLoad(scheduler_pb2.GetLoadRequest(), wait_for_ready=True, timeout=_POLL_S)
            return
        except aio.AioRpcError as error:
            if error.code() is not grpc.StatusCode.DEADLINE_EXCEEDED:
                raise BenchError(f"the scheduler: {error.code().name}: {error.details()}") from None
        for process in processes:
            process.check()
    raise BenchError(f"the scheduler was not ready after {_START_TIMEOUT_S:.0f} s")


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")
