"""One real stack with two ranks and two frontends: whichever process is killed under load, clients
of the library get the tokens that they would have got anyway. tests/faults has the other faults."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import asynccontextmanager

import pytest

from nano_vllm_grpc import AsyncLLM, SamplingParams, StructuredOutput
from tests.faults.transcript import Transcript
from tests.stack import RealStack, running_stack
from tests.waiting import until

pytestmark = pytest.mark.timeout(600)

_STORY = "Once upon a time, there was a little fox who"
_LONG = {"max_tokens": 200, "ignore_eos": True}
_REQUESTS: Mapping[str, SamplingParams] = {
    "greedy": SamplingParams(temperature=0, **_LONG),
    "seeded": SamplingParams(temperature=1, seed=1, **_LONG),
    "features": SamplingParams(temperature=1.2, seed=2, top_k=50, frequency_penalty=0.5, **_LONG),
    "logprobs": SamplingParams(temperature=1, seed=3, logprobs=2, prompt_logprobs=1, **_LONG),
    "stop string": SamplingParams(temperature=1, seed=4, stop=["zebra", "the end of all"], **_LONG),
    "several": SamplingParams(temperature=1, seed=5, n=3, logprobs=0, **_LONG),
    "beams": SamplingParams(beam_width=3, max_tokens=40),
    "regex": SamplingParams(
        temperature=1,
        seed=6,
        structured_output=StructuredOutput(regex=r"(yes|no)(, [a-z]{3,8}){20}!"),
    ),
}


@asynccontextmanager
async def _open_streams(
    stack: RealStack,
) -> AsyncIterator[tuple[dict[str, Transcript], Callable[[], set[str]]]]:
    """Yields what each request has received so far, and a function: the names of those still open.
    At the end all have ended without an error."""
    transcripts = {name: Transcript() for name in _REQUESTS}
    async with AsyncLLM(stack.address, connections=8) as llm:

        async def read(name: str) -> None:
            request_ids = set()
            async for chunk in llm.stream(_STORY, _REQUESTS[name]):
                transcripts[name].add(chunk)
                request_ids.add(chunk.request_id)
            assert len(request_ids) == 1

        async with asyncio.TaskGroup() as group:
            tasks = {name: group.create_task(read(name)) for name in _REQUESTS}
            yield transcripts, lambda: {name for name, task in tasks.items() if not task.done()}


@pytest.fixture(scope="module")
def stack() -> Iterator[RealStack]:
    with running_stack(
        tp=2, frontends=2, dtype="float32", kv_blocks=1024, block_size=16
    ) as running:
        yield running


@pytest.fixture(scope="module")
def expected(stack: RealStack) -> dict[str, Transcript]:
    """Transcripts of the requests if nothing is killed."""

    async def undisturbed() -> dict[str, Transcript]:
        async with _open_streams(stack) as (transcripts, _):
            return transcripts

    return asyncio.run(undisturbed())


@pytest.mark.parametrize(
    ("service", "index"),
    [("worker", 0), ("worker", 1), ("scheduler", 0), ("frontend", 0), ("frontend", 1)],
)
async def test_killed_under_load(
    stack: RealStack, expected: dict[str, Transcript], service: str, index: int
) -> None:
    await asyncio.to_thread(stack.wait_serving)
    others = {key: pid for key, pid in stack.pids().items() if key != (service, index)}
    streaming = set(_REQUESTS) - {"beams"}  # which come at the end

    async with _open_streams(stack) as (transcripts, are_open):
        await until(
            lambda: all(transcripts[name].num_tokens >= 10 for name in streaming), "ten tokens each"
        )
        pid = await asyncio.to_thread(
            stack.kill, service, index, while_true=lambda: streaming <= are_open()
        )
    damage = {name: each.compare(expected[name]).differences for name, each in transcripts.items()}
    assert not any(damage.values()), damage

    await asyncio.to_thread(stack.wait_replaced, service, index, pid)
    await asyncio.to_thread(stack.wait_serving)
    await asyncio.to_thread(stack.wait_idle)
    assert {key: stack.pid(*key) for key in others} == others
