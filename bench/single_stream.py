"""Measures one request at a time: the speed of a lone stream, a long prompt's first token."""

from __future__ import annotations

import random
import statistics
from dataclasses import dataclass

from bench.errors import BenchError
from bench.stack import run_request
from bench.workload import Request
from frontend.client import AsyncLLM, ModelInfo

STREAM_PROMPT, STREAM_TOKENS = 32, 128
LONG_PROMPT = 1024
REPEATS = 3


@dataclass(frozen=True)
class SingleStream:
    """Medians; None where nothing was measured."""

    single_stream_tokens_per_s: float | None  # after the first token
    ttft_1024_s: float | None


async def measure_single_stream(
    llm: AsyncLLM, model: ModelInfo, repeats: int = REPEATS
) -> SingleStream:
    """
    Raises:
        BenchError: the long prompt does not fit the model.
        LLMError: the server refused or failed.
    """
    if model.max_model_len <= LONG_PROMPT:
        raise BenchError(
            f"--single-stream: needs {LONG_PROMPT + 1} tokens, the server takes "
            f"{model.max_model_len}"
        )
    rates, ttfts = [], []
    for _ in range(repeats):
        trace = await run_request(llm, _request(model, STREAM_PROMPT, STREAM_TOKENS))
        (first, at_first), (last, _) = trace.arrivals[0], trace.arrivals[-1]
        rates.append((trace.output_tokens - at_first) / (last - first))
        ttfts.append((await run_request(llm, _request(model, LONG_PROMPT, 1))).ttft_s)
    return SingleStream(statistics.median(rates), statistics.median(ttfts))


def _request(model: ModelInfo, prompt_len: int, output_len: int) -> Request:
    # Deliberately unseeded: a prompt the server has seen before would be in its prefix cache.
    prompt = [random.randrange(model.vocab_size) for _ in range(prompt_len)]
    return Request(prompt, output_len, seed=0)
