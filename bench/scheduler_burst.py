"""Measures how running streams fare when long prompts arrive, and short prompts among these."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence as Seq
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from bench.instant_worker import VOCAB_SIZE
from bench.scheduler_client import SchedulerConnection, connect
from bench.scheduler_processes import Sizes, running_scheduler

STEP_US, TOKEN_US = 1000.0, 5.0
STREAM_PROMPT, SHORT_PROMPT = 32, 64
_LONG_PER_SHORT = 4
_PROMPT_OUTPUT = 1000  # tokens, more than will be generated


@dataclass(frozen=True)
class Burst:
    """Figures with a worker whose step takes 1 ms plus 5 us per token. Gaps are between a stream's
    tokens; times to first token count from the Submit."""

    streams: int
    long_prompts: int
    long_prompt_tokens: int
    short_prompts: int
    gap_before_p50_ms: float
    gap_before_p99_ms: float
    gap_before_max_ms: float
    gap_during_p50_ms: float
    gap_during_p99_ms: float
    gap_during_max_ms: float
    short_ttft_p50_ms: float
    short_ttft_max_ms: float
    long_ttft_p50_ms: float
    long_ttft_max_ms: float
    prompt_tokens_per_s: float  # from the burst to the last prompt's first token


async def measure_burst(
    streams: int, long_prompts: int, long_prompt_tokens: int, steps_before: int
) -> Burst:
    """
    Raises:
        BenchError: the scheduler failed.
    """
    rng = np.random.default_rng(0)

    def prompt(tokens: int) -> npt.NDArray[np.int32]:
        return rng.integers(VOCAB_SIZE, size=tokens, dtype=np.int32)

    prompts = []
    for number in range(long_prompts):
        prompts.append(prompt(long_prompt_tokens))
        if number % _LONG_PER_SHORT == 0:
            prompts.append(prompt(SHORT_PROMPT))
    num_seqs = streams + len(prompts)
    # No stream may end before the last prompt is done, however few of its tokens a step takes.
    max_tokens = long_prompt_tokens * long_prompts // 8 + 4 * steps_before + 1000
    model_len = max(max_tokens, long_prompt_tokens) + 1000
    sizes = Sizes(
        max_num_seqs=max(256, num_seqs),
        max_num_batched_tokens=max(2048, 2 * num_seqs),
        max_model_len=model_len,
        num_blocks=num_seqs * (model_len // 16 + 1),
        step_us=STEP_US,
        token_us=TOKEN_US,
    )
    async with running_scheduler(sizes) as scheduler, connect(scheduler.stub) as connection:
        for _ in range(streams):
            await connection.submit(prompt(STREAM_PROMPT), max_tokens)
        await connection.read_until(lambda: connection.num_started == streams)
        quiet = len(connection.messages)
        await connection.read_until(lambda: len(connection.messages) >= quiet + steps_before)
        all_started = connection.read_until(lambda: connection.num_started == num_seqs)
        await asyncio.gather(_submit_all(connection, prompts), all_started)
    return _summary(connection, streams, quiet, [len(each) for each in prompts])


async def _submit_all(connection: SchedulerConnection, prompts: Seq[npt.NDArray[np.int32]]) -> None:
    for each in prompts:
        await connection.submit(each, _PROMPT_OUTPUT)


def _summary(
    connection: SchedulerConnection, streams: int, quiet: int, prompt_lens: Seq[int]
) -> Burst:
    """`quiet`: the message from which on all streams run; `prompt_lens`: those of the burst."""
    arrivals = connection.arrivals()
    burst = connection.sent[streams]
    since = connection.messages[quiet][0]
    before, during = [], []
    for times in arrivals[:streams]:
        gaps = 1e3 * np.diff(times)
        before += gaps[(times[:-1] >= since) & (times[1:] < burst)].tolist()
        during += gaps[times[1:] >= burst].tolist()
    ttfts = [
        1e3 * float(times[0] - sent)
        for times, sent in zip(arrivals[streams:], connection.sent[streams:], strict=True)
    ]
    short = [t for t, tokens in zip(ttfts, prompt_lens, strict=True) if tokens == SHORT_PROMPT]
    long = [t for t, tokens in zip(ttfts, prompt_lens, strict=True) if tokens != SHORT_PROMPT]
    last = max(float(times[0]) for times in arrivals[streams:])
    return Burst(
        streams=streams,
        long_prompts=len(long),
        long_prompt_tokens=max(prompt_lens),
        short_prompts=len(short),
        **_percentiles("gap_before", before, 50, 99, 100),
        **_percentiles("gap_during", during, 50, 99, 100),
        **_percentiles("short_ttft", short, 50, 100),
        **_percentiles("long_ttft", long, 50, 100),
        prompt_tokens_per_s=sum(prompt_lens) / (last - burst),
    )


def _percentiles(name: str, values: Seq[float], *which: int) -> dict[str, float]:
    suffixes = ["max" if q == 100 else f"p{q}" for q in which]
    found = np.percentile(values, which).tolist()
    return {f"{name}_{suffix}_ms": value for suffix, value in zip(suffixes, found, strict=True)}
