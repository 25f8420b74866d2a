"""Runs this server: a private stack, through its public gRPC API."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from bench.machine import this_machine
from bench.metrics import Trace
from bench.peers.driver import Server, main
from bench.peers.entries import Entry, Job
from bench.stack import run_request
from bench.workload import Request
from nano_vllm_grpc import AsyncLLM, PrivateStack


def settings(entry: Entry) -> dict[str, str]:
    """The stack's variables. Weights and caches that are not quantized are bfloat16 by default."""
    variables = {"NANO_DTYPE": "bfloat16"}
    if entry.weights != "bf16":
        variables["NANO_QUANTIZATION"] = entry.weights
    if entry.cache != "bf16":
        variables["NANO_KV_DTYPE"] = entry.cache
    return variables


@contextmanager
def serve(job: Job) -> Iterator[Server]:
    for name in ("NANO_QUANTIZATION", "NANO_KV_DTYPE"):
        os.environ.pop(name, None)
    os.environ |= settings(job.entry)
    given = {name: value for name, value in os.environ.items() if name.startswith("NANO_")}
    with PrivateStack(job.model) as stack, asyncio.Runner() as runner:
        llm = runner.run(_connect(stack.address))

        def generate(requests: Sequence[Request]) -> list[Trace]:
            return runner.run(_generate(llm, requests))

        yield Server(generate, this_machine().versions, given)
        runner.run(llm.close())


async def _connect(address: str) -> AsyncLLM:
    return AsyncLLM(address)


async def _generate(llm: AsyncLLM, requests: Sequence[Request]) -> list[Trace]:
    return await asyncio.gather(*(run_request(llm, request) for request in requests))


if __name__ == "__main__":
    main(serve)
