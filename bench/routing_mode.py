"""`python -m bench --mode routing`: compares a frontend's choice of engines with other ways.

Conversations of several turns, which share system prompts, go to engines with modelled workers. A
step of such a worker takes a given time, and more per token. Each way of choosing an engine gets
equal arrivals and the same engines, with empty caches. See docs/results/cpu.md.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import dataclasses
import random
import statistics
import tempfile
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from rich.console import Console

from bench.completions import over_grpc, over_http
from bench.metrics import percentile
from bench.processes import BenchProcess
from bench.report import mode_parser, print_table
from bench.scheduler_processes import SchedulerUnderTest, Sizes, running_scheduler
from deploy.health import SERVING, check_health, http_health
from deploy.ports import free_port

HOST = "127.0.0.1"
_MODEL = "models/demo"
_GATEWAY = "gateway's cache_aware"
_MAX_MODEL_LEN = 8192
_WORDS = (
    *("once", "upon", "a", "time", "there", "was", "little", "fox", "who", "lived", "in", "the"),
    *("deep", "dark", "wood", "and", "one", "day", "she", "met", "an", "old", "bear", "by"),
    *("river", "he", "asked", "her", "where", "do", "you", "go", "so", "early", "said"),
)

# Sends a prompt and the number of tokens to make; returns the time of the first token.
Send = Callable[[str, int], Awaitable[float]]


@dataclass(frozen=True)
class Turn:
    """A request: its time in seconds since the start, its prompt and its number of tokens."""

    at: float
    prompt: str
    tokens: int


@dataclass(frozen=True)
class Outcome:
    """The results of one way to choose engines; times are in seconds."""

    way: str
    hit_rate: float  # share of the prompts' tokens that were cached
    ttft_p50_s: float
    ttft_p99_s: float
    ttft_mean_s: float
    requests: int
    share_of_busiest: float  # share of the requests that the busiest engine got


def make_workload(options: argparse.Namespace) -> list[Turn]:
    """Makes the turns of conversations, which begin as a Poisson process. Each conversation has a
    system prompt, drawn by Zipf's law, and turns with pauses between them."""
    rng = random.Random(options.seed)
    systems = [_text(rng, options.system_words) for _ in range(options.systems)]
    weights = [1 / (i + 1) for i in range(options.systems)]
    turns, at = [], 0.0
    while (at := at + rng.expovariate(options.rate / options.turns)) < options.seconds:
        prompt, then = rng.choices(systems, weights)[0], at
        for _ in range(options.turns):
            prompt += " user: " + _text(rng, rng.randint(1, 2 * options.turn_words))
            if then < options.seconds:
                turns.append(Turn(then, prompt, rng.randint(1, 2 * options.tokens)))
            prompt += " answer: " + _text(rng, options.turn_words)
            then += rng.expovariate(1 / options.pause)
    return sorted(turns, key=lambda turn: turn.at)


def _text(rng: random.Random, words: int) -> str:
    return " ".join(rng.choices(_WORDS, k=words))


class Frontend:
    """Sends requests to a frontend's public address; each request names its engine."""

    def __init__(self, address: str, num_engines: int) -> None:
        self._address = address
        self._num_engines = num_engines
        self._open: Counter[int] = Counter()

    async def at_random(self, prompt: str, tokens: int) -> float:
        return await self._to(random.randrange(self._num_engines), prompt, tokens)

    async def to_least_loaded(self, prompt: str, tokens: int) -> float:
        """Sends a prompt to the engine with the fewest requests in progress."""
        engines = range(self._num_engines)
        return await self._to(min(engines, key=lambda e: self._open[e]), prompt, tokens)

    async def _to(self, engine: int, prompt: str, tokens: int) -> float:
        self._open[engine] += 1
        try:
            return await over_grpc(self._address, prompt, tokens, str(engine))
        finally:
            self._open[engine] -= 1


async def run_way(
    way: str, send: Send, workload: Sequence[Turn], engines: Sequence[SchedulerUnderTest]
) -> Outcome:
    """Sends each turn of the workload at its time, with `send`."""
    before, start = [await each.load() for each in engines], time.perf_counter()

    async def run_turn(turn: Turn) -> float:
        await asyncio.sleep(turn.at - (time.perf_counter() - start))
        sent = time.perf_counter()
        return await send(turn.prompt, turn.tokens) - sent

    times = await asyncio.gather(*map(run_turn, workload))
    after = [await each.load() for each in engines]

    def added(counter: str) -> list[int]:
        """By how much each engine's counter has grown."""
        pairs = zip(before, after, strict=True)
        return [getattr(new, counter) - getattr(old, counter) for old, new in pairs]

    return Outcome(
        way=way,
        hit_rate=sum(added("cached_prompt_tokens")) / sum(added("prompt_tokens")),
        ttft_p50_s=percentile(times, 50) or 0.0,
        ttft_p99_s=percentile(times, 99) or 0.0,
        ttft_mean_s=statistics.fmean(times),
        requests=len(times),
        share_of_busiest=max(added("admissions")) / sum(added("admissions")),
    )


