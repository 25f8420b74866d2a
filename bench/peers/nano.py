"""Runs this server: a private stack, through its public gRPC API."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from bench.machine import this_machine
from bench.metrics import Trace
from bench.peers.driver import Entry, Job, Server, main
from bench.stack import run_request
from bench.workload import WorkloadRequest
from nano_vllm_grpc import AsyncLLM, PrivateStack


def variables(entry: Entry) -> dict[str, str]:
    """The stack's variables. Weights and caches that are not quantized are bfloat16 by default.
    Nothing is speculated: other servers do not by default, and random weights repeat themselves."""
    return {
        "speculation": "none",
        "dtype": "bfloat16",
        "quantization": "auto" if entry.weights == "bf16" else entry.weights,
        "kv_dtype": "auto" if entry.cache == "bf16" else entry.cache,
    }


@contextmanager
def serve(job: Job) -> Iterator[Server]:
    with PrivateStack(job.model, **variables(job.entry)) as stack, asyncio.Runner() as runner:
        llm = AsyncLLM(stack.address)

        def generate(requests: Sequence[WorkloadRequest]) -> list[Trace]:
            return runner.run(_generate(llm, requests))

        yield Server(generate, this_machine().versions, variables(job.entry))
        runner.run(llm.close())


async def _generate(llm: AsyncLLM, requests: Sequence[WorkloadRequest]) -> list[Trace]:
    return await asyncio.gather(*(run_request(llm, request) for request in requests))


if __name__ == "__main__":
    main(serve)
