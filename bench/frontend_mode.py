"""`python -m bench --mode frontend`: measures the tokens/s that a frontend delivers to streams.

A real frontend process runs between client processes, which hold streams open, and a scheduler in
this process, which makes tokens without an engine. See docs/results/cpu.md.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import numpy as np
from grpc import aio
from rich.console import Console

from bench.http2 import connect
from bench.http_mode import METHOD
from bench.machine import cpu_s
from bench.processes import BenchProcess
from bench.report import check_minimum, figure_rows, mode_parser, print_table
from bench.workload import BenchError
from deploy.ports import free_port
from frontend.text.model_files import ModelFilesError, read_model_facts
from nano_vllm_grpc.pb import frontend_pb2
from shared.pb import scheduler_pb2 as pb
from shared.pb.scheduler_pb2_grpc import (
    SchedulerServiceServicer,
    add_SchedulerServiceServicer_to_server,
)

HOST = "127.0.0.1"
CLIENTS = 2  # processes
CHANNELS = 8  # per client
PROMPT_TOKENS = 32
WARM_UP_TOKENS = 16  # per call
TIMEOUT_S = 120.0  # for a run
MAX_MODEL_LEN = 1 << 20
_ROWS = (
    ("tokens/s", "tokens_per_s", "{:,.0f}"),
    ("tokens per chunk", "tokens_per_chunk", "{:.2f}"),
    ("frontend CPU, s per 1,000 tokens", "frontend_cpu_s_per_1000_tokens", "{:.4f}"),
)


class InstantScheduler(SchedulerServiceServicer):
    """Serves `scheduler.proto` to one frontend. Once `num_requests` are open, each gets a token per
    step, as fast as the frontend accepts them."""

    def __init__(self, vocab_size: int, num_requests: int) -> None:
        self._vocab_size, self._num_requests = vocab_size, num_requests
        self.connected = False
        self._submitted: list[pb.Submit] = []
        self._all_open = asyncio.Event()

    async def Connect(  # type: ignore[override]
        self,
        request_iterator: AsyncIterator[pb.FrontendMessage],
        context: aio.ServicerContext[Any, Any],
    ) -> None:
        reader = asyncio.create_task(self._read(request_iterator))
        info = pb.EngineInfo(max_model_len=MAX_MODEL_LEN, vocab_size=self._vocab_size)
        try:
            await context.write(pb.SchedulerMessage(engine_info=info))
            self.connected = True
            while True:
                await self._all_open.wait()
                self._all_open.clear()
                submitted, self._submitted = self._submitted, []
                numbers = [submit.request for submit in submitted]
                max_tokens = submitted[0].sampling.max_tokens  # all want as many
                for made in range(max_tokens):
                    output = _step(numbers, made, max_tokens)
                    await context.write(pb.SchedulerMessage(step_output=output))
        finally:
            reader.cancel()

    async def GetLoad(self, request: pb.GetLoadRequest, context: Any) -> pb.GetLoadResponse:
        return pb.GetLoadResponse()

    async def _read(self, messages: AsyncIterator[pb.FrontendMessage]) -> None:
        async for message in messages:
            if message.HasField("submit"):
                self._submitted.append(message.submit)
                if len(self._submitted) == self._num_requests:
                    self._all_open.set()


def _step(numbers: list[int], made: int, max_tokens: int) -> pb.StepOutput:
    """A step in which each request gets the token after `made` others."""
    ends = made == max_tokens - 1
    return pb.StepOutput(
        requests=np.array(numbers, "<u8").tobytes(),
        offsets=np.full(len(numbers), made, "<i4").tobytes(),
        token_ids=np.full(len(numbers), 7, "<i4").tobytes(),
        started=[] if made else [pb.Started(request=number) for number in numbers],
        finished=[pb.Finished(request=number, cause=pb.FINISH_CAUSE_LENGTH) for number in numbers]
        if ends
        else [],
    )


async def receive(address: str, calls: int, tokens: int) -> dict[str, float]:
    """Runs `calls` streams to their end; returns their totals, and when they began and ended."""
    request = frontend_pb2.GenerateRequest(
        token_ids=frontend_pb2.TokenIds(ids=range(PROMPT_TOKENS)),
        sampling=frontend_pb2.SamplingParams(max_tokens=tokens, ignore_eos=True),
    ).SerializeToString()
    found = {"tokens": 0.0, "chunks": 0.0, "first_at": 0.0, "last_at": 0.0}

    def on_message(data: bytes) -> None:
        now = time.monotonic()
        found["first_at"] = found["first_at"] or now
        found["last_at"] = now
        found["chunks"] += 1
        found["tokens"] += len(frontend_pb2.GenerateStreamResponse.FromString(data).token_ids)

    connections = [await connect(address, METHOD) for _ in range(CHANNELS)]
    await asyncio.gather(
        *(connections[i % CHANNELS].call(request, on_message) for i in range(calls))
    )
    return found


def parse_args(args: list[str]) -> argparse.Namespace:
    parser = mode_parser("frontend", __doc__)
    parser.add_argument("--model", default="models/demo", help="%(default)s")
    parser.add_argument("--calls", type=int, default=256, help="open streams, %(default)s")
    parser.add_argument("--tokens", type=int, default=1600, help="tokens per stream, %(default)s")
    options = parser.parse_args(args)
    check_minimum(parser, options, CLIENTS, ["calls"])
    check_minimum(parser, options, 1, ["tokens"])
    return options


def measure(options: argparse.Namespace, console: Console) -> dict[str, Any]:
    """Measures a run; returns the figures for the JSON.

    Raises:
        BenchError: the model directory cannot be used, a process failed, or tokens are missing.
    """
    with console.status("streaming"):
        figures = asyncio.run(_measure(options))
    print_table(console, f"{options.calls} open streams", ["", ""], figure_rows([figures], _ROWS))
    return {"model": options.model, "calls": options.calls, **figures}


async def _measure(options: argparse.Namespace) -> dict[str, Any]:
    try:
        vocab_size = read_model_facts(Path(options.model)).vocab_size
    except ModelFilesError as error:
        raise BenchError(f"--model: {error}") from error
    async with AsyncExitStack() as stack:
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="bench-")))
        scheduler = InstantScheduler(vocab_size, options.calls)  # type: ignore[abstract]  # not asked
        scheduler_address, address = f"unix:{directory}/scheduler.sock", f"{HOST}:{free_port()}"
        server = aio.server(options=[("grpc.max_receive_message_length", -1)])
        add_SchedulerServiceServicer_to_server(scheduler, server)
        server.add_insecure_port(scheduler_address)
        await server.start()
        stack.push_async_callback(server.stop, None)
        frontend = BenchProcess(
            stack,
            directory / "frontend.log",
            "frontend",
            model=options.model,
            host=HOST,
            port=address.rpartition(":")[2],
            scheduler_address=scheduler_address,
            exit_with_parent=True,
        )
        await frontend.wait_until(lambda: scheduler.connected)
        await _run(address, options.calls, WARM_UP_TOKENS)
        before = cpu_s(frontend.pid)
        received = await _run(address, options.calls, options.tokens)
        used = cpu_s(frontend.pid) - before
    tokens = sum(each["tokens"] for each in received)
    seconds = max(e["last_at"] for e in received) - min(e["first_at"] for e in received)
    return {
        "tokens_per_s": tokens / seconds,
        "tokens": tokens,
        "tokens_per_chunk": tokens / sum(each["chunks"] for each in received),
        "frontend_cpu_s_per_1000_tokens": 1000 * used / tokens,
    }


async def _run(address: str, calls: int, tokens: int) -> list[dict[str, float]]:
    """Delivers `tokens` tokens in every call, to clients in processes of their own.

    Raises:
        BenchError: tokens are missing, or the run takes too long.
    """
    command = [sys.executable, "-m", "bench.frontend_mode", address]
    shares = [calls // CLIENTS + (number < calls % CLIENTS) for number in range(CLIENTS)]
    clients = [
        await asyncio.create_subprocess_exec(
            *command, str(share), str(tokens), stdout=subprocess.PIPE
        )
        for share in shares
    ]
    try:
        async with asyncio.timeout(TIMEOUT_S):
            outputs = [(await client.communicate())[0] for client in clients]
    except TimeoutError:
        raise BenchError(f"the run did not end within {TIMEOUT_S:.0f} s") from None
    received: list[dict[str, float]] = [json.loads(output) for output in outputs if output]
    if (arrived := sum(each["tokens"] for each in received)) != calls * tokens:
        raise BenchError(f"{arrived:.0f} of {calls * tokens} tokens arrived")
    return received


if __name__ == "__main__":
    print(json.dumps(asyncio.run(receive(sys.argv[1], int(sys.argv[2]), int(sys.argv[3])))))
