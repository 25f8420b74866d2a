"""`python -m bench --mode routing`: where a frontend sends requests, against other ways to choose.

Conversations of several turns, which share system prompts, go to engines whose workers are
modelled: a step takes a given time, and more per token. Each way of choosing an engine has the same
arrivals and the same engines, with empty caches. See docs/benchmarks.md.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import dataclasses
import json
import random
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from grpc import aio
from rich.console import Console
from rich.table import Table

from bench.errors import BenchError
from bench.machine import this_machine
from bench.processes import BenchProcess
from bench.scheduler_processes import SchedulerUnderTest, Sizes, running_scheduler
from deploy.health import SERVING, check_health, http_health
from deploy.ports import free_port
from nano_vllm_grpc.pb import frontend_pb2 as pb
from nano_vllm_grpc.pb.frontend_pb2_grpc import InferenceServiceStub
from shared.pb import scheduler_pb2

if TYPE_CHECKING:
    from nano_vllm_grpc.pb.frontend_pb2_grpc import InferenceServiceAsyncStub

HOST = "127.0.0.1"
_MODEL = "models/demo"
_MAX_MODEL_LEN = 8192
_WORDS = (
    *("once", "upon", "a", "time", "there", "was", "little", "fox", "who", "lived", "in", "the"),
    *("deep", "dark", "wood", "and", "one", "day", "she", "met", "an", "old", "bear", "by"),
    *("river", "he", "asked", "her", "where", "do", "you", "go", "so", "early", "said"),
)
_POLL_S = 0.1
_START_S = 120.0

# Sends a prompt for so many tokens; returns the seconds to the first.
Send = Callable[[str, int], Awaitable[float]]


@dataclass(frozen=True)
class Turn:
    """A request: when it is sent, in seconds since the start, and its prompt."""

    at: float
    prompt: str
    tokens: int


@dataclass(frozen=True)
class Outcome:
    """One way's results; times in seconds."""

    way: str
    hit_rate: float  # of the prompts' tokens
    ttft_p50_s: float
    ttft_p99_s: float
    ttft_mean_s: float
    requests: int
    share_of_busiest: float  # engine's, of the requests


def make_workload(options: argparse.Namespace) -> list[Turn]:
    """Conversations begin as a Poisson process; each has one of the system prompts, the more
    likely the lower its number (Zipf), and turns with pauses between them."""
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


class Engines:
    """Several schedulers with modelled workers."""

    def __init__(self, schedulers: Sequence[SchedulerUnderTest]) -> None:
        self._schedulers = schedulers
        self.addresses = [each.address for each in schedulers]

    async def flush(self) -> None:
        for each in self._schedulers:
            request = scheduler_pb2.FlushCacheRequest(timeout_s=60)
            if not (await each.stub.FlushCache(request)).flushed:
                raise BenchError("an engine does not come to rest")

    async def counters(self) -> list[tuple[int, int, int]]:
        """Of each engine: admissions, prompts' tokens, and those of them that were cached."""
        loads = [await each.load() for each in self._schedulers]
        return [(x.admissions, x.prompt_tokens, x.cached_prompt_tokens) for x in loads]


class Door:
    """A frontend's public service, whose requests may name their engine."""

    def __init__(self, address: str, num_engines: int) -> None:
        self._channel = aio.insecure_channel(address)
        self._stub: InferenceServiceAsyncStub = InferenceServiceStub(self._channel)
        self._num_engines = num_engines
        self._open: Counter[int] = Counter()

    async def send(self, prompt: str, tokens: int, engine: str = "") -> float:
        sampling = pb.SamplingParams(max_tokens=tokens, ignore_eos=True, temperature=0)
        request = pb.GenerateRequest(text=prompt, sampling=sampling, engine=engine)
        start, first_at, last = time.perf_counter(), 0.0, None
        async for response in self._stub.GenerateStream(request):
            first_at = first_at or time.perf_counter()
            last = response
        if last is None or last.usage.completion_tokens != tokens:
            raise BenchError("a stream did not have the tokens that were asked for")
        return first_at - start

    async def at_random(self, prompt: str, tokens: int) -> float:
        return await self._to(random.randrange(self._num_engines), prompt, tokens)

    async def to_least_loaded(self, prompt: str, tokens: int) -> float:
        """With the fewest requests in progress."""
        engines = range(self._num_engines)
        return await self._to(min(engines, key=lambda e: self._open[e]), prompt, tokens)

    async def _to(self, engine: int, prompt: str, tokens: int) -> float:
        self._open[engine] += 1
        try:
            return await self.send(prompt, tokens, str(engine))
        finally:
            self._open[engine] -= 1

    async def close(self) -> None:
        await self._channel.close()


