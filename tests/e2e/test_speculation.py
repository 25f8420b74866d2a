"""Speculation on real stacks: tokens are those of a stack without it, with every feature, though a
worker dies."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from functools import cache
from random import Random
from typing import Any

import grpc
import pytest
from smg_grpc_proto.generated import vllm_engine_pb2 as vllm
from smg_grpc_proto.generated.vllm_engine_pb2_grpc import VllmEngineStub

from deploy.ports import free_port
from nano_vllm_grpc import SamplingParams
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
def stack(expected: object, way: dict[str, Any]) -> Iterator[tuple[RealStack, str]]:
    gateway = f"127.0.0.1:{free_port()}"
    with running_stack(dtype="float32", gateway_addresses=gateway, **way) as running:
        yield running, gateway


def test_tokens_are_those_without_speculation(
    stack: tuple[RealStack, str], requests: list[Request], expected: dict[str, Transcript]
) -> None:
    running, gateway = stack

    async def run() -> dict[str, Transcript]:
        reading = asyncio.create_task(undisturbed(running.address, requests))
        await asyncio.to_thread(running.wait_load, lambda load: load.accepted_tokens > 0)
        await asyncio.to_thread(running.kill, "worker")
        return await reading

    found = asyncio.run(run())
    differences = [
        difference
        for name, transcript in found.items()
        for difference in transcript.compare(expected[name]).differences
    ]
    assert not differences
    load = running.wait_idle()
    assert 0 < load.accepted_tokens <= load.draft_tokens

    with grpc.insecure_channel(gateway) as channel:
        engine: Any = VllmEngineStub(channel)  # type: ignore[no-untyped-call]
        sampling = vllm.SamplingParams(temperature=1.0, max_tokens=40, regex="(abc, ){9}")
        asked = vllm.GenerateRequest(
            request_id="forced",
            tokenized=vllm.TokenizedInput(input_ids=REPEATED),
            sampling_params=sampling,
        )

        def drafted() -> Any:
            *_, last = engine.Generate(asked)
            return last.complete.spec_accepted_tokens and last.complete

        # A busy machine may hide for some time that drafts are worth theirs.
        last = wait_for(drafted, "drafts of tokens that a grammar forces")
    assert last.spec_accepted_tokens <= last.spec_draft_tokens
