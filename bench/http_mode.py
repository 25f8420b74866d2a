"""`python -m bench --mode http`: what HTTP costs beside gRPC, on one stack.

The same prompts go through the gateway and straight to a frontend, in turn; both clients are as
cheap as can be, since they share the server's cores. A figure is the median over the pairs.
See docs/benchmarks.md.
"""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import json
import random
import statistics
import sys
import time
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from pathlib import Path

import psutil
from rich.console import Console

from bench.errors import BenchError
from bench.http2 import Connection
from bench.machine import this_machine
from bench.stack import private_stack
from bench.stream_client import METHOD
from deploy.ports import free_port
from nano_vllm_grpc import LLMError
from nano_vllm_grpc.pb import frontend_pb2 as pb

_WORDS = ("once", "upon", "a", "time", "there", "was", "fox", "who", "lived", "in", "the", "wood")
_PROMPT_WORDS = 24
_LONE_TOKENS = 8
_LONE_REPEATS = 20

# Sends a prompt, and returns the time of the first token, by time.perf_counter.
Send = Callable[[str, int], Coroutine[None, None, float]]


@dataclass(frozen=True)
class Cost:
    """Medians over the pairs."""

    grpc_tokens_per_s: float
    http_tokens_per_s: float
    ratio: float  # of these, HTTP to gRPC
    grpc_ttft_ms: float  # of lone requests
    http_ttft_ms: float
    ttft_added_ms: float
    gateway_cpu_s: float  # per 1,000 tokens


@dataclass(frozen=True)
class Doors:
    """A stack's two: `model` at `host:port` for gRPC and `http_port` for HTTP."""

    model: str
    host: str
    port: int
    http_port: int

    async def grpc(self, prompt: str, tokens: int) -> float:
        request = pb.GenerateRequest(
            text=prompt,
            sampling=pb.SamplingParams(max_tokens=tokens, ignore_eos=True, temperature=0),
        )
        first_at = 0.0
        loop = asyncio.get_running_loop()
        make = lambda: Connection(f"{self.host}:{self.port}", METHOD)  # noqa: E731
        _, connection = await loop.create_connection(make, self.host, self.port)
        received: list[bytes] = []

        def on_message(data: bytes) -> None:
            nonlocal first_at
            first_at = first_at or time.perf_counter()
            received[:] = [data]

        await connection.call(request.SerializeToString(), on_message)
        connection.close()
        last = pb.GenerateStreamResponse.FromString(received[0]) if received else None
        if last is None or last.usage.completion_tokens != tokens:
            raise BenchError("a stream did not have the tokens that were asked for")
        return first_at

    async def http(self, prompt: str, tokens: int) -> float:
        body = json.dumps(
            {
                "model": self.model,
                "prompt": prompt,
                "max_tokens": tokens,
                "temperature": 0,
                "ignore_eos": True,
                "stream": True,
                "stream_options": {"include_usage": True},
            }
        ).encode()
        reader, writer = await asyncio.open_connection(self.host, self.http_port)
        head = f"POST /v1/completions HTTP/1.1\r\nhost: {self.host}\r\nconnection: close\r\n"
        head += f"content-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
        writer.write(head.encode() + body)
        first_at, last = 0.0, b""
        while line := await reader.readline():
            if line.startswith(b"data: {"):
                first_at = first_at or time.perf_counter()
                last = line
        writer.close()
        usage = json.loads(last[6:]).get("usage") if last else None
        if not usage or usage["completion_tokens"] != tokens:
            raise BenchError("a stream did not have the tokens that were asked for")
        return first_at


