"""Cheap clients that send one prompt to a stack, because clients share the servers' cores.

Both functions wait for the end of the stream and return the time of the first token, by
`time.perf_counter`.
"""

from __future__ import annotations

import asyncio
import json
import time

from bench.errors import BenchError
from bench.http2 import connect
from bench.stream_client import METHOD
from nano_vllm_grpc.pb import frontend_pb2 as pb


async def over_grpc(address: str, prompt: str, tokens: int, engine: str = "") -> float:
    """Sends a prompt to a frontend.

    Args:
        address: the frontend's host:port.
        engine: the only engine that may compute the completion; by default any engine.

    Raises:
        BenchError: the completion is not as long as requested.
    """
    request = pb.GenerateRequest(
        text=prompt,
        sampling=pb.SamplingParams(max_tokens=tokens, ignore_eos=True, temperature=0),
        engine=engine,
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
    """Sends a prompt to the gateway.

    Args:
        address: the gateway's host:port.

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
