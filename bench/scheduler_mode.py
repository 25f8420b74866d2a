"""`python -m bench --mode scheduler`: measures the scheduler's time, with an instant worker.

The scheduler reads its other settings from NANO_<NAME>. See docs/results/cpu.md.
"""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import statistics
from collections.abc import Sequence as Seq
from typing import Any

from rich.console import Console

from bench.report import check_minimum, figure_rows, mode_parser, print_table
from bench.scheduler_decode import Decode, measure_decode
from bench.scheduler_planning import measure_planning

_PLANNING_CONTEXTS = (100, 4000)  # besides --context
_DECODE_ROWS = (
    ("steps/s", "steps_per_s", "{:,.1f}"),
    ("tokens/s", "tokens_per_s", "{:,.0f}"),
    ("mean batch, sequences", "mean_batch", "{:.1f}"),
    ("mean context, tokens", "mean_context", "{:.0f}"),
    ("CPU per step: scheduler, ms", "scheduler_cpu_ms", "{:.2f}"),
    ("CPU per step: worker, ms", "worker_cpu_ms", "{:.2f}"),
    ("CPU per step: client, ms", "client_cpu_ms", "{:.2f}"),
)
_PLANNING_ROWS = (
    ("waiting", "waiting", "{:,}"),
    ("context", "context", "{:,}"),
    ("plan, ms", "plan_ms_p50", "{:.3f}"),
    ("apply, ms", "apply_ms_p50", "{:.3f}"),
    ("plan and apply, ms", "plan_and_apply_ms_p50", "{:.3f}"),
    ("p99", "plan_and_apply_ms_p99", "{:.3f}"),
    ("encode, ms", "encode_ms_p50", "{:.3f}"),
    ("bytes", "step_bytes", "{:,}"),
)


def parse_args(args: list[str]) -> argparse.Namespace:
    parser = mode_parser("scheduler", __doc__)
    add = parser.add_argument
    add("--num-seqs", type=int, nargs="+", default=[256, 1024], help="%(default)s")
    add("--context", type=int, default=600, help="tokens per sequence, %(default)s")
    add("--steps", type=int, default=600, help="steps of a round, %(default)s")
    add("--rounds", type=int, default=3, help="rounds, of which the median counts, %(default)s")
    add("--waiting", type=int, nargs="+", default=[0, 1000, 10_000], help="%(default)s")
    options = parser.parse_args(args)
    check_minimum(parser, options, 1, ["num_seqs", "context", "steps", "rounds"])
    check_minimum(parser, options, 0, ["waiting"])
    return options


def measure(options: argparse.Namespace, console: Console) -> dict[str, Any]:
    """Measures decoding and planning; returns the figures for the JSON.

    Raises:
        BenchError: a figure cannot be measured with these options.
        AioRpcError: the scheduler was lost.
    """
    decode = []
    for num_seqs in options.num_seqs:
        with console.status(f"{num_seqs} sequences decode"):
            rounds = asyncio.run(
                measure_decode(num_seqs, options.context, options.steps, options.rounds)
            )
        decode.append(dataclasses.asdict(_median_round(rounds)))
    with console.status("planning in this process"):
        cases = [(waiting, options.context) for waiting in options.waiting]
        cases += [(options.waiting[0], context) for context in _PLANNING_CONTEXTS]
        found = measure_planning(
            cases, options.num_seqs[0], max(1, options.steps // 6), options.rounds
        )
    planning = [dataclasses.asdict(each) for each in found]

    title = "all sequences decode, over gRPC, with a worker that answers at once"
    columns = ["", *(f"{each['num_seqs']:,}" for each in decode)]
    print_table(console, title, columns, figure_rows(decode, _DECODE_ROWS))
    title = f"a step in process, {options.num_seqs[0]} sequences: medians"
    columns = ["", *map(str, range(1, len(planning) + 1))]
    print_table(console, title, columns, figure_rows(planning, _PLANNING_ROWS))
    return {
        "steps_per_s": decode[0]["steps_per_s"],
        "tokens_per_s": decode[0]["tokens_per_s"],
        "plan_ms_p50": planning[0]["plan_and_apply_ms_p50"],
        "decode": decode,
        "planning": planning,
    }


def _median_round(rounds: Seq[Decode]) -> Decode:
    """The round with the median rate, the lower of two, so that all figures are of one round."""
    rate = statistics.median_low(each.steps_per_s for each in rounds)
    return next(each for each in rounds if each.steps_per_s == rate)
