"""`python -m bench.gpu.client JSON`: the reference workload's clients, each in its own process.

It prints a line of JSON for each round, one for the single streams, and one for a kill of the
worker. The others have the CPU time that the clients and each service used meanwhile. The services
are descendants of the process that started this one.
"""

from __future__ import annotations

import asyncio
import json
import multiprocessing
import os
import sys
import time
from collections import defaultdict
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass
from multiprocessing.connection import Connection
from typing import Any

import psutil

from bench.gpu.peer import round_of
from bench.metrics import Trace, pause_s, summarize
from bench.stack import measure_single_stream, run_request, stats_reader
from bench.workload import (
    STREAM_PROMPT,
    Shape,
    random_request,
    reference_workload,
    warm_up_request,
)
from nano_vllm_grpc import AsyncLLM

SERVICES = ("frontend", "scheduler_svc", "worker_svc")
KILLED, KILLED_TOKENS = 2, 512  # streams amid which the worker is killed, and tokens of each
_POLL_S = 0.01


@dataclass(frozen=True)
class Job:
    address: str
    scheduler_address: str
    shape: dict[str, int]  # `Shape`
    clients: int  # processes; a single one would be slower than the stack
    rounds: int
    stream_repeats: int  # if 0, only the rounds are measured


async def run(job: Job, send: Callable[[dict[str, Any]], None]) -> None:
    read_stats = stats_reader(job.address, job.scheduler_address)
    clients = [_start(job, number) for number in range(job.clients)]
    for client in clients:
        client.recv()  # the client is ready
    for number in range(job.rounds):
        before, stats_before = cpu_seconds(), await read_stats()
        for client in clients:
            client.send(number)
        traces = [trace for client in clients for trace in client.recv()]
        stats = await read_stats()
        assert stats
        assert stats_before
        found = asdict(summarize(traces)) | asdict(stats.since(stats_before))
        send({"name": f"round {number}", **found, "cpu_s": cpu_since(before)})
    for process in multiprocessing.active_children():
        process.join()  # so that its CPU time no longer counts
    if not job.stream_repeats:
        return
    async with AsyncLLM(job.address) as llm:
        before = cpu_seconds()
        single = await measure_single_stream(llm, await llm.get_model(), job.stream_repeats)
        send({"name": "one stream", **asdict(single), "cpu_s": cpu_since(before)})
        send({"name": "killed worker", "pauses_s": await kill_a_worker(llm)})


async def kill_a_worker(llm: AsyncLLM) -> list[float | None]:
    """Kills the worker amid streams -> the pause of each.

    Raises:
        BenchError: a stream ended early.
    """
    vocab_size = (await llm.get_model()).vocab_size
    requests = [random_request(vocab_size, STREAM_PROMPT, KILLED_TOKENS) for _ in range(KILLED)]
    traces = [Trace(STREAM_PROMPT, time.perf_counter()) for _ in requests]
    streams = [
        asyncio.create_task(run_request(llm, request, trace))
        for request, trace in zip(requests, traces, strict=True)
    ]
    while min(trace.output_tokens for trace in traces) < KILLED_TOKENS // 4:
        if any(stream.done() for stream in streams):
            break  # it failed, as is seen below
        await asyncio.sleep(_POLL_S)
    killed = time.perf_counter()
    workers = forks("worker_svc")
    assert workers, "no worker was found"
    for worker in workers:
        worker.kill()
    await asyncio.gather(*streams)
    return [pause_s(trace, killed) for trace in traces]


def forks(service: str) -> list[psutil.Process]:
    """The processes of a service that its parent process has forked."""
    found = {}
    for process in psutil.Process(os.getppid()).children(recursive=True):
        with suppress(psutil.Error):  # it has just ended
            if service in process.cmdline():
                found[process.pid] = process, process.ppid()
    return [process for process, parent in found.values() if parent in found]


def _start(job: Job, number: int) -> Connection:
    """Starts a client -> a pipe. The client sends None once it is ready. It then receives the
    numbers of rounds and sends each round's traces. If it fails, the pipe raises EOFError."""
    context = multiprocessing.get_context("spawn")  # gRPC must not be forked
    ours, theirs = context.Pipe()
    context.Process(target=_client, args=(job, number, theirs), daemon=True).start()
    theirs.close()
    return ours


def _client(job: Job, number: int, pipe: Connection) -> None:
    asyncio.run(_serve_rounds(job, number, pipe))


async def _serve_rounds(job: Job, number: int, pipe: Connection) -> None:
    """Runs every `job.clients`th request of a round, from `number` on."""
    shape = Shape(**job.shape)
    async with AsyncLLM(job.address) as llm:
        vocab_size = (await llm.get_model()).vocab_size
        await run_request(llm, warm_up_request(shape, vocab_size))
        requests = reference_workload(shape, vocab_size)[number :: job.clients]
        pipe.send(None)
        for _ in range(job.rounds):
            these = round_of(requests, pipe.recv(), vocab_size)
            pipe.send(await asyncio.gather(*(run_request(llm, each) for each in these)))


def cpu_seconds() -> dict[str, float]:
    """The CPU seconds used so far by each service and by the clients. Their ended children count,
    such as forks that waited to take over."""
    found: dict[str, float] = defaultdict(float)
    own = psutil.Process()
    clients = {own.pid, *(child.pid for child in own.children())}
    for process in psutil.Process(os.getppid()).children(recursive=True):
        try:
            command, used = process.cmdline(), process.cpu_times()
        except psutil.Error:  # the process has just ended
            continue
        names = ["client"] if process.pid in clients else [s for s in SERVICES if s in command]
        for name in names:
            found[name] += sum(used[:4])  # user, system, and both of children that have ended
    return found


def cpu_since(before: dict[str, float]) -> dict[str, float]:
    """The CPU seconds since `before`. They are at least 0, even if a fork ended between the reading
    of its parent's time and of its own."""
    now = cpu_seconds()
    return {name: max(used - before.get(name, 0.0), 0.0) for name, used in now.items()}


if __name__ == "__main__":
    asyncio.run(
        run(Job(**json.loads(sys.argv[1])), lambda found: print(json.dumps(found), flush=True))
    )
