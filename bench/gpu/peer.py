"""Runs the reference workload on nano-vLLM (github.com/GeeeekExplorer/nano-vllm), as its bench.py
does, or on the offline engine of an installed vLLM. `python -m bench.gpu.peer PEER MODEL ROUNDS`
prints each round's output tokens/s. PEER is a checkout of nano-vLLM, or vllm.
"""

from __future__ import annotations

import importlib
import json
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from bench.workload import TEMPERATURE, Shape, WorkloadRequest, reference_workload

VLLM = "vllm"
VLLM_STEP_TOKENS = 16384  # its best of those tried on an H200
MAX_MODEL_LEN = 4096


def round_of(
    requests: Sequence[WorkloadRequest], number: int, vocab_size: int
) -> list[WorkloadRequest]:
    """Requests of equal lengths with other ids, so that earlier rounds put none into the cache."""
    return [
        replace(request, prompt=[(token + number) % vocab_size for token in request.prompt])
        for request in requests
    ]


def main(peer: str, model: str, rounds: int) -> None:
    options = {"max_model_len": MAX_MODEL_LEN}
    unread = {}  # what only vLLM has
    if peer == VLLM:
        options |= {"max_num_seqs": Shape.num_seqs, "max_num_batched_tokens": VLLM_STEP_TOKENS}
        unread = {"detokenize": False}
    else:
        sys.path.append(peer)  # at the end, because it also has a `bench` module
    package = importlib.import_module(VLLM if peer == VLLM else "nanovllm")
    llm = package.LLM(model, enforce_eager=False, **options)
    vocab_size = json.loads(Path(model, "config.json").read_text())["vocab_size"]
    requests = reference_workload(Shape(), vocab_size)
    params = [
        package.SamplingParams(
            temperature=TEMPERATURE, ignore_eos=True, max_tokens=request.output_len, **unread
        )
        for request in requests
    ]
    llm.generate(["Benchmark: "], package.SamplingParams())
    rates = []
    for number in range(rounds):
        prompts: list[Any] = [each.prompt for each in round_of(requests, number, vocab_size)]
        if peer == VLLM:
            prompts = [{"prompt_token_ids": prompt} for prompt in prompts]
        started = time.perf_counter()
        llm.generate(prompts, params, use_tqdm=False)
        rates.append(sum(each.max_tokens for each in params) / (time.perf_counter() - started))
    print(json.dumps(rates))


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]))