class Gateway:
    """The gateway's HTTP API."""

    def __init__(self, port: int) -> None:
        self._port = port

    async def send(self, prompt: str, tokens: int) -> float:
        body = json.dumps(
            {
                "model": Path(_MODEL).name,
                "prompt": prompt,
                "max_tokens": tokens,
                "temperature": 0,
                "ignore_eos": True,
                "stream": True,
                "stream_options": {"include_usage": True},
            }
        ).encode()
        start, first_at, last, status = time.perf_counter(), 0.0, b"", b""
        reader, writer = await asyncio.open_connection(HOST, self._port)
        head = f"POST /v1/completions HTTP/1.1\r\nhost: {HOST}\r\nconnection: close\r\n"
        head += f"content-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
        writer.write(head.encode() + body)
        while line := await reader.readline():
            status = status or line
            if line.startswith(b"data: {"):
                first_at = first_at or time.perf_counter()
                last = line
        writer.close()
        usage = json.loads(last[6:]).get("usage") if last else None
        if not usage or usage["completion_tokens"] != tokens:
            raise BenchError(f"a stream did not have {tokens} tokens: {(last or status)!r}")
        return first_at - start


async def run_way(way: str, send: Send, workload: Sequence[Turn], engines: Engines) -> Outcome:
    """Sends the whole workload by `send`, at its times."""
    await engines.flush()
    before, start = await engines.counters(), time.perf_counter()

    async def request(turn: Turn) -> float:
        await asyncio.sleep(turn.at - (time.perf_counter() - start))
        return await send(turn.prompt, turn.tokens)

    times = sorted(await asyncio.gather(*map(request, workload)))
    after = await engines.counters()
    each = [[b - a for a, b in zip(*pair, strict=True)] for pair in zip(before, after, strict=True)]
    admissions, prompt_tokens, cached = ([row[i] for row in each] for i in range(3))
    return Outcome(
        way=way,
        hit_rate=sum(cached) / sum(prompt_tokens),
        ttft_p50_s=statistics.median(times),
        ttft_p99_s=times[int(0.99 * len(times))],
        ttft_mean_s=statistics.fmean(times),
        requests=len(times),
        share_of_busiest=max(admissions) / sum(admissions),
    )


async def measure(options: argparse.Namespace, console: Console) -> list[Outcome]:
    """
    Raises:
        BenchError: something did not start, or a completion is shorter than requested.
    """
    workload = make_workload(options)
    sizes = Sizes(256, 2048, _MAX_MODEL_LEN, options.blocks, 16, options.step_us, options.token_us)
    big = dataclasses.replace(
        sizes,
        num_blocks=options.engines * sizes.num_blocks,
        step_us=sizes.step_us / options.engines,
        token_us=sizes.token_us / options.engines,
    )
    outcomes = []
    async with contextlib.AsyncExitStack() as stack:
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="bench-")))
        names = [str(number) for number in range(options.engines)]
        schedulers = [await stack.enter_async_context(running_scheduler(sizes, n)) for n in names]
        engines = Engines(schedulers)
        whole = Engines([await stack.enter_async_context(running_scheduler(big))])
        console.print(f"{len(workload)} requests in {options.seconds:g} s, {options.rate:g}/s")

        async def door(addresses: Sequence[str]) -> Door:
            port = await _start_frontend(stack, directory, addresses)
            opened = Door(f"{HOST}:{port}", len(addresses))
            stack.push_async_callback(opened.close)
            return opened

        ours = await door(engines.addresses)
        ways: list[tuple[str, Send, Engines]] = [
            ("one engine as large as all", (await door(whole.addresses)).send, whole),
            ("expected first token", ours.send, engines),
            ("least loaded", ours.to_least_loaded, engines),
            ("random", ours.at_random, engines),
        ]
        if options.gateway:
            gateway = await _start_gateway(stack, directory, engines.addresses)
            ways.insert(2, ("gateway's cache_aware", gateway.send, engines))
        for way, send, its in ways:
            with console.status(way):
                outcomes.append(await run_way(way, send, workload, its))
    return outcomes


