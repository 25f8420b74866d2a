"""`python -m bench --mode frontend`: measures the tokens/s that a frontend delivers to streams.

A real frontend process runs between client processes, which hold streams open, and a scheduler in
this process, which makes tokens without an engine. See docs/results/cpu.md.
"""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import json
import subprocess
import sys
import tempfile
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console

from bench.errors import BenchError
from bench.instant_scheduler import InstantScheduler
from bench.machine import cpu_s
from bench.metrics import percentile
from bench.processes import BenchProcess
from bench.report import check_minimum, figure_rows, mode_parser, print_table
from bench.step_clock import StepClock
from deploy.ports import free_port
from frontend.text.model_files import ModelFilesError, read_model_facts

HOST = "127.0.0.1"
CLIENTS = 2  # processes
CHANNELS = 8  # per client
WARM_UP_TOKENS = 16  # per call
TIMEOUT_S = 120.0  # for a run
_ROWS = (
    ("tokens/s", "tokens_per_s", "{:,.0f}"),
    ("tokens per chunk", "tokens_per_chunk", "{:.2f}"),
    ("frontend CPU, s per 1,000 tokens", "frontend_cpu_s_per_1000_tokens", "{:.4f}"),
    ("client CPU, s per 1,000 tokens", "client_cpu_s_per_1000_tokens", "{:.4f}"),
    ("latency p50, s", "latency_p50_s", "{:.4f}"),
    ("latency p99, s", "latency_p99_s", "{:.4f}"),
)


@dataclass(frozen=True)
class Run:
    """The results for one rate of offered tokens."""

    name: str
    offered_tokens_per_s: int | None  # None: as many as the frontend accepts
    tokens_per_s: float  # at the clients
    tokens: int
    tokens_per_chunk: float
    frontend_cpu_s_per_1000_tokens: float
    client_cpu_s_per_1000_tokens: float
    latency_p50_s: float | None  # from the scheduler's send; None if it would only show queues
    latency_p99_s: float | None


def parse_args(args: list[str]) -> argparse.Namespace:
    parser = mode_parser("frontend", __doc__)
    parser.add_argument("--model", default="models/demo", help="%(default)s")
    parser.add_argument("--calls", type=int, default=256, help="open streams, %(default)s")
    parser.add_argument(
        "--rate", type=int, default=20_000, help="tokens/s of the paced run, %(default)s"
    )
    parser.add_argument("--tokens", type=int, default=400, help="tokens per stream, %(default)s")
    options = parser.parse_args(args)
    check_minimum(parser, options, 1, ["calls", "rate", "tokens"])
    return options


def measure(options: argparse.Namespace, console: Console) -> dict[str, Any]:
    """Measures a paced run and a flat-out run; returns the figures for the JSON.

    Raises:
        BenchError: the model directory cannot be used, a process failed, or tokens are missing.
    """
    runs = [dataclasses.asdict(run) for run in asyncio.run(_measure_runs(options, console))]
    columns = ["", *(run["name"] for run in runs)]
    print_table(console, f"{options.calls} open streams", columns, figure_rows(runs, _ROWS))
    return {
        "model": options.model,
        "calls": options.calls,
        "tokens_per_s": runs[-1]["tokens_per_s"],
        "runs": runs,
    }


async def _measure_runs(options: argparse.Namespace, console: Console) -> list[Run]:
    try:
        vocab_size = read_model_facts(Path(options.model)).vocab_size
    except ModelFilesError as error:
        raise BenchError(f"--model: {error}") from error
    async with AsyncExitStack() as stack:
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="bench-")))
        clock = directory / "clock"
        scheduler = InstantScheduler(vocab_size, StepClock(clock, vocab_size))  # type: ignore[abstract]  # not asked
        scheduler_address, address = f"unix:{directory}/scheduler.sock", f"{HOST}:{free_port()}"
        await scheduler.start(scheduler_address)
        stack.push_async_callback(scheduler.stop)
        frontend = BenchProcess(
            stack,
            directory / "frontend.log",
            "frontend",
            model=options.model,
            host=HOST,
            port=address.rpartition(":")[2],
            scheduler_address=scheduler_address,
            exit_with_parent=True,
        )
        await frontend.wait_until(lambda: scheduler.connected)
        rig = Rig(options.calls, address, clock, vocab_size, scheduler, frontend.pid)
        with console.status("warming up"):
            await rig.run("warm-up", WARM_UP_TOKENS, None)
        runs = []
        with console.status("paced"):
            runs.append(await rig.run("paced", options.tokens, options.rate))
        with console.status("flat out"):
            # A flat-out run with as many tokens as the paced one would take fewer seconds.
            runs.append(await rig.run("flat out", 4 * options.tokens, None))
        return runs


@dataclass(frozen=True)
class Rig:
    """A frontend at `address`, its scheduler, and the scheduler's clock."""

    calls: int
    address: str
    clock: Path
    slots: int  # in the clock
    scheduler: InstantScheduler
    frontend_pid: int

    async def run(self, name: str, tokens_per_call: int, rate: int | None) -> Run:
        """Delivers `tokens_per_call` tokens in every call, at `rate` tokens/s over all calls.

        Raises:
            BenchError: tokens are missing, or the run takes too long.
        """
        try:
            async with asyncio.timeout(TIMEOUT_S):
                clients = [await self._start_client(n, tokens_per_call) for n in range(CLIENTS)]
                await self.scheduler.wait_for_requests(self.calls)
                before = cpu_s(self.frontend_pid)
                self.scheduler.go(step_s=self.calls / rate if rate else 0.0)
                outputs = [(await client.communicate())[0] for client in clients]
                frontend_cpu_s = cpu_s(self.frontend_pid) - before
        except TimeoutError:
            raise BenchError(f"{name}: the run did not end within {TIMEOUT_S:.0f} s") from None
        received: list[dict[str, Any]] = [json.loads(output) for output in outputs if output]
        tokens: int = sum(each["tokens"] for each in received)
        if tokens != self.calls * tokens_per_call:
            raise BenchError(f"{name}: {tokens} of {self.calls * tokens_per_call} tokens arrived")
        seconds = max(e["last_at"] for e in received) - min(e["first_at"] for e in received)
        latencies = [s for each in received for s in each["latencies_s"]] if rate else []
        return Run(
            name=name,
            offered_tokens_per_s=rate,
            tokens_per_s=tokens / seconds,
            tokens=tokens,
            tokens_per_chunk=tokens / sum(each["chunks"] for each in received),
            frontend_cpu_s_per_1000_tokens=1000 * frontend_cpu_s / tokens,
            client_cpu_s_per_1000_tokens=1000 * sum(e["cpu_s"] for e in received) / tokens,
            latency_p50_s=percentile(latencies, 50),
            latency_p99_s=percentile(latencies, 99),
        )

    async def _start_client(self, number: int, tokens: int) -> asyncio.subprocess.Process:
        flags = {
            "--address": self.address,
            "--clock": self.clock,
            "--slots": self.slots,
            "--calls": self.calls // CLIENTS + (number < self.calls % CLIENTS),
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
