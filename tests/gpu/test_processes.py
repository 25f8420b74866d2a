"""Processes that hold a GPU: forked before they touch it, losing it, killed. On a CPU, as much of
this as is possible without one."""

from __future__ import annotations

import asyncio
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import grpc
import numpy as np
import psutil
import pytest

from deploy.health import SERVING, check_health
from nano_vllm_grpc import AsyncLLM, SamplingParams
from shared.pb.worker_pb2 import ConfigureRequest, GetInfoRequest
from shared.pb.worker_pb2_grpc import WorkerServiceStub
from shared.process.fork import CANNOT_START
from shared.process.parent_process import REPLACED, RESTART
from tests.shared.test_successor import successor_of
from tests.stack import ROOT, RealStack, running_stack
from tests.waiting import WAIT_S, wait_for
from tests.worker_svc.device import DEVICE, by_device, gpu_only
from tests.worker_svc.harness import Batch, limits, save_model

pytestmark = pytest.mark.timeout(300)

NUM_BLOCKS = 64
STREAMS = 32
TOKENS = 1500

FORK = """
import os, sys, torch
from worker_svc.devices.choice import preload
from worker_svc.kept_memory.memory import KeptMemory
preload(sys.argv[1])
memory = KeptMemory()
assert not torch.cuda.is_initialized()
for _ in range(2):
    pid = os.fork()
    if not pid:
        from worker_svc.settings import WorkerSettings
        from worker_svc.model_runner import ModelRunner
        settings = WorkerSettings(model=sys.argv[2], device=sys.argv[1], kv_blocks=9)
        runner = ModelRunner(settings, memory=memory)
        runner.configure(1, 9)
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    memory.fork_ended(0)
assert not torch.cuda.is_initialized()
"""


def test_preloading_does_not_initialize_the_device(tmp_path: Path) -> None:
    """Forks processes as a worker does, the second as a successor."""
    save_model(tmp_path)
    command = [sys.executable, "-c", FORK, DEVICE.type, str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=WAIT_S)
    assert done.returncode == 0, done.stderr


class Worker:
    """One rank, as a process that has a fault once `trigger` exists, and a client of it.

    Its sequences stay in `batch` from epoch to epoch."""

    def __init__(self, fault: str, directory: Path) -> None:
        self.trigger, self.log = directory / "trigger", directory / "log"
        self.model = directory / "model"
        self._address = address = f"unix:{directory}/worker.sock"
        command = [sys.executable, "-m", "tests.gpu.faulty_worker", fault, str(self.trigger)]
        command += ["--model", str(self.model), "--device", DEVICE.type]
        command += ["--worker-addresses", address, "--max-num-seqs", "8"]
        command += ["--kv-blocks", str(NUM_BLOCKS)]
        save_model(self.model)
        with self.log.open("wb") as log:
            self.process: subprocess.Popen[bytes] | psutil.Process
            self.process = subprocess.Popen(command, cwd=ROOT, stdout=log, stderr=log)
        self._channel = grpc.insecure_channel(address)
        self.stub = WorkerServiceStub(self._channel)

    def wait_serving(self) -> str:
        """Waits until the worker serves; returns its incarnation."""
        wait_for(lambda: check_health(self._address) == SERVING, "the worker to be SERVING")
        return str(self.stub.GetInfo(GetInfoRequest(), wait_for_ready=True).incarnation)

    @property
    def cache_id(self) -> str:
        return str(self.stub.GetInfo(GetInfoRequest()).cache_id)

    def configure(self, epoch: int, keep: str = "") -> None:
        self.stub.Configure(
            ConfigureRequest(
                epoch=epoch,
                num_blocks=NUM_BLOCKS,
                max_num_seqs=8,
                max_num_batched_tokens=64,
                keep_cache_id=keep,
            )
        )

    def restart(self) -> None:
        """Waits until a successor serves instead of the process."""
        self.process.send_signal(RESTART)
        successor = successor_of(psutil.Process(self.process.pid))
        assert self.process.wait(WAIT_S) == REPLACED
        self.process = successor
        self.wait_serving()

    def kill_fork(self) -> None:
        """Kills what serves, and waits until its successor serves."""
        (fork,) = psutil.Process(self.process.pid).children()
        before = self.wait_serving()
        fork.kill()
        wait_for(lambda: self.wait_serving() != before, "another fork")

    def run(self, epoch: int) -> list[bytes]:
        """Runs a prompt and two decodes, each fed the token before it; returns their tokens."""
        size = self.stub.GetInfo(GetInfoRequest()).block_size
        batch = Batch(limits(num_blocks=NUM_BLOCKS, block_size=size), epoch=epoch)
        steps = [batch.request([(0, ids)]) for ids in ([3, 14, 15, 92], [-1], [-1])]
        return [answer.token_ids for answer in self.stub.Execute(iter(steps), timeout=60)]

    def append(self, batch: Batch, sequence: int, ids: list[int]) -> int:
        """Runs a step that appends tokens to a sequence; returns the next token."""
        (answer,) = self.stub.Execute(iter([batch.request([(sequence, ids)])]), timeout=60)
        return int(np.frombuffer(answer.token_ids, "<i4")[0])

    def end(self) -> int | None:
        """Ends the worker with SIGTERM; returns its exit status, unless it is a successor's."""
        self._channel.close()
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(WAIT_S)