def measure(options: argparse.Namespace, console: Console) -> dict[str, Any]:
    """Measures all ways; returns the figures for the JSON.

    Raises:
        BenchError: something did not start, or a completion is shorter than requested.
    """
    outcomes = asyncio.run(_measure_ways(options, console))
    columns = ("requests go to", "prompt tokens cached", "TTFT p50", "p99", "mean", "busiest")
    rows = (
        (
            each.way,
            f"{each.hit_rate:.1%}",
            *(f"{1e3 * s:.0f} ms" for s in (each.ttft_p50_s, each.ttft_p99_s, each.ttft_mean_s)),
            f"{each.share_of_busiest:.0%}",
        )
        for each in outcomes
    )
    print_table(console, "the choice among engines", columns, rows)
    return {
        **{k: v for k, v in vars(options).items() if k not in ("mode", "out")},
        "ways": [dataclasses.asdict(each) for each in outcomes],
    }


async def _measure_ways(options: argparse.Namespace, console: Console) -> list[Outcome]:
    workload = make_workload(options)
    sizes = Sizes(256, 2048, _MAX_MODEL_LEN, options.blocks, 16, options.step_us, options.token_us)
    big = dataclasses.replace(
        sizes,
        num_blocks=options.engines * sizes.num_blocks,
        step_us=sizes.step_us / options.engines,
        token_us=sizes.token_us / options.engines,
    )
    console.print(f"{len(workload)} requests in {options.seconds:g} s, {options.rate:g}/s")
    ways = [
        "one engine as large as all",
        "expected first token",
        _GATEWAY,
        "least loaded",
        "random",
    ]
    if not options.gateway:
        ways.remove(_GATEWAY)
    outcomes = []
    for way in ways:  # with engines of its own, whose caches are empty
        number = 1 if way == ways[0] else options.engines
        async with contextlib.AsyncExitStack() as stack:
            directory = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="bench-")))
            engines = [
                await stack.enter_async_context(running_scheduler(big if number == 1 else sizes, n))
                for n in map(str, range(number))
            ]
            address = await _start_frontend(stack, directory, engines)
            frontend = Frontend(address, options.engines)
            sends: dict[str, Send] = {
                "least loaded": frontend.to_least_loaded,
                "random": frontend.at_random,
            }
            if way == _GATEWAY:
                gateway = await _start_gateway(stack, directory, engines)
                sends[way] = partial(over_http, gateway, Path(_MODEL).name)
            with console.status(way):
                send = sends.get(way, partial(over_grpc, address))
                outcomes.append(await run_way(way, send, workload, engines))
    return outcomes


async def _start_frontend(
    stack: contextlib.AsyncExitStack,
    directory: Path,
    engines: Sequence[SchedulerUnderTest],
    **flags: object,
) -> str:
    """Starts a frontend; returns its public address."""
    port = free_port()
    process = BenchProcess(
        stack,
        directory / f"frontend-{port}.log",
        "frontend",
        model=_MODEL,
        port=port,
        scheduler_addresses=",".join(each.address for each in engines),
        max_requests_per_client=16384,
        exit_with_parent=True,
        **flags,
    )
    address = f"{HOST}:{port}"
    await process.wait_until(lambda: check_health(address) == SERVING)
    return address


async def _start_gateway(
    stack: contextlib.AsyncExitStack, directory: Path, engines: Sequence[SchedulerUnderTest]
) -> str:
    """Starts a gateway and a frontend for each engine, which sends the gateway the engine's events;
    returns the gateway's HTTP address."""
    frontends = [f"{HOST}:{free_port()}" for _ in engines]
    for engine, frontend in zip(engines, frontends, strict=True):
        await _start_frontend(stack, directory, [engine], gateway_addresses=frontend)
    port = free_port()
    process = BenchProcess(
        stack,
        directory / "gateway.log",
        "deploy.gateway",
        gateway_addresses=",".join(frontends),
        gateway_policy="cache_aware",
        model=_MODEL,
        http_port=port,
        exit_with_parent=True,
    )
    await process.wait_until(lambda: http_health(f"http://{HOST}:{port}") == SERVING)
    return f"{HOST}:{port}"


def parse_args(args: list[str]) -> argparse.Namespace:
    parser = mode_parser("routing", __doc__)
    number: Any = parser.add_argument
    number("--engines", type=int, default=4, help="%(default)s")
    number("--seconds", type=float, default=60.0, help="seconds of arrivals, %(default)s")
    number("--rate", type=float, default=16.0, help="requests/s, %(default)s")
    number("--systems", type=int, default=24, help="system prompts, %(default)s")
    number("--system-words", type=int, default=400, help="words of each system prompt, %(default)s")
    number("--turns", type=int, default=5, help="turns of a conversation, %(default)s")
    number("--turn-words", type=int, default=40, help="mean words of a turn, %(default)s")
    number("--pause", type=float, default=4.0, help="mean seconds between turns, %(default)s")
    number("--tokens", type=int, default=24, help="mean tokens of an answer, %(default)s")
    number("--blocks", type=int, default=4096, help="blocks of 16 tokens per engine, %(default)s")
    number("--step-us", type=float, default=20_000, help="time of a step, %(default)s")
    number("--token-us", type=float, default=200, help="time of each token in a step, %(default)s")
    number("--seed", type=int, default=0, help="%(default)s")
    number("--no-gateway", dest="gateway", action="store_false", help="leave the gateway out")
    return parser.parse_args(args)
