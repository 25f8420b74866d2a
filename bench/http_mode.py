"""`python -m bench --mode http`: measures the cost of HTTP compared with gRPC, on one stack.

Prompts go to a frontend over gRPC and over HTTP, in turn. Both clients are as cheap as possible,
because they share the server's cores. A figure is the median over the pairs.
See docs/results/cpu.md.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import statistics
import time
from collections.abc import Awaitable, Callable, Iterator
from functools import partial
from typing import Any

import psutil
from rich.console import Console

from bench.http2 import connect
from bench.machine import cpu_s
from bench.report import check_minimum, figure_rows, mode_parser, print_table
from bench.stack import private_stack
from bench.workload import BenchError
from deploy.model import model_name, resolve_model
from deploy.ports import free_port
from nano_vllm_grpc.pb import frontend_pb2 as pb

_WORDS = ("once", "upon", "a", "time", "there", "was", "fox", "who", "lived", "in", "the", "wood")
_PROMPT_WORDS = 24
METHOD = "/nanovllm.v1.InferenceService/GenerateStream"
_LONE_TOKENS = 8
_LONE_REPEATS = 20

# Sends a prompt and the number of tokens to make; returns the time of the first token.
Send = Callable[[str, int], Awaitable[float]]


# Medians over the pairs. A first token is of one request at a time.
_ROWS = (
    ("gRPC, tokens/s", "grpc_tokens_per_s", "{:,.0f}"),
    ("HTTP, tokens/s", "http_tokens_per_s", "{:,.0f}"),
    ("HTTP to gRPC, tokens/s", "ratio", "{:.2f}"),
    ("gRPC, first token, ms", "grpc_ttft_ms", "{:.1f}"),
    ("HTTP, first token, ms", "http_ttft_ms", "{:.1f}"),
    ("HTTP adds, ms", "ttft_added_ms", "{:.1f}"),
    ("gRPC, CPU of all services, s per 1,000 tokens", "grpc_cpu_s", "{:.3f}"),
    ("HTTP, CPU of all services, s per 1,000 tokens", "http_cpu_s", "{:.3f}"),
)


def parse_args(args: list[str]) -> argparse.Namespace:
    parser = mode_parser("http", __doc__)
    parser.add_argument("--streams", type=int, default=64, help="%(default)s")
    parser.add_argument("--tokens", type=int, default=128, help="tokens per stream, %(default)s")
    parser.add_argument("--pairs", type=int, default=5, help="%(default)s")
    options = parser.parse_args(args)
    check_minimum(parser, options, 1, ["streams", "tokens", "pairs"])
    return options


def measure(options: argparse.Namespace, console: Console) -> Iterator[dict[str, Any]]:
    """Yields the figures of both interfaces.

    Raises:
        BenchError: a completion is shorter than requested.
        LLMError: the server did not start.
    """
    cost = asyncio.run(_measure_cost(options, console))
    about = {name: getattr(options, name) for name in ("model", "streams", "tokens", "pairs")}
    yield about | cost
    title = f"{options.model}: {options.streams} streams"
    print_table(console, title, ["", "median"], figure_rows([cost], _ROWS))


async def _measure_cost(options: argparse.Namespace, console: Console) -> dict[str, Any]:
    http_port = free_port()
    with private_stack(options.model, console, http_port=http_port) as stack:
        host = stack.address.rpartition(":")[0]
        name = model_name(options.model, resolve_model(options.model))
        sends = (partial(over_grpc, stack.address), partial(over_http, f"{host}:{http_port}", name))
        speeds, waits, used = [], [], []
        for number in range(-1, options.pairs):  # the first pair warms up
            with console.status(f"pair {number + 1} of {options.pairs}"):
                pair = [await _throughput(send, options) for send in sends]
                lone = [await _first_tokens(send) for send in sends]
            if number >= 0:
                speeds.append([speed for speed, _ in pair])
                used.append([cpu_s for _, cpu_s in pair])
                waits.append(lone)
    grpc, http = map(statistics.median, zip(*speeds, strict=True))
    grpc_cpu_s, http_cpu_s = map(statistics.median, zip(*used, strict=True))
    grpc_wait, http_wait = map(statistics.median, zip(*waits, strict=True))
    return {
        "grpc_tokens_per_s": grpc,
        "http_tokens_per_s": http,
        "ratio": statistics.median(http / grpc for grpc, http in speeds),
        "grpc_ttft_ms": 1e3 * grpc_wait,
        "http_ttft_ms": 1e3 * http_wait,
        "ttft_added_ms": 1e3 * statistics.median(http - grpc for grpc, http in waits),
        "grpc_cpu_s": grpc_cpu_s,
        "http_cpu_s": http_cpu_s,
    }


async def _throughput(send: Send, options: argparse.Namespace) -> tuple[float, float]:
    """Total tokens/s while all streams run at once, and the CPU seconds of all services per 1,000
    tokens."""
    prompts = [_prompt() for _ in range(options.streams)]
    used, start = _services_cpu_s(), time.perf_counter()
    await asyncio.gather(*(send(prompt, options.tokens) for prompt in prompts))
    seconds, used = time.perf_counter() - start, _services_cpu_s() - used
    tokens: int = options.streams * options.tokens
    return tokens / seconds, 1e3 * used / tokens


async def _first_tokens(send: Send) -> float:
    """Median time to first token of one request at a time, in seconds."""
    found = []
    for _ in range(_LONE_REPEATS):
        prompt, start = _prompt(), time.perf_counter()
        found.append(await send(prompt, _LONE_TOKENS) - start)
    return statistics.median(found)


def _prompt() -> str:
    """A new prompt for each call, which the prefix cache cannot hold."""
    return " ".join(random.choices(_WORDS, k=_PROMPT_WORDS))


def _services_cpu_s() -> float:
    """The CPU seconds that the private stack has used, whose launcher is the only child."""
    return sum(cpu_s(each.pid) for each in psutil.Process().children())


async def over_grpc(address: str, prompt: str, tokens: int) -> float:
    """Sends a prompt to a frontend.

    Args:
        address: the frontend's host:port.

    Raises:
        BenchError: the completion is not as long as requested.
    """
    request = pb.GenerateRequest(
        text=prompt,
        sampling=pb.SamplingParams(max_tokens=tokens, ignore_eos=True, temperature=0),
    )
    first_at, last = 0.0, b""

    def on_message(data: bytes) -> None:
        nonlocal first_at, last
        first_at = first_at or time.perf_counter()
        last = data

    connection = await connect(address, METHOD)
    await connection.call(request.SerializeToString(), on_message)
    connection.close()
    _check(pb.GenerateStreamResponse.FromString(last).usage.completion_tokens, tokens)
    return first_at


async def over_http(address: str, model: str, prompt: str, tokens: int) -> float:
    """Sends a prompt to a frontend.

    Args:
        address: the host:port of its HTTP.

    Raises:
        BenchError: the completion is not as long as requested.
    """
    body = json.dumps(
        {
            "model": model,
            "prompt": prompt,
            "max_tokens": tokens,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
    ).encode()
    host, _, port = address.rpartition(":")
    reader, writer = await asyncio.open_connection(host, port)
    head = f"POST /v1/completions HTTP/1.1\r\nhost: {host}\r\nconnection: close\r\n"
    head += f"content-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
    writer.write(head.encode() + body)
    first_at, last = 0.0, b"{}"
    while line := await reader.readline():
        if line.startswith(b"data: {"):
            first_at = first_at or time.perf_counter()
            last = line.removeprefix(b"data: ")
    writer.close()
    usage = json.loads(last).get("usage") or {}
    _check(usage.get("completion_tokens", 0), tokens)
    return first_at


def _check(made: int, asked: int) -> None:
    if made != asked:
        raise BenchError(f"a completion has {made} tokens instead of {asked}")