@contextmanager
def faulty_worker(fault: str, directory: Path) -> Iterator[Worker]:
    worker = Worker(fault, directory)
    try:
        yield worker
    finally:
        worker.end()
        print(worker.log.read_text())


def test_an_illegal_access_ends_the_worker_and_its_successor_serves(tmp_path: Path) -> None:
    with faulty_worker("lose", tmp_path) as worker:
        first = worker.wait_serving()
        worker.configure(1)
        tokens = worker.run(1)
        assert len(tokens) == 3
        worker.configure(2)
        worker.trigger.touch()
        with pytest.raises(grpc.RpcError):
            worker.run(2)
        assert worker.wait_serving() != first
        assert not worker.cache_id
        worker.configure(3)
        assert worker.run(3) == tokens
        assert worker.end() == 0


def test_what_a_killed_or_restarted_worker_left_is_used(tmp_path: Path) -> None:
    """Neither weights nor cached tokens are read or computed again."""
    prompt, num_kills = [3, 14, 15, 92], by_device(cpu=5, gpu=20)
    with faulty_worker("none", tmp_path) as worker:
        worker.wait_serving()
        worker.configure(1)
        size = worker.stub.GetInfo(GetInfoRequest()).block_size
        batch = Batch(limits(num_blocks=NUM_BLOCKS, block_size=size))
        expected = [worker.append(batch, 0, prompt)]
        for _ in range(num_kills + 1):
            expected.append(worker.append(batch, 0, expected[-1:]))
        found, cache_id = [worker.append(batch, 1, prompt)], worker.cache_id
        worker.restart()
        for epoch in range(2, num_kills + 3):
            assert worker.cache_id == cache_id
            worker.configure(epoch, cache_id)
            batch.epoch, batch.step_id = epoch, 0
            found.append(worker.append(batch, 1, found[-1:]))
            (worker.model / "model.safetensors").unlink(missing_ok=True)
            worker.kill_fork()
        assert found == expected


def test_a_failed_capture_ends_the_worker_with_its_reason(tmp_path: Path) -> None:
    """It ends for good, since a successor would fail likewise."""
    with faulty_worker("capture", tmp_path) as worker:
        worker.trigger.touch()
        worker.wait_serving()
        with pytest.raises(grpc.RpcError):
            worker.configure(1)
        assert worker.process.wait(WAIT_S) == CANNOT_START
        assert (
            "a step of 8 decodes and 0 tokens of prompts cannot be captured"
            in worker.log.read_text()
        )


@gpu_only  # tests/faults does this and far more on a CPU
def test_a_worker_killed_under_load_costs_no_stream() -> None:
    """Every stream continues after the tokens that it has. Later tokens may differ: earlier ones
    are recomputed in one step instead of many, which bfloat16 rounds differently."""
    with running_stack(device=DEVICE.type, kv_blocks=1024) as stack:
        assert asyncio.run(streams_through_a_kill(stack)) == [TOKENS] * STREAMS
        stack.wait_serving()
        stack.wait_idle()


async def streams_through_a_kill(stack: RealStack) -> list[int]:
    """Returns the number of tokens that each stream got."""

    async def stream(llm: AsyncLLM, number: int, begun: asyncio.Event) -> int:
        params = SamplingParams(temperature=0.8, seed=number, max_tokens=TOKENS, ignore_eos=True)
        received = 0
        async for chunk in llm.stream([number + 1, 2, 3], params):
            received += len(chunk.token_ids)
            begun.set()
        return received

    async with AsyncLLM(stack.address) as llm:
        all_begun = [asyncio.Event() for _ in range(STREAMS)]
        streams = [
            asyncio.create_task(stream(llm, number, begun))
            for number, begun in enumerate(all_begun)
        ]
        for begun in all_begun:
            await begun.wait()
        stack.kill("worker")
        return await asyncio.gather(*streams)
