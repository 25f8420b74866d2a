"""Frontend processes between a scheduler without an engine and clients that hold streams open."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import AsyncIterator, Iterable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from bench.errors import BenchError
from bench.instant_scheduler import InstantScheduler
from bench.machine import cpu_s
from bench.step_clock import StepClock
from bench.stream_client import LATENCY_UNIT_S
from deploy.ports import free_port
from frontend.text.model_files import ModelFilesError, read_model_facts

HOST = "127.0.0.1"
CLIENTS = 2  # processes
CHANNELS = 8  # per client: the kernel spreads connections over the frontends that share a port
TIMEOUT_S = 120.0  # for a start, and for a run


@dataclass(frozen=True)
class Run:
    """One way of offering tokens, and its results."""

    name: str
    frontends: int
    offered_tokens_per_s: float | None  # None: as many as the frontends take
    tokens_per_s: float  # at the clients
    tokens: int
    tokens_per_chunk: float
    frontend_cpu_s_per_1000_tokens: float
    frontend_cpu_s: list[float]  # of each process
    client_cpu_s_per_1000_tokens: float
    latency_p50_s: float | None  # from the scheduler's send; None if it would only show queues
    latency_p99_s: float | None
    calls_per_frontend: list[int]


class Rig:
    """Frontends that share a port and a scheduler; more can be added."""

    def __init__(self, model: str, calls: int, directory: str, vocab_size: int) -> None:
        self._model = model
        self._calls = calls
        self._slots = vocab_size
        self._clock = Path(directory) / "clock"
        self._scheduler_address = f"unix:{directory}/scheduler.sock"
        clock = StepClock(self._clock, vocab_size)
        self._scheduler = InstantScheduler(vocab_size, clock)  # type: ignore[abstract]  # not asked
        self._port = free_port()
        self._frontends: list[psutil.Popen] = []

    async def start(self) -> None:
        await self._scheduler.start(self._scheduler_address)

    async def stop(self) -> None:
        for frontend in self._frontends:
            frontend.terminate()
        for frontend in self._frontends:
            await asyncio.to_thread(frontend.wait)
        await self._scheduler.stop()

    async def add_frontend(self) -> None:
        """
        Raises:
            BenchError: it did not start.
        """
        flags = {
            "--model": self._model,
            "--host": HOST,
            "--port": self._port,
            "--scheduler-address": self._scheduler_address,
            "--exit-with-parent": "true",
            "--log-level": "error",
        }
        command = [sys.executable, "-m", "frontend", *(str(p) for f in flags.items() for p in f)]
        frontend = psutil.Popen(command)
        self._frontends.append(frontend)
        connected = asyncio.create_task(self._scheduler.wait_for_connections(len(self._frontends)))
        ended = asyncio.create_task(asyncio.to_thread(frontend.wait))
        await asyncio.wait(
            (connected, ended), timeout=TIMEOUT_S, return_when=asyncio.FIRST_COMPLETED
        )
        if not connected.done():
            connected.cancel()
            raise BenchError("a frontend did not start; its output is above")

    async def run(self, name: str, tokens_per_call: int, rate: float | None) -> Run:
        """Has every call deliver `tokens_per_call` tokens, at `rate` tokens/s over all calls.

        Raises:
            BenchError: not all of them came.
        """
        calls = self._calls
        try:
            async with asyncio.timeout(TIMEOUT_S):
                clients = [await self._start_client(n, tokens_per_call) for n in range(CLIENTS)]
                await self._scheduler.wait_for_requests(calls)
                calls_per_frontend = self._scheduler.requests_per_connection()
                before = [cpu_s(frontend) for frontend in self._frontends]
                self._scheduler.go(step_s=calls / rate if rate else 0.0)
                outputs = [(await client.communicate())[0] for client in clients]
                spent_s = [cpu_s(f) - b for f, b in zip(self._frontends, before, strict=True)]
        except TimeoutError:
            raise BenchError(f"{name}: did not end within {TIMEOUT_S:.0f} s") from None
        received: list[dict[str, Any]] = [json.loads(output) for output in outputs if output]
        tokens: int = sum(each["tokens"] for each in received)
        if tokens != calls * tokens_per_call:
            raise BenchError(f"{name}: {tokens} of {calls * tokens_per_call} tokens came")
        seconds = max(e["last_at"] for e in received) - min(e["first_at"] for e in received)
        latencies = _merged(each["latencies"] for each in received) if rate else None
        return Run(
            name=name,
            frontends=len(self._frontends),
            offered_tokens_per_s=rate,
            tokens_per_s=tokens / seconds,
            tokens=tokens,
            tokens_per_chunk=tokens / sum(each["chunks"] for each in received),
            frontend_cpu_s_per_1000_tokens=1000 * sum(spent_s) / tokens,
            frontend_cpu_s=spent_s,
            client_cpu_s_per_1000_tokens=1000 * sum(e["cpu_s"] for e in received) / tokens,
            latency_p50_s=_quantile(latencies, 0.50) if latencies else None,
            latency_p99_s=_quantile(latencies, 0.99) if latencies else None,
            calls_per_frontend=calls_per_frontend,
        )

    async def _start_client(self, number: int, tokens: int) -> asyncio.subprocess.Process:
        calls = self._calls
        flags = {
            "--address": f"{HOST}:{self._port}",
            "--clock": self._clock,
            "--slots": self._slots,
            "--calls": calls // CLIENTS + (number < calls % CLIENTS),
            "--channels": CHANNELS,
            "--tokens": tokens,
        }
        return await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            "bench.stream_client",
            *(str(part) for flag in flags.items() for part in flag),
            stdout=subprocess.PIPE,
        )


@asynccontextmanager
async def running(model: str, calls: int) -> AsyncIterator[Rig]:
    """Yields a rig that has no frontends yet.

    Raises:
        BenchError: the model directory cannot be used.
    """
    try:
        vocab_size = read_model_facts(Path(model)).vocab_size
    except ModelFilesError as error:
        raise BenchError(f"--model: {error}") from error
    with tempfile.TemporaryDirectory(prefix="bench-") as directory:
        rig = Rig(model, calls, directory, vocab_size)
        await rig.start()
        try:
            yield rig
        finally:
            await rig.stop()


def _merged(latencies: Iterable[Mapping[str, int]]) -> Counter[int]:
    merged: Counter[int] = Counter()
    for counts in latencies:  # JSON turned the keys into strings
        merged.update({int(latency): count for latency, count in counts.items()})
    return merged


def _quantile(latencies: Counter[int], quantile: float) -> float:
    """The smallest latency, in seconds, that at least this share of the tokens did not exceed."""
    seen, enough = 0, quantile * latencies.total()
    for latency in sorted(latencies):
        seen += latencies[latency]
        if seen >= enough:
            return latency * LATENCY_UNIT_S
    raise ValueError("there are no latencies")
