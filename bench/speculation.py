"""`python -m bench.speculation`: measures how much faster streams are with drafts, by kind of text.

Two private stacks, with `SPECULATION=none` and `auto`, answer prompts of `speculation_prompts.json`
in turn, so many at a time. Which is first alternates. After half of the pairs, both start again in
the other order: of two equal stacks, the second was up to 5 % slower. A figure is the median over
the pairs. Both stacks must give equal tokens. See docs/results/cpu.md.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import time
from collections.abc import Iterable
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from itertools import cycle, islice, product
from pathlib import Path
from typing import Any

from rich.console import Console

from bench.machine import this_machine
from bench.metrics import percentile
from bench.report import check_minimum
from bench.stack import private_stack
from deploy.errors import LaunchError
from deploy.model import model_name, resolve_model
from nano_vllm_grpc import AsyncLLM, LLMError, SamplingParams, StructuredOutput

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
    parser = argparse.ArgumentParser(prog="python -m bench.speculation", description=__doc__)
    parser.add_argument("--model", default="smollm2", help="what MODEL takes; %(default)s")
    parser.add_argument("--out", type=Path, required=True, help="JSON file to write")
    parser.add_argument("--pairs", type=int, default=3, help="%(default)s")
    parser.add_argument("--groups", nargs="+", choices=groups, default=groups, help="default: all")
    parser.add_argument("--temperatures", nargs="+", choices=TEMPERATURES,
                        default=["greedy", "default"], help="default: greedy default")  # fmt: skip
    parser.add_argument("--prompts", type=int, default=8, help="of each group; %(default)s")
    parser.add_argument("--streams", type=int, nargs="+", default=[1, 8, 32], help="%(default)s")
    parser.add_argument("--tokens", type=int, default=128, help="per answer; %(default)s")
    parser.add_argument("--max-num-seqs", type=int, default=256,
                        help="drafts need more than streams; %(default)s")  # fmt: skip
    options = parser.parse_args(args)
    check_minimum(parser, options, 1, ("pairs", "streams", "tokens", "prompts", "max_num_seqs"))
    return options


def read_prompts() -> dict[str, list[dict[str, Any]]]:
    """The prompts of each group. Each has a `prompt`, and a `schema` if JSON is the answer."""
    prompts: dict[str, list[dict[str, Any]]] = json.loads(PROMPTS.read_text(encoding="utf-8"))
    return prompts


def measure(
    model: Path, options: argparse.Namespace, console: Console
) -> Iterable[dict[Case, Found]]:
    """Yields the results after each pair.

    Raises:
        LLMError: a stack does not start, or fails.
    """
    kinds = product(options.groups, options.streams, options.temperatures)
    found = {Case(*kind): Found() for kind in kinds}
    half = -(-options.pairs // 2)
    for settings, pairs in ((SETTINGS, half), (SETTINGS[::-1], options.pairs - half)):
        with ExitStack() as stacks:
            addresses = {}
            for setting in settings if pairs else ():
                limits = {"max_num_seqs": options.max_num_seqs}
                started = private_stack(model, console, speculation=setting, **limits)
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
    """Runs a case on a stack."""
    prompts = read_prompts()[case.group][: options.prompts]
    async with AsyncLLM(address, max_in_flight=case.streams) as llm:
        await llm.generate("Hello", SamplingParams(max_tokens=8), use_tqdm=False)  # warms up
        return await _run(llm, prompts, case, options.tokens)


async def _run(llm: AsyncLLM, prompts: list[dict[str, Any]], case: Case, tokens: int) -> Run:
    """Sends every prompt at least once, with another seed each time."""
    count = max(len(prompts), _ROUNDS * case.streams)
    chosen = list(islice(cycle(prompts), count))
    params = []
    for seed, each in enumerate(chosen):
        schema = StructuredOutput(json_schema=each["schema"]) if "schema" in each else None
        temperature = TEMPERATURES[case.temperature]
        params.append(SamplingParams(temperature=temperature, seed=seed, max_tokens=tokens,
                                     structured_output=schema))  # fmt: skip
    chats = [[{"role": "user", "content": each["prompt"]}] for each in chosen]
    start = time.perf_counter()
    completions = await llm.chat(chats, params, use_tqdm=False)
    seconds = time.perf_counter() - start
    token_ids = [each["token_ids"] for each in completions]
    return Run(sum(map(len, token_ids)) / seconds, token_ids)


def table(found: dict[Case, Found]) -> str:
    """The ratios as a Markdown table, with quartiles in brackets."""
    streams = list(dict.fromkeys(case.streams for case in found))
    names = ["1 stream" if each == 1 else f"{each} streams" for each in streams]
    lines = [f"| text | temperature | {' | '.join(names)} |", f"|---|---|{'---|' * len(names)}"]
    for group, temperature in dict.fromkeys((case.group, case.temperature) for case in found):
        cells = []
        for each in streams:
            ratio = found[Case(group, each, temperature)].figures()["ratio"]
            low, high = ratio["first_quartile"], ratio["third_quartile"]
            cells.append(f"{ratio['median']:.2f} ({low:.2f} to {high:.2f})")
        lines.append(f"| {group} | {temperature} | {' | '.join(cells)} |")
    return "\n".join(lines)


def main(args: list[str]) -> int:
    options = parse_args(args)
    console = Console(stderr=True)
    try:
        model = resolve_model(options.model).resolve()
        for found in measure(model, options, console):
            content = {
                "mode": "speculation",
                "date": datetime.now(UTC).date().isoformat(),
                "command": ["python", "-m", "bench.speculation", *args],
                "model": model_name(options.model, model),
                "tokens": options.tokens,
                "cases": [asdict(case) | each.figures() for case, each in found.items()],
                **asdict(this_machine()),
            }
            options.out.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
    except (LaunchError, LLMError) as error:
        print(f"bench.speculation: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    print(table(found))
    if differing := sum(each.differing for each in found.values()):
        print(f"the tokens of {differing} requests differ between the stacks", file=sys.stderr)
    return int(differing > 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
