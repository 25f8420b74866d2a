"""Runs the reference workload on nano-vLLM (github.com/GeeeekExplorer/nano-vllm), as its bench.py
does. `python -m bench.gpu.peer CHECKOUT MODEL ROUNDS` prints each round's output tokens/s.
"""

from __future__ import annotations

import importlib
import json
import sys
import time
from collections.abc import Sequence
from dataclasses import replace

from bench.workload import TEMPERATURE, Shape, WorkloadRequest, reference_workload


def round_of(
    requests: Sequence[WorkloadRequest], number: int, vocab_size: int
) -> list[WorkloadRequest]:
    """Requests of equal lengths with other ids, so that earlier rounds put none into the cache."""
    return [
        replace(request, prompt=[(token + number) % vocab_size for token in request.prompt])
        for request in requests
    ]


def main(checkout: str, model: str, rounds: int) -> None:
    sys.path.append(checkout)  # at the end, because it also has a `bench` module
    nanovllm = importlib.import_module("nanovllm")
    llm = nanovllm.LLM(model, enforce_eager=False, max_model_len=4096)
    vocab_size = llm.model_runner.config.hf_config.vocab_size
    requests = reference_workload(Shape(), vocab_size)
    params = [
        nanovllm.SamplingParams(
            temperature=TEMPERATURE, ignore_eos=True, max_tokens=request.output_len
        )
        for request in requests
    ]
    llm.generate(["Benchmark: "], nanovllm.SamplingParams())
    rates = []
    for number in range(rounds):
        prompts = [request.prompt for request in round_of(requests, number, vocab_size)]
        started = time.perf_counter()
        llm.generate(prompts, params, use_tqdm=False)
        rates.append(sum(each.max_tokens for each in params) / (time.perf_counter() - started))
    print(json.dumps(rates))


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]))