async def _start_frontend(
    stack: contextlib.AsyncExitStack, directory: Path, addresses: Sequence[str], **flags: object
) -> int:
    """Returns its port."""
    port = free_port()
    process = BenchProcess(
        stack,
        directory / f"frontend-{port}.log",
        "frontend",
        model=_MODEL,
        port=port,
        scheduler_addresses=",".join(addresses),
        max_requests_per_client=16384,
        exit_with_parent=True,
        **flags,
    )
    await _wait(process, lambda: check_health(f"{HOST}:{port}"))
    return port


async def _start_gateway(
    stack: contextlib.AsyncExitStack, directory: Path, addresses: Sequence[str]
) -> Gateway:
    """A gateway with a frontend for each engine, whose events it gets."""
    doors = [f"{HOST}:{free_port()}" for _ in addresses]
    for address, door in zip(addresses, doors, strict=True):
        await _start_frontend(stack, directory, [address], engine_addresses=door)
    port = free_port()
    process = BenchProcess(
        stack,
        directory / "gateway.log",
        "deploy.gateway",
        engine_addresses=",".join(doors),
        gateway_policy="cache_aware",
        model=_MODEL,
        http_port=port,
        exit_with_parent=True,
    )
    await _wait(process, lambda: http_health(f"http://{HOST}:{port}"))
    return Gateway(port)


async def _wait(process: BenchProcess, health: Callable[[], str]) -> None:
    deadline = time.monotonic() + _START_S
    while await asyncio.to_thread(health) != SERVING:
        process.check()
        if time.monotonic() > deadline:
            raise BenchError("a process did not start in time")
        await asyncio.sleep(_POLL_S)


def parse_args(args: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m bench --mode routing", description=__doc__)
    number: Any = parser.add_argument
    number("--engines", type=int, default=4, help="%(default)s")
    number("--seconds", type=float, default=60.0, help="of arrivals, %(default)s")
    number("--rate", type=float, default=16.0, help="requests/s, %(default)s")
    number("--systems", type=int, default=24, help="system prompts, %(default)s")
    number("--system-words", type=int, default=400, help="of each, %(default)s")
    number("--turns", type=int, default=5, help="of a conversation, %(default)s")
    number("--turn-words", type=int, default=40, help="mean, %(default)s")
    number("--pause", type=float, default=4.0, help="mean seconds between turns, %(default)s")
    number("--tokens", type=int, default=24, help="mean of an answer, %(default)s")
    number("--blocks", type=int, default=4096, help="of 16 tokens, per engine, %(default)s")
    number("--step-us", type=float, default=20_000, help="of a step, %(default)s")
    number("--token-us", type=float, default=200, help="of a token in a step, %(default)s")
    number("--seed", type=int, default=0, help="%(default)s")
    number("--no-gateway", dest="gateway", action="store_false", help="leave the gateway out")
    number("--out", type=Path, default=Path("bench.json"), help="%(default)s")
    return parser.parse_args(args)


def main(args: list[str]) -> int:
    options = parse_args(args)
    console = Console()
    try:
        outcomes = asyncio.run(measure(options, console))
    except BenchError as error:
        print(f"bench: {error}", file=sys.stderr)
        return 1
    table = Table("requests go to", "prompt tokens cached", "TTFT p50", "p99", "mean", "busiest")
    for each in outcomes:
        times = (each.ttft_p50_s, each.ttft_p99_s, each.ttft_mean_s)
        table.add_row(
            each.way,
            f"{each.hit_rate:.1%}",
            *(f"{1e3 * seconds:.0f} ms" for seconds in times),
            f"{each.share_of_busiest:.0%}",
        )
    console.print(table)
    found = {
        "mode": "routing",
        **{k: v for k, v in vars(options).items() if k != "out"},
        "ways": [dataclasses.asdict(each) for each in outcomes],
        **dataclasses.asdict(this_machine()),
    }
    options.out.write_text(json.dumps(found, indent=2) + "\n", encoding="utf-8")
    console.print(f"written: {options.out}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
