"""`python -m bench --mode speculation`: measures how much faster streams are with drafts.

Two private stacks, with `SPECULATION=none` and `auto`, answer prompts of `speculation_prompts.json`
in turn, so many at a time. Which is first alternates. After half of the pairs, both start again in
the other order: of two equal stacks, the second was up to 5 % slower. A figure is the median over
the pairs. Both stacks must give equal tokens. See docs/results/cpu.md.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import time
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from itertools import cycle, islice, product
from pathlib import Path
from typing import Any

from rich.console import Console

from bench.metrics import percentile
from bench.report import check_minimum, mode_parser, print_table
from bench.stack import private_stack
from bench.workload import BenchError
from deploy.model import model_name, resolve_model
from nano_vllm_grpc import AsyncLLM, SamplingParams, StructuredOutput

PROMPTS = Path(__file__).with_name("speculation_prompts.json")
SETTINGS = ("none", "auto")  # of SPECULATION
# None: the model's. Hot text hardly repeats itself.
TEMPERATURES = {"greedy": 0.0, "default": None, "hot": 1.5}
_ROUNDS = 2  # requests per stream, at least
_PERCENTILES = {"median": 50, "first_quartile": 25, "third_quartile": 75}


@dataclass(frozen=True)
class Case:
    """A kind of text, the number of streams, and a temperature."""

    group: str
    streams: int
    temperature: str


@dataclass(frozen=True)
class Run:
    """A case on one stack: its speed, and each request's token ids."""

    tokens_per_s: float
    token_ids: list[list[int]]


@dataclass
class Found:
    """A case's results of all pairs so far, in their order."""

    none_tokens_per_s: list[float] = field(default_factory=list)
    auto_tokens_per_s: list[float] = field(default_factory=list)
    ratios: list[float] = field(default_factory=list)  # of tokens/s, auto to none
    differing: int = 0  # requests whose tokens differ between the stacks of a pair

    def add(self, none: Run, auto: Run) -> None:
        self.none_tokens_per_s.append(none.tokens_per_s)
        self.auto_tokens_per_s.append(auto.tokens_per_s)
        self.ratios.append(auto.tokens_per_s / none.tokens_per_s)
        self.differing += sum(
            ours != theirs for ours, theirs in zip(auto.token_ids, none.token_ids, strict=True)
        )

    def figures(self) -> dict[str, Any]:
        ratio = {name: percentile(self.ratios, q) for name, q in _PERCENTILES.items()}
        return {**asdict(self), "ratio": ratio}


def parse_args(args: list[str]) -> argparse.Namespace:
    groups = list(read_prompts())
    parser = mode_parser("speculation", __doc__, "smollm2")
    parser.add_argument("--pairs", type=int, default=3, help="%(default)s")
    parser.add_argument("--groups", nargs="+", choices=groups, default=groups, help="default: all")
    parser.add_argument("--temperatures", nargs="+", choices=TEMPERATURES,
                        default=["greedy", "default"], help="default: greedy default")  # fmt: skip
    parser.add_argument("--prompts", type=int, default=8, help="of each group; %(default)s")
    parser.add_argument("--streams", type=int, nargs="+", default=[1, 8, 32], help="%(default)s")
    parser.add_argument("--tokens", type=int, default=128, help="per answer; %(default)s")
    options = parser.parse_args(args)
    check_minimum(parser, options, 1, ("pairs", "streams", "tokens", "prompts"))
    return options


def read_prompts() -> dict[str, list[dict[str, Any]]]:
    """The prompts of each group. Each has a `prompt`, and a `schema` if JSON is the answer."""
    prompts: dict[str, list[dict[str, Any]]] = json.loads(PROMPTS.read_text(encoding="utf-8"))
    return prompts


def measure(options: argparse.Namespace, console: Console) -> Iterator[dict[str, Any]]:
    """Yields the results after each pair.

    Raises:
        BenchError: tokens differ between the stacks.
        LaunchError, LLMError: there is no such model, or a stack does not start or fails.
    """
    model = resolve_model(options.model).resolve()
    about = {"model": model_name(options.model, model), "tokens": options.tokens}
    for found in compare(model, options, console):
        yield about | {"cases": [asdict(case) | each.figures() for case, each in found.items()]}
    columns = ["streams", *map(str, options.streams)]
    print_table(console, "tokens/s with drafts, to those without", columns, table(found))
    if differing := sum(each.differing for each in found.values()):
        raise BenchError(f"the tokens of {differing} requests differ between the stacks")


def compare(
    model: Path, options: argparse.Namespace, console: Console
) -> Iterator[dict[Case, Found]]:
    """Yields the results of all cases after each pair."""
    kinds = product(options.groups, options.streams, options.temperatures)
    found = {Case(*kind): Found() for kind in kinds}
    half = -(-options.pairs // 2)
    for settings, pairs in ((SETTINGS, half), (SETTINGS[::-1], options.pairs - half)):
        with ExitStack() as stacks:
            addresses = {}
            for setting in settings if pairs else ():
                started = private_stack(model, console, speculation=setting)
                addresses[setting] = stacks.enter_context(started).address
            for number in range(pairs):
                for case, results in found.items():
                    runs: dict[str, Run] = {}
                    for setting in settings if number % 2 == 0 else settings[::-1]:
                        with console.status(f"{case}, {setting}"):
                            runs[setting] = asyncio.run(run_case(addresses[setting], case, options))
                    results.add(*(runs[setting] for setting in SETTINGS))
                yield found


async def run_case(address: str, case: Case, options: argparse.Namespace) -> Run:
    """Runs a case on a stack. Sends every prompt at least once, with another seed each time."""
    prompts = read_prompts()[case.group][: options.prompts]
    count = max(len(prompts), _ROUNDS * case.streams)
    chosen = list(islice(cycle(prompts), count))
    params = []
    for seed, each in enumerate(chosen):
        schema = StructuredOutput(json_schema=each["schema"]) if "schema" in each else None
        temperature = TEMPERATURES[case.temperature]
        params.append(SamplingParams(temperature=temperature, seed=seed, structured_output=schema,
                                     max_tokens=options.tokens))  # fmt: skip
    chats = [[{"role": "user", "content": each["prompt"]}] for each in chosen]
    async with AsyncLLM(address, max_in_flight=case.streams) as llm:
        await llm.generate("Hello", SamplingParams(max_tokens=8), use_tqdm=False)  # warms up
        start = time.perf_counter()
        completions = await llm.chat(chats, params, use_tqdm=False)
        seconds = time.perf_counter() - start
    token_ids = [each["token_ids"] for each in completions]
    return Run(sum(map(len, token_ids)) / seconds, token_ids)


def table(found: dict[Case, Found]) -> list[list[str]]:
    """A row for each kind of text and temperature: the ratio for each number of streams, with
    quartiles in brackets."""
    streams = dict.fromkeys(case.streams for case in found)
    rows = []
    for group, temperature in dict.fromkeys((case.group, case.temperature) for case in found):
        rows.append([f"{group}, {temperature}"])
        for each in streams:
            ratio = found[Case(group, each, temperature)].figures()["ratio"]
            low, high = ratio["first_quartile"], ratio["third_quartile"]
            rows[-1].append(f"{ratio['median']:.2f} ({low:.2f} to {high:.2f})")
    return rows
