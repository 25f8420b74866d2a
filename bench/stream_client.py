"""`python -m bench.stream_client`: holds streams open and records the times of their chunks."""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path

from bench.http2 import connect
from bench.step_clock import StepClock
from nano_vllm_grpc.pb import frontend_pb2 as pb

METHOD = "/nanovllm.v1.InferenceService/GenerateStream"
PROMPT_TOKENS = 32


@dataclass
class Received:
    """The totals of a process's streams; times are from `time.monotonic`."""

    tokens: int = 0
    chunks: int = 0
    first_at: float = float("inf")
    last_at: float = 0.0
    cpu_s: float = 0.0  # CPU time of the process
    latencies_s: list[float] = field(default_factory=list)  # from each token's sending

    def to_json(self) -> str:
        return json.dumps(vars(self))


class Receiver:
    """Counts the chunks of all streams."""

    def __init__(self, clock: StepClock) -> None:
        self.received = Received()
        self._clock = clock

    def on_message(self, data: bytes) -> None:
        now = time.monotonic()
        received, clock = self.received, self._clock
        token_ids = pb.GenerateStreamResponse.FromString(data).token_ids
        received.first_at = min(received.first_at, now)
        received.last_at = now
        received.chunks += 1
        received.tokens += len(token_ids)
        received.latencies_s += [clock.age_s(token_id, now) for token_id in token_ids]


def parse_args(args: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m bench.stream_client", description=__doc__)
    parser.add_argument("--address", required=True, help="host:port of the frontends")
    parser.add_argument("--clock", type=Path, required=True)
    parser.add_argument("--slots", type=int, required=True, help="slots of the clock")
    parser.add_argument("--calls", type=int, required=True)
    parser.add_argument(
        "--channels", type=int, required=True, help="connections that the calls share"
    )
    parser.add_argument("--tokens", type=int, required=True, help="tokens per call")
    return parser.parse_args(args)


async def receive(options: argparse.Namespace) -> Received:
    """Runs all calls to their end."""
    receiver = Receiver(StepClock(options.clock, options.slots))
    request = pb.GenerateRequest(
        token_ids=pb.TokenIds(ids=range(PROMPT_TOKENS)),
        sampling=pb.SamplingParams(max_tokens=options.tokens, ignore_eos=True),
    ).SerializeToString()
    connections = [await connect(options.address, METHOD) for _ in range(options.channels)]
    start = os.times()
    calls = [
        connections[number % options.channels].call(request, receiver.on_message)
        for number in range(options.calls)
    ]
    await asyncio.gather(*calls)
    for connection in connections:
        connection.close()
    end = os.times()
    receiver.received.cpu_s = end.user + end.system - start.user - start.system
    return receiver.received


if __name__ == "__main__":
    print(asyncio.run(receive(parse_args(sys.argv[1:]))).to_json())
