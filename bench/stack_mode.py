"""`python -m bench`: runs the workload on a running server or a private stack, and in this process.

The stack reads its settings from NANO_<NAME>. See docs/results/cpu.md.
"""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
from collections.abc import Iterator
from typing import Any

from rich.console import Console

from bench.report import check_lengths, check_minimum, figure_rows, mode_parser, print_table
from bench.stack import (
    Run,
    SingleStream,
    measure_single_stream,
    measured_server,
    run_stack,
    stats_reader,
)
from bench.workload import (
    TEMPERATURE,
    Shape,
    check_fits,
    reference_workload,
    warm_up_request,
)
from deploy.model import resolve_model
from nano_vllm_grpc import AsyncLLM, ModelInfo

_ROWS = (
    ("output tokens/s", "output_tokens_per_s", "{:,.1f}"),
    ("total tokens/s", "total_tokens_per_s", "{:,.1f}"),
    ("time to first token p50, s", "ttft_p50_s", "{:.3f}"),
    ("time to first token p99, s", "ttft_p99_s", "{:.3f}"),
    ("inter-token latency p50, s", "itl_p50_s", "{:.4f}"),
    ("inter-token latency p99, s", "itl_p99_s", "{:.4f}"),
    ("duration, s", "duration_s", "{:.2f}"),
    ("prompt tokens", "prompt_tokens", "{:,}"),
    ("output tokens", "output_tokens", "{:,}"),
    ("steps", "steps", "{:,}"),
    ("mean batch, sequences", "mean_batch", "{:.1f}"),
    ("mean tokens per step", "mean_step_tokens", "{:.1f}"),
    ("prefix-cache hits, prompt tokens", "cached_prompt_tokens", "{:,}"),
    ("preemptions", "preemptions", "{:,}"),
)


def parse_args(args: list[str]) -> argparse.Namespace:
    parser = mode_parser("stack", __doc__)
    parser.add_argument("--address", help="address of a frontend; default: start a private stack")
    workload = parser.add_argument_group("workload")
    for field in dataclasses.fields(Shape):
        flag = f"--{field.name.replace('_', '-')}"
        workload.add_argument(flag, type=int, default=field.default, help="%(default)s")
    parser.add_argument(
        "--no-in-process",
        action="store_true",
        help="only through gRPC; a private stack of one rank is else compared with one process",
    )
    parser.add_argument(
        "--single-stream", action="store_true", help="also one stream and a 1,024-token prompt"
    )
    options = parser.parse_args(args)
    check_lengths(parser, options)
    check_minimum(parser, options, 1, ["num_seqs"])
    return options


def measure(options: argparse.Namespace, console: Console) -> Iterator[dict[str, Any]]:
    """Yields the figures of the workload.

    Raises:
        BenchError: a figure cannot be measured with these options.
        LLMError: the server or the private stack failed.
    """
    shape = Shape(*(getattr(options, field.name) for field in dataclasses.fields(Shape)))
    with measured_server(options, console) as (address, scheduler_address):
        measured = _measure_stack(options, shape, address, scheduler_address, console)
        model, run, single = asyncio.run(measured)
    runs = [run]
    one_rank = model.capacity.tensor_parallel_size == 1
    if one_rank and not (options.address or options.no_in_process):
        runs.append(_measure_in_process(options.model, shape, model, console))
    rates = [each.metrics.output_tokens_per_s for each in runs]
    split_ratio = rates[0] / rates[1] if len(runs) > 1 else None
    yield {
        "model": model.model,
        "address": address,
        **run.figures(),
        "split_ratio": split_ratio,
        "in_process": runs[1].figures() if len(runs) > 1 else None,
        **dataclasses.asdict(single),
        "workload": {**dataclasses.asdict(shape), "temperature": TEMPERATURE},
    }
    title = f"{model.model}: {run.metrics.requests} requests"
    rows = figure_rows([each.figures() for each in runs], _ROWS)
    print_table(console, title, ["", *(each.name for each in runs)], rows)
    if split_ratio is not None:
        console.print(f"split ratio (stack / in process): {split_ratio:.3f}")
    if options.single_stream:
        console.print(
            f"one stream: {single.single_stream_tokens_per_s:.1f} tokens/s, "
            f"first token of a 1,024-token prompt: {single.ttft_1024_s:.3f} s"
        )
    if run.stats and run.stats.cached_prompt_tokens:
        console.print("some prompts were in the prefix cache: the server has seen them before")


async def _measure_stack(
    options: argparse.Namespace,
    shape: Shape,
    address: str,
    scheduler_address: str | None,
    console: Console,
) -> tuple[ModelInfo, Run, SingleStream]:
    async with AsyncLLM(address) as llm:
        model = await llm.get_model()
        requests = reference_workload(shape, model.vocab_size)
        check_fits(requests, model.max_model_len)
        warm_up = warm_up_request(shape, model.vocab_size)
        read_stats = stats_reader(address, scheduler_address)
        with console.status(f"{len(requests)} requests through the stack"):
            run = await run_stack(llm, warm_up, requests, read_stats)
        single = SingleStream(None, None)
        if options.single_stream:
            with console.status("one stream"):
                single = await measure_single_stream(llm, model)
    return model, run, single


def _measure_in_process(name: str, shape: Shape, model: ModelInfo, console: Console) -> Run:
    from bench.in_process import InProcessEngine

    with console.status("loading the model in this process"):
        engine = InProcessEngine(str(resolve_model(name)), model)
    requests = reference_workload(shape, model.vocab_size)
    with console.status(f"{len(requests)} requests in this process"):
        return asyncio.run(engine.run(warm_up_request(shape, model.vocab_size), requests))
