"""`python -m bench`: runs the workload on a running server or a private stack, and in this process.

With `--mode` it measures the scheduler or the frontend alone, latency against load, the cost of the
HTTP gateway, or the choice among engines. See docs/results/cpu.md.
"""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import os
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NoReturn

from rich.console import Console
from tqdm import tqdm

from bench.report import check_lengths, check_minimum, figure_rows, mode_parser, print_table
from bench.stack import (
    Run,
    SingleStream,
    measure_single_stream,
    private_stack,
    run_stack,
    stats_reader,
)
from bench.workload import (
    TEMPERATURE,
    BenchError,
    Shape,
    WorkloadRequest,
    check_fits,
    reference_workload,
    warm_up_request,
)
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
    parser.add_argument(
        "--model",
        default="models/demo",
        help="for the private stack and --in-process, %(default)s; "
        "NANO_<NAME> variables have their other settings",
    )
    parser.add_argument("--scheduler-address", help="default: found in .run/<PORT>")
    workload = parser.add_argument_group("workload")
    for field in dataclasses.fields(Shape):
        flag = f"--{field.name.replace('_', '-')}"
        workload.add_argument(flag, type=int, default=field.default, help="%(default)s")
    parser.add_argument(
        "--in-process",
        action=argparse.BooleanOptionalAction,
        help="also without gRPC, and print the ratio; default: for a private stack of one rank",
    )
    parser.add_argument(
        "--single-stream", action="store_true", help="also one stream and a 1,024-token prompt"
    )
    options = parser.parse_args(args)
    check_lengths(parser, options)
    check_minimum(parser, options, 1, ["num_seqs"])
    return options


def measure(options: argparse.Namespace, console: Console) -> dict[str, Any]:
    """Measures the workload; returns the figures for the JSON.

    Raises:
        BenchError: a figure cannot be measured with these options.
        LLMError: the server or the private stack failed.
    """
    shape = Shape(*(getattr(options, field.name) for field in dataclasses.fields(Shape)))
    with _server(options, console) as (address, scheduler_address):
        measured = _measure_stack(options, shape, address, scheduler_address, console)
        model, run, single = asyncio.run(measured)
    runs = [run]
    if options.in_process:
        runs.append(_measure_in_process(options.model, shape, model, console))
    rates = [each.metrics.output_tokens_per_s for each in runs]
    split_ratio = rates[0] / rates[1] if options.in_process else None

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
    return {
        "model": model.model,
        "address": address,
        **run.figures(),
        "split_ratio": split_ratio,
        "in_process": runs[1].figures() if options.in_process else None,
        **dataclasses.asdict(single),
        "workload": {**dataclasses.asdict(shape), "temperature": TEMPERATURE},
    }


@contextmanager
def _server(options: argparse.Namespace, console: Console) -> Iterator[tuple[str, str | None]]:
    """Yields the addresses of a frontend and its scheduler, from `options` or a private stack."""
    if options.address:
        yield options.address, options.scheduler_address
        return
    with tempfile.TemporaryDirectory(prefix="bench-") as directory:
        scheduler_address = f"unix:{directory}/scheduler.sock"
        with private_stack(options.model, console, scheduler_address=scheduler_address) as stack:
            yield stack.address, scheduler_address


async def _measure_stack(
    options: argparse.Namespace,
    shape: Shape,
    address: str,
    scheduler_address: str | None,
    console: Console,
) -> tuple[ModelInfo, Run, SingleStream]:
    """Runs the workload on the stack. If it shall also run in this process, checks first that it
    can. Decides that question if `options` leave it open."""
    async with AsyncLLM(address) as llm:
        model = await llm.get_model()
        requests = reference_workload(shape, model.vocab_size)
        check_fits(requests, model.max_model_len)
        if options.in_process is None:
            one_rank = model.capacity.tensor_parallel_size == 1
            options.in_process = not options.address and one_rank
        if options.in_process:
            _check_same_model(options.model, model)
        warm_up = warm_up_request(shape, model.vocab_size)
        read_stats = stats_reader(address, scheduler_address)
        with _progress("stack", requests) as bar:
            run = await run_stack(llm, warm_up, requests, read_stats, bar.update)
        single = SingleStream(None, None)
        if options.single_stream:
            with console.status("one stream"):
                single = await measure_single_stream(llm, model)
    return model, run, single


def _check_same_model(directory: str, served: ModelInfo) -> None:
    if Path(directory).resolve().name != served.model:
        raise BenchError(f"--model: {directory} is not the server's model, {served.model}")


def _measure_in_process(directory: str, shape: Shape, model: ModelInfo, console: Console) -> Run:
    # This must be set before torch is imported, as in a worker process.
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    from bench.in_process import load_engine

    with console.status("loading the model in this process"):
        engine = load_engine(directory, model)
    requests = reference_workload(shape, model.vocab_size)
    warm_up = warm_up_request(shape, model.vocab_size)
    with _progress("in process", requests) as bar:
        return asyncio.run(engine.run(warm_up, requests, bar.update))


def _progress(name: str, requests: Sequence[WorkloadRequest]) -> tqdm[NoReturn]:
    """A progress bar of output tokens."""
    return tqdm(total=sum(each.output_len for each in requests), desc=name, unit=" tokens")