def parse_args(args: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m bench --mode http", description=__doc__)
    parser.add_argument("--model", type=Path, default=Path("models/demo"), help="%(default)s")
    parser.add_argument("--streams", type=int, default=64, help="%(default)s")
    parser.add_argument("--tokens", type=int, default=128, help="per stream, %(default)s")
    parser.add_argument("--pairs", type=int, default=5, help="%(default)s")
    parser.add_argument("--out", type=Path, default=Path("bench.json"), help="%(default)s")
    options = parser.parse_args(args)
    for name in ("streams", "tokens", "pairs"):
        if getattr(options, name) <= 0:
            parser.error(f"--{name}: must be over 0")
    return options


async def measure(options: argparse.Namespace, console: Console) -> Cost:
    """
    Raises:
        BenchError: a completion is shorter than requested.
        LLMError: the server did not start.
    """
    http_port = free_port()
    with private_stack(options.model, console, http_port=http_port) as stack:
        host, _, port = stack.address.rpartition(":")
        doors = Doors(options.model.resolve().name, host, int(port), http_port)
        sends = (doors.grpc, doors.http)
        speeds, waits, used = [], [], []
        for number in range(-1, options.pairs):  # the first pair warms up
            with console.status(f"pair {number + 1} of {options.pairs}"):
                before = _cpu_s(http_port)
                pair = [await _throughput(send, options) for send in sends]
                after = _cpu_s(http_port)
                lone = [await _first_tokens(send) for send in sends]
            if number >= 0:
                speeds.append(pair)
                waits.append(lone)
                used.append(after - before)
    tokens = options.streams * options.tokens
    grpc, http = (statistics.median(each) for each in zip(*speeds, strict=True))
    grpc_wait, http_wait = (statistics.median(each) for each in zip(*waits, strict=True))
    return Cost(
        grpc_tokens_per_s=grpc,
        http_tokens_per_s=http,
        ratio=statistics.median(http / grpc for grpc, http in speeds),
        grpc_ttft_ms=1e3 * grpc_wait,
        http_ttft_ms=1e3 * http_wait,
        ttft_added_ms=1e3 * statistics.median(http - grpc for grpc, http in waits),
        gateway_cpu_s=1e3 * statistics.median(used) / tokens,
    )


async def _throughput(send: Send, options: argparse.Namespace) -> float:
    """Tokens/s of all streams at once."""
    prompts = [_prompt() for _ in range(options.streams)]
    start = time.perf_counter()
    await asyncio.gather(*(send(prompt, options.tokens) for prompt in prompts))
    tokens: int = options.streams * options.tokens
    return tokens / (time.perf_counter() - start)


async def _first_tokens(send: Send) -> float:
    """Median time to first token of one request at a time, in seconds."""
    found = []
    for _ in range(_LONE_REPEATS):
        prompt, start = _prompt(), time.perf_counter()
        found.append(await send(prompt, _LONE_TOKENS) - start)
    return statistics.median(found)


def _prompt() -> str:
    """A prompt that no server has seen: one seen before would be in the prefix cache."""
    return " ".join(random.choices(_WORDS, k=_PROMPT_WORDS))


def _cpu_s(http_port: int) -> float:
    """The processor time that the gateway has used, in seconds."""
    for each in psutil.net_connections("tcp"):
        ours = each.status == psutil.CONN_LISTEN and tuple(each.laddr)[1:] == (http_port,)
        if ours and each.pid:
            times = psutil.Process(each.pid).cpu_times()
            return float(times.user + times.system)
    raise BenchError("no gateway listens")


def main(args: list[str]) -> int:
    options = parse_args(args)
    console = Console()
    try:
        cost = asyncio.run(measure(options, console))
    except (BenchError, LLMError) as error:
        print(f"bench: {error}", file=sys.stderr)
        return 1
    console.print(
        f"tokens/s: gRPC {cost.grpc_tokens_per_s:,.0f}, HTTP {cost.http_tokens_per_s:,.0f}, "
        f"ratio {cost.ratio:.2f}\n"
        f"first token: gRPC {cost.grpc_ttft_ms:.1f} ms, HTTP {cost.http_ttft_ms:.1f} ms, "
        f"added {cost.ttft_added_ms:.1f} ms\n"
        f"gateway: {cost.gateway_cpu_s:.3f} s of processor time per 1,000 tokens over HTTP"
    )
    found = {
        "mode": "http",
        "model": str(options.model),
        "streams": options.streams,
        "tokens": options.tokens,
        "pairs": options.pairs,
        **dataclasses.asdict(cost),
        **dataclasses.asdict(this_machine()),
    }
    options.out.write_text(json.dumps(found, indent=2) + "\n", encoding="utf-8")
    console.print(f"written: {options.out}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
