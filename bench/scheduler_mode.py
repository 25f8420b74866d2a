"""`python -m bench --mode scheduler`: the scheduler's own time, with a worker that takes none."""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import json
import statistics
import sys
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from grpc import aio
from rich.console import Console
from rich.table import Table

from bench.errors import BenchError
from bench.machine import Machine, this_machine
from bench.scheduler_burst import Burst, measure_burst
from bench.scheduler_decode import Decode, measure_decode
from bench.scheduler_planning import Planning, measure_planning

_BURST_STREAMS = 64
_PLANNING_CONTEXTS = (100, 4000)  # besides --context


@dataclass(frozen=True)
class SchedulerResult:
    decode: list[Decode]  # one per number of sequences
    planning: list[Planning]
    burst: Burst
    machine: Machine

    def to_json(self) -> dict[str, Any]:
        return {
            "mode": "scheduler",
            "steps_per_s": self.decode[0].steps_per_s,
            "tokens_per_s": self.decode[0].tokens_per_s,
            "plan_ms_p50": self.planning[0].plan_and_apply_ms_p50,
            "decode": [dataclasses.asdict(each) for each in self.decode],
            "planning": [dataclasses.asdict(each) for each in self.planning],
            "burst": dataclasses.asdict(self.burst),
            **dataclasses.asdict(self.machine),
        }


def parse_args(args: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m bench --mode scheduler",
        description="The scheduler reads its other settings from NANO_<NAME>.",
    )
    add = parser.add_argument
    add("--num-seqs", type=int, nargs="+", default=[256, 1024], help="%(default)s")
    add("--context", type=int, default=600, help="tokens per sequence, %(default)s")
    add("--steps", type=int, default=600, help="measured in a round, %(default)s")
    add("--rounds", type=int, default=3, help="the median counts, %(default)s")
    add("--waiting", type=int, nargs="+", default=[0, 1000, 10_000], help="%(default)s")
    add("--long-prompts", type=int, default=32, help="in the burst, %(default)s")
    add("--long-prompt-tokens", type=int, default=4000, help="%(default)s")
    add("--out", type=Path, default=Path("bench-scheduler.json"), help="%(default)s")
    options = parser.parse_args(args)
    for name, value in vars(options).items():
        minimum = 0 if name == "waiting" else 1
        if name != "out" and min(value if isinstance(value, list) else [value]) < minimum:
            parser.error(f"--{name.replace('_', '-')}: must be at least {minimum}")
    return options


def bench(options: argparse.Namespace, console: Console) -> SchedulerResult:
    """
    Raises:
        BenchError: what was asked cannot be measured.
        AioRpcError: the scheduler was lost.
    """
    decode = []
    for num_seqs in options.num_seqs:
        with console.status(f"{num_seqs} sequences decode"):
            rounds = asyncio.run(
                measure_decode(num_seqs, options.context, options.steps, options.rounds)
            )
        decode.append(_median_round(rounds))
    with console.status("planning in this process"):
        cases = [(waiting, options.context) for waiting in options.waiting]
        cases += [(options.waiting[0], context) for context in _PLANNING_CONTEXTS]
        planning = measure_planning(
            cases, options.num_seqs[0], max(1, options.steps // 6), options.rounds
        )
    with console.status("a burst of long prompts"):
        burst = asyncio.run(
            measure_burst(
                _BURST_STREAMS, options.long_prompts, options.long_prompt_tokens, options.steps
            )
        )
    return SchedulerResult(decode, planning, burst, this_machine())


def _median_round(rounds: Seq[Decode]) -> Decode:
    """The round with the lower median rate, so that all figures come from one round."""
    rate = statistics.median_low(each.steps_per_s for each in rounds)
    return next(each for each in rounds if each.steps_per_s == rate)


def print_tables(result: SchedulerResult, console: Console) -> None:
    table = Table(title="all sequences decode, over gRPC, with a worker that answers at once")
    table.add_column("")
    for decode in result.decode:
        table.add_column(f"{decode.num_seqs:,}", justify="right")
    for label, name, pattern in _DECODE_ROWS:
        table.add_row(label, *(pattern.format(getattr(d, name)) for d in result.decode))
    console.print(table)

    table = Table(title=f"in process, {result.planning[0].num_seqs} sequences: median ms of a step")
    for label in ("waiting", "context", *_PLANNING_COLUMNS):
        table.add_column(label, justify="right")
    for each in result.planning:
        times = (f"{getattr(each, name):.3f}" for name in _PLANNING_COLUMNS.values())
        table.add_row(f"{each.waiting:,}", f"{each.context:,}", *times)
    console.print(table)
    sizes = (f"{each.step_bytes:,} (context {each.context:,})" for each in result.planning)
    console.print(f"bytes of a step: {', '.join(dict.fromkeys(sizes))}")

    burst = result.burst
    table = Table(
        title=f"{burst.streams} streams, then {burst.long_prompts} prompts of "
        f"{burst.long_prompt_tokens:,} tokens, {burst.short_prompts} short ones: ms"
    )
    for label in ("", "p50", "p99", "max"):
        table.add_column(label, justify="right")
    for label, name in _BURST_ROWS:
        values = (getattr(burst, f"{name}_{q}_ms", None) for q in ("p50", "p99", "max"))
        table.add_row(label, *("" if v is None else f"{v:.1f}" for v in values))
    console.print(table)
    console.print(f"prompt tokens/s of the burst: {burst.prompt_tokens_per_s:,.0f}")


_DECODE_ROWS = (
    ("steps/s", "steps_per_s", "{:,.1f}"),
    ("tokens/s", "tokens_per_s", "{:,.0f}"),
    ("mean batch, sequences", "mean_batch", "{:.1f}"),
    ("mean context, tokens", "mean_context", "{:.0f}"),
    ("CPU per step: scheduler, ms", "scheduler_cpu_ms", "{:.2f}"),
    ("CPU per step: worker, ms", "worker_cpu_ms", "{:.2f}"),
    ("CPU per step: client, ms", "client_cpu_ms", "{:.2f}"),
)
_PLANNING_COLUMNS = {
    "plan": "plan_ms_p50",
    "apply": "apply_ms_p50",
    "plan+apply": "plan_and_apply_ms_p50",
    "p99": "plan_and_apply_ms_p99",
    "encode": "encode_ms_p50",
    "encode p99": "encode_ms_p99",
}
_BURST_ROWS = (
    ("gap between a stream's tokens, before", "gap_before"),
    ("gap, during", "gap_during"),
    ("first token of a short prompt", "short_ttft"),
    ("first token of a long prompt", "long_ttft"),
)


def main(args: list[str]) -> int:
    options = parse_args(args)
    console = Console()
    try:
        result = bench(options, console)
    except BenchError as error:
        print(f"bench: {error}", file=sys.stderr)
        return 1
    except aio.AioRpcError as error:
        print(f"bench: the scheduler: {error.code().name}: {error.details()}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    print_tables(result, console)
    options.out.write_text(json.dumps(result.to_json(), indent=2) + "\n", encoding="utf-8")
    console.print(f"written: {options.out}")
    return 0
