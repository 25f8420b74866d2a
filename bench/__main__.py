"""`python -m bench`: measures a running server, or a private stack; with `--mode scheduler` or
`--mode frontend` just that service, with `--mode features` the cost of sampling features, with
`--mode load` latency against load, with `--mode http` the cost of the gateway, with
`--mode routing` the choice among engines. See docs/benchmarks.md."""

from __future__ import annotations

import argparse
import asyncio
import os
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, Progress, ProgressColumn, Task, TextColumn, TimeElapsedColumn
from rich.text import Text

from bench.engine_stats import stats_reader
from bench.errors import BenchError
from bench.machine import this_machine
from bench.result import Result, print_table, write_json
from bench.single_stream import measure_single_stream
from bench.stack import Received, private_stack, run_stack
from bench.workload import Shape, check_fits, reference_workload, warm_up_request
from nano_vllm_grpc import AsyncLLM, LLMError, ModelInfo


def _mode_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument(
        "--mode",
        choices=["stack", "scheduler", "frontend", "features", "load", "http", "routing"],
        default="stack",
        help="%(default)s; the others have flags of their own",
    )
    return parser


def parse_args(args: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m bench", description=__doc__, parents=[_mode_parser()]
    )
    parser.add_argument("--address", help="a frontend's; default: start a private stack")
    parser.add_argument(
        "--model",
        default="models/demo",
        help="for the private stack and --in-process, %(default)s; "
        "NANO_<NAME> variables have their other settings",
    )
    parser.add_argument("--scheduler-address", help="default: found in .run/<PORT>")
    default = Shape()
    shape = parser.add_argument_group("workload")
    shape.add_argument("--num-seqs", type=int, default=default.num_seqs)
    shape.add_argument("--min-input", type=int, default=default.min_input)
    shape.add_argument("--max-input", type=int, default=default.max_input)
    shape.add_argument("--min-output", type=int, default=default.min_output)
    shape.add_argument("--max-output", type=int, default=default.max_output)
    shape.add_argument("--seed", type=int, default=default.seed)
    parser.add_argument(
        "--in-process",
        action=argparse.BooleanOptionalAction,
        help="also without gRPC, and print the ratio; default: for a private stack of one rank",
    )
    parser.add_argument(
        "--single-stream", action="store_true", help="also one stream and a 1,024-token prompt"
    )
    parser.add_argument("--out", type=Path, default=Path("bench.json"), help="%(default)s")
    options = parser.parse_args(args)
    if not 1 <= options.min_input <= options.max_input:
        parser.error("--min-input: must be at least 1 and at most --max-input")
    if not 1 <= options.min_output <= options.max_output:
        parser.error("--min-output: must be at least 1 and at most --max-output")
    if options.num_seqs < 1:
        parser.error("--num-seqs: must be at least 1")
    return options


@contextmanager
def server(options: argparse.Namespace, console: Console) -> Iterator[tuple[str, str | None]]:
    """Yields the address to measure and its scheduler's: those given, or a private stack's."""
    if options.address:
        yield options.address, options.scheduler_address
        return
    with tempfile.TemporaryDirectory(prefix="bench-") as directory:
        scheduler_address = f"unix:{directory}/scheduler.sock"
        with private_stack(options.model, console, scheduler_address=scheduler_address) as stack:
            yield stack.address, scheduler_address


def check_same_model(directory: str, served: ModelInfo) -> None:
    """
    Raises:
        BenchError: the server's model is not the one to run in this process.
    """
    if Path(directory).resolve().name != served.model:
        raise BenchError(f"--model: is {directory}, the server has {served.model}")


async def bench(options: argparse.Namespace, console: Console) -> Result:
    """
    Raises:
        BenchError: what was asked cannot be measured.
        LLMError: the server, or the private stack, failed.
    """
    shape = Shape(
        options.num_seqs,
        options.min_input,
        options.max_input,
        options.min_output,
        options.max_output,
        options.seed,
    )
    single = in_process = None
    with server(options, console) as (address, scheduler_address):
        async with AsyncLLM(address) as llm:
            model = await llm.get_model()
            requests = reference_workload(shape, model.vocab_size)
            check_fits(requests, model.max_model_len)
            compare = options.in_process
            if compare is None:
                compare = not options.address and model.capacity.tensor_parallel_size == 1
            if compare:
                check_same_model(options.model, model)
            warm_up = warm_up_request(shape, model.vocab_size)
            total = sum(request.output_len for request in requests)
            with progress("stack", total, console) as received:
                read_stats = stats_reader(address, scheduler_address)
                stack = await run_stack(llm, warm_up, requests, read_stats, received)
            if options.single_stream:
                with console.status("one stream"):
                    single = await measure_single_stream(llm, model)
    if compare:
        # Before torch is imported, as in the worker's own process.
        os.environ.setdefault("OMP_WAIT_POLICY", "passive")
        from bench.in_process import InProcessEngine

        with console.status("loading the model in this process"):
            engine = InProcessEngine(options.model, model)
        with progress("in process", total, console) as received:
            in_process = await engine.run(warm_up, requests, received)
    return Result(model.model, address, shape, this_machine(), stack, in_process, single)


class _Rate(ProgressColumn):
    def render(self, task: Task) -> Text:
        return Text(f"{task.finished_speed or task.speed or 0:,.1f} tokens/s")


@contextmanager
def progress(name: str, total: int, console: Console) -> Iterator[Received]:
    """Shows a bar of output tokens; yields a function that takes each chunk's number of tokens."""
    columns = (TextColumn("{task.description}"), BarColumn(), _Rate(), TimeElapsedColumn())
    with Progress(*columns, console=console) as bars:
        task = bars.add_task(name, total=total)
        yield lambda tokens: bars.advance(task, tokens)


def main(args: list[str]) -> int:
    chosen, rest = _mode_parser().parse_known_args(args)
    if chosen.mode != "stack":
        # Imported on demand: each mode needs different services.
        status: int = import_module(f"bench.{chosen.mode}_mode").main(rest)
        return status
    options = parse_args(args)
    console = Console()
    try:
        result = asyncio.run(bench(options, console))
    except (BenchError, LLMError) as error:
        print(f"bench: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    from bench.plot import write_plot  # matplotlib takes a second to import

    print_table(result, console)
    write_json(result, options.out)
    picture = options.out.with_suffix(".png")
    write_plot(result, picture)
    console.print(f"written: {options.out} {picture}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
