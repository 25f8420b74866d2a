"""Runs a scheduler and an instant worker as processes, on temporary Unix sockets."""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from grpc import aio

from bench.processes import BenchProcess
from deploy.health import SERVING, check_health
from shared.pb import scheduler_pb2
from shared.pb.scheduler_pb2_grpc import SchedulerServiceStub

if TYPE_CHECKING:
    from shared.pb.scheduler_pb2_grpc import SchedulerServiceAsyncStub

_ANY_SIZE = [("grpc.max_receive_message_length", -1), ("grpc.max_send_message_length", -1)]


@dataclass(frozen=True)
class Sizes:
    """Settings of both processes: sizes in tokens, and microseconds of a simulated step."""

    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int
    num_blocks: int
    block_size: int = 16
    step_us: float = 0.0
    token_us: float = 0.0


@dataclass(frozen=True)
class SchedulerUnderTest:
    """A running scheduler and its worker."""

    address: str
    stub: SchedulerServiceAsyncStub
    scheduler_pid: int
    worker_pid: int

    async def load(self) -> scheduler_pb2.GetLoadResponse:
        return await self.stub.GetLoad(scheduler_pb2.GetLoadRequest())


@contextlib.asynccontextmanager
async def running_scheduler(
    sizes: Sizes, engine_name: str = "0"
) -> AsyncIterator[SchedulerUnderTest]:
    """Starts both processes, and stops them at the end.

    Raises:
        BenchError: a process ended (the message has the end of its log) or was not ready in time.
    """
    with tempfile.TemporaryDirectory(prefix="bench-") as directory, contextlib.ExitStack() as stack:
        worker_address = f"unix:{directory}/worker.sock"
        scheduler_address = f"unix:{directory}/scheduler.sock"
        worker = BenchProcess(
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
        scheduler = BenchProcess(
            stack,
            Path(directory, "scheduler.log"),
            "scheduler_svc",
            scheduler_address=scheduler_address,
            worker_addresses=worker_address,
            max_num_seqs=sizes.max_num_seqs,
            max_num_batched_tokens=sizes.max_num_batched_tokens,
            kv_blocks="auto",
            engine_name=engine_name,
            exit_with_parent=True,
        )
        async with aio.insecure_channel(scheduler_address, options=_ANY_SIZE) as channel:
            stub: SchedulerServiceAsyncStub = SchedulerServiceStub(channel)
            await scheduler.wait_until(lambda: check_health(scheduler_address) == SERVING)
            yield SchedulerUnderTest(scheduler_address, stub, scheduler.pid, worker.pid)
