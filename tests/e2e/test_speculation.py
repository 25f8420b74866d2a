"""Speculation on real stacks: tokens are those of a stack without it, with every feature, though a
worker dies."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from functools import cache
from random import Random
from typing import Any

import pytest

from nano_vllm_grpc import LLM, SamplingParams, StructuredOutput
from tests.chaos.campaign import undisturbed
from tests.chaos.workload import Request, draw_requests
from tests.faults.transcript import Transcript
from tests.stack import DEMO_MODEL, RealStack, running_stack
from tests.waiting import wait_for

REPEATED = [*range(40, 60)] * 4
WAYS: dict[str, dict[str, Any]] = {
    "from its own tokens": {"speculation": "ngram"},
    "in int8": {"speculation": "ngram", "quantization": "int8", "kv_dtype": "int8"},
    "by a model": {"speculation": DEMO_MODEL, "draft_quantization": "int4", "tp": 2},
}


@pytest.fixture(scope="module")
def requests() -> list[Request]:
    """Requests with each feature, and some whose prompts repeat themselves."""
    greedy = SamplingParams(temperature=0, max_tokens=60, ignore_eos=True)
    repeating = [Request(f"repeats {i}", [i + 1, *REPEATED], greedy) for i in range(6)]
    return [*draw_requests(Random(36), 22), *repeating]


@pytest.fixture(params=WAYS)
def way(request: pytest.FixtureRequest) -> dict[str, Any]:
    return WAYS[request.param]


@pytest.fixture(scope="module")
def without(requests: list[Request]) -> Callable[..., dict[str, Transcript]]:
    """The tokens of a stack with these formats and without speculation."""

    @cache
    def found(**formats: Any) -> dict[str, Transcript]:
        with running_stack(dtype="float32", speculation="none", **formats) as stack:
            transcripts = asyncio.run(undisturbed(stack.address, requests))
            assert not stack.load().draft_tokens
        return transcripts

    return found


@pytest.fixture
def expected(
    without: Callable[..., dict[str, Transcript]], way: dict[str, Any]
) -> dict[str, Transcript]:
    return without(**{name: way[name] for name in ("quantization", "kv_dtype") if name in way})


@pytest.fixture
def stack(expected: object, way: dict[str, Any]) -> Iterator[RealStack]:
    with running_stack(dtype="float32", **way) as running:
        yield running


def test_tokens_are_those_without_speculation(
    stack: RealStack, requests: list[Request], expected: dict[str, Transcript]
) -> None:
    async def run() -> dict[str, Transcript]:
        reading = asyncio.create_task(undisturbed(stack.address, requests))
        await asyncio.to_thread(stack.wait_load, lambda load: load.accepted_tokens > 0)
        await asyncio.to_thread(stack.kill, "worker")
        return await reading

    found = asyncio.run(run())
    differences = [
        difference
        for name, transcript in found.items()
        for difference in transcript.compare(expected[name]).differences
    ]
    assert not differences
    load = stack.wait_idle()
    assert 0 < load.accepted_tokens <= load.draft_tokens

    forced = StructuredOutput(regex="(abc, ){9}")
    sampling = SamplingParams(temperature=1.0, max_tokens=40, structured_output=forced)
    with LLM(stack.address) as llm:

        def drafted() -> bool:
            before = stack.load().accepted_tokens
            llm.generate([REPEATED], sampling, use_tqdm=False)
            return stack.load().accepted_tokens > before

        # A busy machine may hide for some time that drafts are worth theirs.
        wait_for(drafted, "drafts of tokens that a grammar forces")
