"""Limits on the work of one turn of the event loop, and on the memory of requests."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from typing import Any

import grpc
import pytest

from frontend import sampling_checks
from frontend.api import responses
from frontend.engines import engine, outputs
from frontend.generation import Generation
from frontend.sampling_checks import MAX_LOGPROB_ENTRIES
from frontend.text import structured_output
from frontend.text.completion import CompletionBuilder
from frontend.validation import MAX_TOKENIZED
from nano_vllm_grpc.pb import frontend_pb2 as pb
from shared.pb import scheduler_pb2
from tests.frontend.conftest import Service, rejection
from tests.frontend.fake_scheduler import ended, logprob_row, logprob_rows
from tests.frontend.test_generation import (
    PROMPT,
    accept_long_sequences,
    begin,
    join,
    request,
    rest,
)
from tests.turns import Turns, counting_turns


async def reason(call: Any) -> str:
    code, message = await rejection(call)
    assert code is grpc.StatusCode.INVALID_ARGUMENT
    return message


def count(
    monkeypatch: pytest.MonkeyPatch, owner: Any, name: str, turns: Turns, amount: Callable[..., int]
) -> None:
    """Has each call of a function on the loop count as `amount(its arguments)`."""
    real, loop = getattr(owner, name), threading.current_thread()

    def counted(*args: Any, **kwargs: Any) -> Any:
        if threading.current_thread() is loop:
            turns.done(amount(*args))
        return real(*args, **kwargs)

    monkeypatch.setattr(owner, name, counted)


async def test_tokenize_and_detokenize_have_limits(service: Service) -> None:
    text = "a1" * (MAX_TOKENIZED // 2)
    ids = (await service.stub.Tokenize(pb.TokenizeRequest(text=text))).token_ids
    assert len(ids) <= MAX_TOKENIZED
    await service.stub.Detokenize(pb.DetokenizeRequest(token_ids=[300] * MAX_TOKENIZED))
    more = await reason(service.stub.Tokenize(pb.TokenizeRequest(text="a1" * MAX_TOKENIZED)))
    assert more == f"text: {2 * len(ids)} tokens; the limit is {MAX_TOKENIZED}"
    many = pb.DetokenizeRequest(token_ids=[300] * (MAX_TOKENIZED + 1))
    assert await reason(service.stub.Detokenize(many)) == (
        f"token_ids: {MAX_TOKENIZED + 1} tokens; the limit is {MAX_TOKENIZED}"
    )


async def test_ids_are_counted_before_they_are_checked(service: Service) -> None:
    """The values, which are too large, are not even seen."""
    ids = [1 << 31] * 200_000
    for message in (request(ids), request(resume=ids)):
        assert "; the limit is 12" in await reason(service.stub.Generate(message))


async def test_choices_are_measured_before_they_are_escaped(
    service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    with counting_turns() as turns:
        count(monkeypatch, structured_output, "_escaped", turns, len)
        options = ["\n" * 1000] * 1000
        choice = pb.StructuredOutput(choice=pb.Choice(options=options))
        message = request(structured_output=choice)
        assert await reason(service.stub.Generate(message)) == (
            "sampling.structured_output.choice.options: 1000000 characters; the limit is 65536"
        )
    assert turns.total == 0


async def test_several_completions_have_a_limit_on_logprobs(
    service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    await accept_long_sequences(service)
    message = request(n=16, logprobs=20, max_tokens=4000)
    assert await reason(service.stub.Generate(message)) == (
        "sampling.logprobs: 16 completions of up to 4000 tokens, 21 each, have 1344000 entries; "
        f"the limit is {MAX_LOGPROB_ENTRIES}: lower n, max_tokens or logprobs"
    )
    monkeypatch.setattr(sampling_checks, "MAX_LOGPROB_ENTRIES", 20)
    await service.stub.Generate(request(logprobs=20))  # one alone has none


@pytest.mark.parametrize("streams", [True, False])
async def test_logprobs_are_made_in_slices_and_not_kept(
    service: Service, monkeypatch: pytest.MonkeyPatch, streams: bool
) -> None:
    await accept_long_sequences(service)
    generations: list[Generation] = []
    real = Generation.__init__

    def remember(self: Generation, *args: Any) -> None:
        real(self, *args)
        generations.append(self)

    monkeypatch.setattr(Generation, "__init__", remember)
    service.scheduler.automatic = False
    rows = [logprob_row(300, offset, 20) for offset in range(500)]
    with counting_turns() as turns:
        count(monkeypatch, responses, "logprobs", turns, lambda rows, _: len(rows))
        message = request(n=2, max_tokens=500, logprobs=20)
        call: Any = service.collect(message) if streams else service.stub.Generate(message)
        call = asyncio.ensure_future(call)
        number = (await service.scheduler.submits.get()).request
        both = (number, number + 1)
        service.scheduler.send(
            [(each, offset, 300) for each in both for offset in range(500)],
            ended(*both),
            [logprob_rows(each, False, 0, rows) for each in both],
        )
        answer = await call
    if streams:
        found = [join([chunk for chunk in answer if chunk.index == i]) for i in range(2)]
    else:
        found = list(answer.completions)
    assert [len(each.logprobs) for each in found] == [500, 500]
    assert [entry.token_id for entry in found[1].logprobs[7].entries[1:]] == list(range(20))
    assert turns.total == 1000
    assert turns.max <= 32
    for reader in generations[0]._all:
        assert reader.stream.logprobs is not None
        assert reader.stream.logprobs.of(500, 1) == []
        assert not reader.stream.logprobs._rows


async def test_one_completion_per_turn_is_searched_for_stop_strings(
    service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    await accept_long_sequences(service)
    service.scheduler.automatic = False
    with counting_turns() as turns:
        count(monkeypatch, CompletionBuilder, "feed", turns, lambda _, ids: len(ids))
        message = request(n=16, max_tokens=300, stop=["never"] * 16)
        call = asyncio.ensure_future(service.collect(message))
        first = (await service.scheduler.submits.get()).request
        service.scheduler.send(
            [(first + i, offset, 300) for i in range(16) for offset in range(300)],
            ended(*range(first, first + 16)),
        )
        chunks = await call
    assert sum(len(chunk.token_ids) for chunk in chunks) == turns.total == 16 * 300
    assert turns.max <= 128


async def test_logprobs_of_a_step_are_stored_in_slices(
    service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    await accept_long_sequences(service)
    call = await begin(service, request([300] * 4000, max_tokens=1, prompt_logprobs=20))
    (number,) = service.scheduler.connection.live
    rows = [logprob_row(300, i, 20) for i in range(4000)]
    pieces = [logprob_rows(number, True, i, rows[i : i + 100]) for i in range(1, 4000, 100)]

    def size(message: scheduler_pb2.LogprobRows) -> int:
        return len(message.token_ids) // 4

    with counting_turns() as turns:
        count(monkeypatch, outputs, "logprob_rows", turns, size)
        service.scheduler.send([(number, 0, 300)], ended(number), pieces)
        (chunk,) = await rest(call)
    assert len(chunk.prompt_logprobs) == 4000
    assert turns.total == 3999 * 21
    assert turns.max <= outputs._LOGPROBS_AT_ONCE + 2100


async def test_requests_are_submitted_again_in_slices(
    service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    service.scheduler.automatic = False
    message = request(max_tokens=2)
    calls = [service.stub.GenerateStream(message) for _ in range(100)]
    async with asyncio.timeout(60):
        for _ in calls:
            await service.scheduler.submits.get()
        with counting_turns() as turns:
            count(monkeypatch, engine, "submit_message", turns, lambda *_: 1)
            await service.reconnect()
            for _ in calls:
                await service.scheduler.submits.get()
        assert turns.total == 100
        assert turns.max <= 32
        for _ in range(2):
            service.scheduler.step()
        for call in calls:
            assert join(await rest(call)).token_ids == PROMPT[:2]


async def test_eight_chunks_are_written_per_turn_of_the_loop(
    service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    service.scheduler.automatic = False
    calls = [service.stub.GenerateStream(request(max_tokens=1)) for _ in range(60)]
    for _ in calls:
        await service.scheduler.submits.get()
    with counting_turns() as turns:
        count(monkeypatch, CompletionBuilder, "feed", turns, lambda *_: 1)
        service.scheduler.step()
        for call in calls:
            assert len(join(await rest(call)).token_ids) == 1
    assert turns.total == 60
    assert turns.max <= 8


async def test_work_that_grows_with_a_request_is_done_on_threads_in_pieces(
    service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    pieces: list[tuple[str, str, int]] = []

    def recording(name: str, work: Callable[..., Any], argument: int) -> Callable[..., Any]:
        def run(*args: Any) -> Any:
            pieces.append((name, threading.current_thread().name, len(args[argument])))
            return work(*args)

        return run

    feed, logprobs = CompletionBuilder.feed, responses.logprobs
    monkeypatch.setattr(CompletionBuilder, "feed", recording("resumed", feed, 1))
    monkeypatch.setattr(responses, "logprobs", recording("logprobs", logprobs, 0))
    await accept_long_sequences(service)
    message = request(PROMPT * 300, PROMPT * 200, max_tokens=1001, prompt_logprobs=1)
    message.sampling.stop.append("never there")
    response = await service.stub.Generate(message)

    assert response.usage.completion_tokens == 1001
    assert len(response.prompt_logprobs) == 1500
    on_loop = [size for _, thread, size in pieces if thread == threading.current_thread().name]
    assert max(on_loop) == 1
    on_threads = [piece for piece in pieces if piece[1] != threading.current_thread().name]
    assert max(size for _, _, size in on_threads) <= 128
    for name, size in (("resumed", 1000), ("logprobs", 1500)):
        assert sum(each[2] for each in on_threads if each[0] == name) == size
