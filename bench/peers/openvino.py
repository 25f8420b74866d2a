"""Runs OpenVINO GenAI: its pipeline with continuous batching, in this process, step by step."""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib.metadata import version

import numpy as np
import openvino
import openvino_genai

from bench.metrics import Trace
from bench.peers.driver import Job, Server, main
from bench.workload import TEMPERATURE, WorkloadRequest

CACHE_GIB = 4
PACKAGES = ("openvino", "openvino-genai", "openvino-tokenizers", "nncf", "optimum-intel")
# The CPU plugin's choices for the machine: the type in which it computes, and the group size with
# which it quantizes activations if weights are quantized.
HINTS = ("INFERENCE_PRECISION_HINT", "DYNAMIC_QUANTIZATION_GROUP_SIZE")


@contextmanager
def serve(job: Job) -> Iterator[Server]:
    scheduler = openvino_genai.SchedulerConfig()
    scheduler.cache_size = CACHE_GIB
    properties = {"KV_CACHE_PRECISION": getattr(openvino.Type, job.entry.cache)}
    pipe = openvino_genai.ContinuousBatchingPipeline(job.model, scheduler, "CPU", properties)
    ids = itertools.count()

    def generate(requests: Sequence[WorkloadRequest]) -> list[Trace]:
        sent = time.perf_counter()
        handles = [
            pipe.add_request(
                next(ids), openvino.Tensor(np.array([request.prompt])), _params(request)
            )
            for request in requests
        ]
        traces = [Trace(len(request.prompt), sent) for request in requests]
        while pipe.has_non_finished_requests():
            pipe.step()
            now = time.perf_counter()
            for handle, trace in zip(handles, traces, strict=True):
                while handle.can_read():
                    tokens = sum(len(each.generated_ids) for each in handle.read().values())
                    trace.arrivals.append((now, tokens))
        return traces

    core = openvino.Core()
    yield Server(
        generate,
        {package: version(package) for package in PACKAGES},
        {
            "max_num_batched_tokens": scheduler.max_num_batched_tokens,
            "enable_prefix_caching": scheduler.enable_prefix_caching,
            **{hint: str(core.get_property("CPU", hint)) for hint in HINTS},
        },
    )


def _params(request: WorkloadRequest) -> openvino_genai.GenerationConfig:
    params = openvino_genai.GenerationConfig()
    params.do_sample = True
    params.temperature = TEMPERATURE
    params.ignore_eos = True
    params.max_new_tokens = request.output_len
    params.rng_seed = request.seed
    return params


if __name__ == "__main__":
    main(serve)
