"""A worker process without a model, and a scheduler process that uses it, for measurements.

The worker serves `worker.proto` and checks nothing. It answers every step at once.
"""

from __future__ import annotations

import argparse
import contextlib
import tempfile
from collections.abc import AsyncIterator, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import grpc
import numpy as np
from grpc import aio

from bench.processes import BenchProcess
from deploy.health import SERVING, check_health
from shared.pb import scheduler_pb2, worker_pb2
from shared.pb.scheduler_pb2_grpc import SchedulerServiceStub
from shared.pb.worker_pb2_grpc import WorkerServiceServicer, add_WorkerServiceServicer_to_server
from shared.process.death_signal import end_with_parent

if TYPE_CHECKING:
    from shared.pb.scheduler_pb2_grpc import SchedulerServiceAsyncStub

VOCAB_SIZE = 32_000
_ANY_SIZE = [("grpc.max_receive_message_length", -1), ("grpc.max_send_message_length", -1)]


class InstantWorker(WorkerServiceServicer):
    """The only rank of an engine."""

    def __init__(self, options: argparse.Namespace) -> None:
        self._info = worker_pb2.GetInfoResponse(
            rank=0,
            world_size=1,
            num_stages=1,
            device="none",
            dtype="none",
            model_fingerprint="instant",
            attention_backend="none",
            block_size=options.block_size,
            num_blocks=options.num_blocks,
            max_model_len=options.max_model_len,
            vocab_size=VOCAB_SIZE,
            incarnation="instant",
            max_num_batched_tokens=2048,
        )

    def GetInfo(
        self, request: worker_pb2.GetInfoRequest, context: object
    ) -> worker_pb2.GetInfoResponse:
        return self._info

    def Configure(
        self, request: worker_pb2.ConfigureRequest, context: object
    ) -> worker_pb2.ConfigureResponse:
        self._info.epoch = request.epoch
        return worker_pb2.ConfigureResponse()

    def Execute(
        self, request_iterator: Iterator[worker_pb2.StepRequest], context: object
    ) -> Iterator[worker_pb2.StepResponse]:
        for step in request_iterator:
            if step.cut:  # all steps before it have been answered
                continue
            # Every row gets the same token, or -1 if it samples nothing.
            token_ids = np.frombuffer(step.samples, "u1").astype("<i4") * 8 - 1
            for step_id in range(step.step_id, step.step_id + max(step.num_steps, 1)):
                yield worker_pb2.StepResponse(step_id=step_id, token_ids=token_ids.tobytes())


@dataclass(frozen=True)
class Sizes:
    """Settings of both processes: sizes in tokens."""

    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int
    num_blocks: int
    block_size: int = 16


@dataclass(frozen=True)
class SchedulerUnderTest:
    """A running scheduler."""

    stub: SchedulerServiceAsyncStub
    scheduler_pid: int

    async def load(self) -> scheduler_pb2.GetLoadResponse:
        return await self.stub.GetLoad(scheduler_pb2.GetLoadRequest())


@contextlib.asynccontextmanager
async def running_scheduler(sizes: Sizes) -> AsyncIterator[SchedulerUnderTest]:
    """Starts both processes, and stops them at the end.

    Raises:
        BenchError: a process ended (the message has the end of its log) or was not ready in time.
    """
    with tempfile.TemporaryDirectory(prefix="bench-") as directory, contextlib.ExitStack() as stack:
        worker_address = f"unix:{directory}/worker.sock"
        scheduler_address = f"unix:{directory}/scheduler.sock"
        BenchProcess(
            stack,
            Path(directory, "worker.log"),
            "bench.instant_worker",
            address=worker_address,
            num_blocks=sizes.num_blocks,
            max_model_len=sizes.max_model_len,
            block_size=sizes.block_size,
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
            exit_with_parent=True,
        )
        async with aio.insecure_channel(scheduler_address, options=_ANY_SIZE) as channel:
            stub: SchedulerServiceAsyncStub = SchedulerServiceStub(channel)
            await scheduler.wait_until(lambda: check_health(scheduler_address) == SERVING)
            yield SchedulerUnderTest(stub, scheduler.pid)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.instant_worker", description=__doc__)
    parser.add_argument("--address", required=True)
    parser.add_argument("--num-blocks", type=int, required=True)
    parser.add_argument("--max-model-len", type=int, required=True)
    parser.add_argument("--block-size", type=int, default=16, help="tokens, %(default)s")
    options = parser.parse_args()
    end_with_parent()
    server = grpc.server(ThreadPoolExecutor(4), options=[("grpc.max_receive_message_length", -1)])
    worker = InstantWorker(options)  # type: ignore[abstract]  # not asked
    add_WorkerServiceServicer_to_server(worker, server)
    server.add_insecure_port(options.address)
    server.start()
    server.wait_for_termination()


if __name__ == "__main__":
    main()
