"""Runs the engine of vLLM's build for CPUs, which runs the model in a separate process."""

from __future__ import annotations

import itertools
import os
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from bench.peers.vllm_server import MAX_MODEL_LEN, VARIABLES, preloaded

os.environ.update({**VARIABLES, **os.environ})  # vllm reads them when it is imported

import torch
import vllm

from bench.metrics import Trace
from bench.peers.driver import Server, main
from bench.peers.entries import Job
from bench.workload import TEMPERATURE, Request


@contextmanager
def serve(job: Job) -> Iterator[Server]:
    libraries = preloaded(sys.prefix)
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

    def generate(requests: Sequence[Request]) -> list[Trace]:
        sent = time.perf_counter()
        traces = {str(next(ids)): Trace(len(request.prompt), sent) for request in requests}
        for name, request in zip(traces, requests, strict=True):
            engine.add_request(name, {"prompt_token_ids": request.prompt}, _params(request))
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
        {
            "enforce_eager": engine.vllm_config.model_config.enforce_eager,
            "preloaded": [Path(library).name for library in libraries],
        },
    )


def _params(request: Request) -> vllm.SamplingParams:
    return vllm.SamplingParams(
        temperature=TEMPERATURE, ignore_eos=True, max_tokens=request.output_len, detokenize=False
    )


if __name__ == "__main__":
    main(serve)
