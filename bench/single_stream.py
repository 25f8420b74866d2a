"""Measures one request at a time: the speed of a lone stream, a long prompt's first token."""

from __future__ import annotations

import statistics
from dataclasses import dataclass

from bench.errors import BenchError
from bench.stack import run_request
from bench.workload import LONG_PROMPT, REPEATS, STREAM_PROMPT, STREAM_TOKENS, random_request
from nano_vllm_grpc import AsyncLLM, ModelInfo


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
        stream = random_request(model.vocab_size, STREAM_PROMPT, STREAM_TOKENS)
        rates.append((await run_request(llm, stream)).tokens_per_s)
        prompt = random_request(model.vocab_size, LONG_PROMPT, 1)
        ttfts.append((await run_request(llm, prompt)).ttft_s)
    return SingleStream(statistics.median(rates), statistics.median(ttfts))
