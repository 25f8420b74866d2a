"""The servers to compare, and the measurements that each gets.

A driver, `python -m bench.peers.<peer>`, runs them in its server's environment. There, of this
project's modules only those that this file imports can be imported.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from bench.machine import cpu_s
from bench.metrics import Trace, summarize
from bench.workload import (
    LONG_PROMPT,
    REPEATS,
    STREAM_PROMPT,
    STREAM_TOKENS,
    BenchError,
    Shape,
    WorkloadRequest,
    text_request,
    text_workload,
)

FILE = "file"  # the weights of a GGUF file as they are


@dataclass(frozen=True)
class Entry:
    name: str
    peer: str  # the name of its driver, bench/peers/<peer>.py, and of its environment
    weights: str
    cache: str  # type of the keys and values


ENTRIES = (
    Entry("nano-bf16", "nano", "bf16", "bf16"),
    Entry("nano-int8", "nano", "int8", "bf16"),
    Entry("nano-int4", "nano", "int4", "bf16"),
    Entry("nano-int8-kv8", "nano", "int8", "int8"),
    Entry("openvino-fp16", "openvino", "fp16", "u8"),
    Entry("openvino-int8", "openvino", "int8", "u8"),
    Entry("openvino-int4", "openvino", "int4", "u8"),
    Entry("llama-bf16", "llama_cpp", "BF16", "f16"),
    Entry("llama-q8_0", "llama_cpp", "Q8_0", "f16"),
    Entry("llama-q4_0", "llama_cpp", "Q4_0", "f16"),
    Entry("llama-file", "llama_cpp", FILE, "f16"),
    Entry("vllm-bf16", "vllm", "bfloat16", "bf16"),
)


@dataclass(frozen=True)
class Sizes:
    """The sizes of the measurements, in requests and tokens."""

    shape: Shape
    stream_prompt: int
    stream_tokens: int
    long_prompt: int
    repeats: int


FULL = Sizes(
    Shape(num_seqs=32, min_input=32, max_input=256, min_output=32, max_output=256),
    STREAM_PROMPT,
    STREAM_TOKENS,
    LONG_PROMPT,
    REPEATS,
)
TINY = Sizes(Shape(4, 8, 16, 4, 8), stream_prompt=8, stream_tokens=8, long_prompt=64, repeats=1)


@dataclass(frozen=True)
class Job:
    """A driver's task, which it reads from stdin as JSON."""

    model: str  # directory or file, in the peer's format
    text: list[int]  # token ids; prompts are pieces of it
    entry: Entry
    sizes: Sizes
    spawned_s: float  # on the monotonic clock, which all processes share

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Job:
        values = json.loads(text)
        sizes = values["sizes"]
        sizes["shape"] = Shape(**sizes["shape"])
        return cls(**{**values, "entry": Entry(**values["entry"]), "sizes": Sizes(**sizes)})


Generate = Callable[[Sequence[WorkloadRequest]], list[Trace]]


@dataclass(frozen=True)
class Server:
    """A server that has been started.

    `generate` sends all requests at once and returns when all are answered. It sets the workload's
    temperature and no other sampling parameter, and ignores the end token.
    """

    generate: Generate
    versions: dict[str, str]
    settings: dict[str, Any] = field(default_factory=dict)  # settings that explain the figures


@dataclass(frozen=True)
class Figures:
    output_tokens_per_s: float
    cores_busy: float  # during the workload
    single_stream_tokens_per_s: float
    ttft_1024_s: float
    start_s: float  # from the start of the process to the first token


def measure(job: Job, server: Server) -> Figures:
    """Measures a server.

    Raises:
        BenchError: a completion is not as long as requested.
    """
    sizes, shape = job.sizes, job.sizes.shape
    warm_up = text_request(job.text, shape.min_input, min(shape.min_output, 16))
    _run(server, [replace(warm_up, output_len=1)])
    start_s = time.monotonic() - job.spawned_s
    _run(server, [warm_up])
    workload = text_workload(shape, job.text)
    cpu_before, before = cpu_s(), time.perf_counter()
    metrics = summarize(_run(server, workload))
    cores_busy = (cpu_s() - cpu_before) / (time.perf_counter() - before)
    rates, ttfts = [], []
    for _ in range(sizes.repeats):
        stream = text_request(job.text, sizes.stream_prompt, sizes.stream_tokens)
        rates.append(_run(server, [stream])[0].tokens_per_s)
        prompt = text_request(job.text, sizes.long_prompt, 1)
        ttfts.append(_run(server, [prompt])[0].ttft_s)
    return Figures(
        metrics.output_tokens_per_s,
        cores_busy,
        statistics.median(rates),
        statistics.median(ttfts),
        start_s,
    )


def _run(server: Server, requests: Sequence[WorkloadRequest]) -> list[Trace]:
    traces = server.generate(requests)
    for request, trace in zip(requests, traces, strict=True):
        if trace.output_tokens != request.output_len:
            raise BenchError(
                f"the server generated {trace.output_tokens} tokens instead of "
                f"{request.output_len}; the figures would not be comparable"
            )
    return traces


def main(serve: Callable[[Job], AbstractContextManager[Server]]) -> None:
    """Reads a job from stdin and prints the figures as JSON. All other output goes to stderr, even
    the output of the server's processes as they end."""
    stdout = os.dup(1)
    os.dup2(2, 1)
    job = Job.from_json(sys.stdin.read())
    with serve(job) as server:
        figures = measure(job, server)
    answer = {
        "figures": asdict(figures),
        "versions": server.versions,
        "settings": server.settings,
    }
    os.write(stdout, json.dumps(answer).encode())
