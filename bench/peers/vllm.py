"""Runs vLLM's build for CPUs: the engine, in a process of its own, or its HTTP server."""

from __future__ import annotations

import itertools
import os
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from ctypes.util import find_library

from bench.metrics import Trace
from bench.peers.driver import Job, Server, main
from bench.peers.http_server import HOST, HttpServer, free_port
from bench.workload import TEMPERATURE, WorkloadRequest

MAX_MODEL_LEN = 2048
VARIABLES = {
    "VLLM_CPU_KVCACHE_SPACE": "4",  # GiB
    "VLLM_CPU_NUM_OF_RESERVED_CPU": "0",  # by default one core computes nothing
    "VLLM_NO_USAGE_STATS": "1",
}


def preloaded(prefix: str) -> list[str]:
    """The libraries that vLLM's manual advises for the engine's processes, tcmalloc if it is
    installed.

    Args:
        prefix: the directory of vLLM's environment.
    """
    return [f"{prefix}/lib/libiomp5.so", *filter(None, [find_library("tcmalloc_minimal")])]


def http_server(prefix: str, model: str, dtype: str) -> HttpServer:
    """The server in the environment at `prefix`."""
    port = free_port()
    flags = {
        "model": model,
        "dtype": dtype,
        "max-model-len": MAX_MODEL_LEN,
        "host": HOST,
        "port": port,
    }
    command = [f"{prefix}/bin/python", "-m", "vllm.entrypoints.openai.api_server"]
    return HttpServer(
        command + [word for name, value in flags.items() for word in (f"--{name}", str(value))],
        port,
        "/v1/completions",
        "max_tokens",
        {"return_token_ids": True},
        lambda event: event["choices"][0]["token_ids"] or (),
        lambda event: event["choices"][0]["finish_reason"] is not None,
        {**VARIABLES, "LD_PRELOAD": ":".join(preloaded(prefix))},
        "EngineCore",
    )


@contextmanager
def serve(job: Job) -> Iterator[Server]:
    libraries = preloaded(sys.prefix)
    os.environ.update({**VARIABLES, **os.environ})  # vllm reads them when it is imported
    import torch
    import vllm

    os.environ["LD_PRELOAD"] = ":".join(libraries)  # for the engine's processes
    llm = vllm.LLM(
        job.model,
        dtype=job.entry.weights,
        max_model_len=MAX_MODEL_LEN,
        skip_tokenizer_init=True,
        disable_log_stats=True,
    )
    engine = llm.llm_engine
    ids = itertools.count()

    def generate(requests: Sequence[WorkloadRequest]) -> list[Trace]:
        sent = time.perf_counter()
        traces = {str(next(ids)): Trace(len(request.prompt), sent) for request in requests}
        for name, request in zip(traces, requests, strict=True):
            params = vllm.SamplingParams(
                temperature=TEMPERATURE,
                ignore_eos=True,
                max_tokens=request.output_len,
                detokenize=False,
            )
            engine.add_request(name, {"prompt_token_ids": request.prompt}, params)
        while engine.has_unfinished_requests():
            answers = engine.step()
            now = time.perf_counter()
            for answer in answers:
                trace = traces[answer.request_id]
                trace.arrivals.append((now, len(answer.outputs[0].token_ids) - trace.output_tokens))
        return list(traces.values())

    yield Server(
        generate,
        {"vllm": vllm.__version__, "torch": torch.__version__},
        {"enforce_eager": engine.vllm_config.model_config.enforce_eager, "preloaded": libraries},
    )


if __name__ == "__main__":
    main(serve)
