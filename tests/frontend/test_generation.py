"""Several completions of a request, log-probabilities, beams and resuming, end to end over gRPC."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import grpc
import numpy as np
import pytest
from grpc import aio

from nano_vllm_grpc.pb import frontend_pb2 as pb
from shared.pb import scheduler_pb2
from tests.frontend.conftest import Service, failure
from tests.frontend.fake_scheduler import echo_from_seed, ended, logprob_row, logprob_rows

PROMPT = [105, 300, 511, 600, 42]


def request(
    ids: Sequence[int] = PROMPT, resume: Sequence[int] = (), **sampling: Any
) -> pb.GenerateRequest:
    return pb.GenerateRequest(
        request_id="an-id",
        token_ids=pb.TokenIds(ids=ids),
        sampling=pb.SamplingParams(**sampling),
        resume_token_ids=resume,
    )


def of_index(
    responses: Sequence[pb.GenerateStreamResponse], index: int
) -> list[pb.GenerateStreamResponse]:
    return [response for response in responses if response.index == index]


def join(responses: Sequence[pb.GenerateStreamResponse]) -> pb.Completion:
    """Joins the chunks of one completion into what Generate should return."""
    last = responses[-1]
    return pb.Completion(
        index=last.index,
        text="".join(r.text for r in responses),
        token_ids=[t for r in responses for t in r.token_ids],
        finish_reason=last.finish_reason,
        stop_reason=last.stop_reason,
        logprobs=[row for r in responses for row in r.logprobs],
        score=last.score,
    )


def entries(row: pb.Logprobs) -> list[tuple[int, float]]:
    return [(entry.token_id, entry.logprob) for entry in row.entries]


async def begin(service: Service, message: pb.GenerateRequest) -> Any:
    """Submits a request and returns its stream, whose tokens come from `service.scheduler.step`."""
    service.scheduler.automatic = False
    call = service.stub.GenerateStream(message)
    while (await service.scheduler.submits.get()).request not in service.scheduler.connection.live:
        pass
    return call


async def rest(call: Any) -> list[pb.GenerateStreamResponse]:
    responses = []
    while (response := await call.read()) is not aio.EOF:
        responses.append(response)
    return responses


async def accept_long_sequences(service: Service) -> None:
    service.scheduler.info.max_model_len = 10_000
    await service.reconnect()


async def test_each_of_n_completions_is_what_its_seed_gives_alone(service: Service) -> None:
    service.scheduler.next_token = echo_from_seed
    response = await service.stub.Generate(request(n=3, seed=2**64 - 2, max_tokens=7))
    alone = [
        (await service.stub.Generate(request(seed=seed, max_tokens=7))).completions[0]
        for seed in (2**64 - 2, 2**64 - 1, 0)
    ]
    assert [c.index for c in response.completions] == [0, 1, 2]
    assert len({tuple(c.token_ids) for c in alone}) == 3
    for completion, other in zip(response.completions, alone, strict=True):
        assert (completion.text, completion.token_ids) == (other.text, other.token_ids)
    assert response.usage == pb.Usage(
        prompt_tokens=len(PROMPT), cached_prompt_tokens=3, completion_tokens=21
    )
    assert response.timings.queue_s == 0.25
    assert 0 < response.timings.first_token_s <= response.timings.total_s


async def test_chunks_of_n_completions_take_turns_and_joined_equal_generate(
    service: Service,
) -> None:
    service.scheduler.next_token = echo_from_seed
    message = request(n=3, seed=0, max_tokens=6, stop_token_ids=[PROMPT[3]], logprobs=1)
    whole = await service.stub.Generate(message)
    call = await begin(service, message)
    responses = []
    for running in (3, 3, 2, 1):  # completion i ends with its token number 3 - i
        service.scheduler.step()
        responses += [await call.read() for _ in range(running)]
        if running < 3:
            assert len(service.scheduler.connection.live) == running - 1
    assert await rest(call) == []
    assert [join(of_index(responses, i)) for i in range(3)] == list(whole.completions)
    assert [c.finish_reason for c in whole.completions] == [pb.FINISH_REASON_STOP] * 3
    assert [len(c.token_ids) for c in whole.completions] == [4, 3, 2]
    for index in range(3):
        chunks = of_index(responses, index)
        assert [chunk.token_offset for chunk in chunks] == list(range(len(chunks)))
        assert [bool(chunk.finish_reason) for chunk in chunks[:-1]] == [False] * (len(chunks) - 1)
    assert not any(r.HasField("usage") or r.HasField("timings") for r in responses[:-1])
    assert responses[-1].usage == whole.usage
    assert responses[-1].timings.total_s > 0


async def test_the_last_of_several_that_end_together_has_the_usage(service: Service) -> None:
    responses = await service.collect(request(n=4, max_tokens=1))
    assert [r.index for r in responses] == [0, 1, 2, 3]
    assert [r.HasField("usage") for r in responses] == [False, False, False, True]
    assert responses[-1].usage.completion_tokens == 4


async def test_a_stop_string_ends_one_completion_and_not_the_others(
    service: Service, hf: Any
) -> None:
    service.scheduler.next_token = echo_from_seed
    stop = hf.decode([PROMPT[2]])
    call = await begin(service, request(n=2, seed=1, stop=[stop], max_tokens=3))
    number = next(iter(service.scheduler.connection.live))
    service.scheduler.step()
    service.scheduler.step()
    assert await service.scheduler.aborts.get() in (number, number + 1)
    assert len(service.scheduler.connection.live) <= 1
    while service.scheduler.connection.live:
        service.scheduler.step()
        await asyncio.sleep(0)
    responses = await rest(call)
    assert {r.finish_reason for r in responses if r.finish_reason} == {pb.FINISH_REASON_STOP}
    assert responses[-1].usage.completion_tokens == sum(len(r.token_ids) for r in responses)


async def test_an_error_of_one_completion_ends_the_call_and_the_others(service: Service) -> None:
    call = await begin(service, request(n=3))
    first, second, third = sorted(service.scheduler.connection.live)
    late = scheduler_pb2.Finished(request=second, cause=scheduler_pb2.FINISH_CAUSE_DEADLINE)
    service.scheduler.send((), [late])
    assert (await failure(rest(call))).code() == grpc.StatusCode.DEADLINE_EXCEEDED
    assert {await service.scheduler.aborts.get() for _ in range(2)} == {first, third}


async def test_completions_continue_after_a_lost_connection(service: Service) -> None:
    service.scheduler.next_token = echo_from_seed
    message = request(n=3, seed=2**64 - 2, max_tokens=6, logprobs=2, prompt_logprobs=1)
    whole = await service.stub.Generate(message)
    call = await begin(service, message)
    service.scheduler.step()
    service.scheduler.step()
    responses = [await call.read() for _ in range(3)]
    await service.reconnect()
    submits = [await service.scheduler.submits.get() for _ in range(3)]
    seeds = [2**64 - 2, 2**64 - 1, 0]
    assert [(s.n, s.sampling.seed) for s in submits] == [(0, seed) for seed in seeds]
    # The prompt's log-probabilities arrived before the first token, and are not computed again.
    assert not any(submit.sampling.HasField("prompt_logprobs") for submit in submits)
    while service.scheduler.connection.live:
        service.scheduler.step()
    responses += await rest(call)
    assert [join(of_index(responses, i)) for i in range(3)] == list(whole.completions)
    assert list(responses[0].prompt_logprobs) == list(whole.prompt_logprobs)


async def test_logprobs_are_one_row_per_token(service: Service, hf: Any) -> None:
    message = request(max_tokens=4, logprobs=2)
    (completion,) = (await service.stub.Generate(message)).completions
    assert [entries(row) for row in completion.logprobs] == [
        logprob_row(token, offset, 2) for offset, token in enumerate(PROMPT[:4])
    ]
    assert completion.logprobs[1].entries[0].token.decode() == hf.decode([PROMPT[1]])
    assert join(await service.collect(message)) == completion
    message.sampling.logprobs = 0
    (completion,) = (await service.stub.Generate(message)).completions
    assert [len(row.entries) for row in completion.logprobs] == [1] * 4
    message.sampling.ClearField("logprobs")
    assert not (await service.stub.Generate(message)).completions[0].logprobs


async def test_special_tokens_and_parts_of_characters_have_their_bytes(
    service: Service, hf: Any
) -> None:
    end = hf.convert_tokens_to_ids("<|im_end|>")
    ids = [*hf("👍").input_ids, end]
    (completion,) = (await service.stub.Generate(request(ids, logprobs=0))).completions
    spelled = [row.entries[0].token for row in completion.logprobs]
    assert b"".join(spelled) == "👍<|im_end|>".encode()
    assert completion.text == "👍"


async def test_tokens_cut_off_by_a_stop_string_have_no_logprobs(service: Service, hf: Any) -> None:
    stop = hf.decode([PROMPT[1]])
    message = request(max_tokens=5, logprobs=1, stop=[stop])
    call = await begin(service, message)
    for _ in range(5):  # all are there when the first are read, so some must be dropped
        service.scheduler.step()
    responses = await rest(call)
    completion = join(responses)
    assert list(completion.token_ids) == PROMPT[:2]
    assert [entries(row)[0][0] for row in completion.logprobs] == PROMPT[:2]


async def test_prompt_logprobs_arrive_once_with_the_first_chunk(service: Service) -> None:
    message = request(max_tokens=3, prompt_logprobs=2)
    whole = await service.stub.Generate(message)
    assert [entries(row) for row in whole.prompt_logprobs] == [
        [],
        *(logprob_row(token, i, 2) for i, token in enumerate(PROMPT) if i),
    ]
    call = await begin(service, message)
    responses = []
    for _ in range(3):
        service.scheduler.step()
        responses.append(await call.read())
    assert list(responses[0].prompt_logprobs) == list(whole.prompt_logprobs)
    assert not any(response.prompt_logprobs for response in responses[1:])


async def test_the_first_chunk_waits_for_the_prompts_logprobs(service: Service) -> None:
    """After a lost connection, completion 1 resumes before the prompt's rows arrive again."""
    service.scheduler.automatic = False
    call = await begin(service, request(n=2, prompt_logprobs=0, max_tokens=1))
    await service.reconnect()
    first, second = [await service.scheduler.submits.get() for _ in range(2)]
    assert first.sampling.HasField("prompt_logprobs")
    assert not second.sampling.HasField("prompt_logprobs")
    rows = [logprob_row(token, i, 0) for i, token in enumerate(PROMPT)]
    service.scheduler.send(
        [(second.request, 0, PROMPT[0])],
        ended(second.request),
        [logprob_rows(first.request, True, 1, rows[1:3])],
    )
    await service.scheduler.connection.outbox.join()
    service.scheduler.send((), logprobs=[logprob_rows(first.request, True, 3, rows[3:])])
    response = await call.read()
    assert response.index == 1
    assert [entries(row) for row in response.prompt_logprobs] == [[], *rows[1:]]
    service.scheduler.send([(first.request, 0, PROMPT[0])], ended(first.request))
    (response,) = await rest(call)
    assert (response.index, response.usage.completion_tokens) == (0, 2)


async def test_a_prompt_of_one_token_has_an_empty_row(service: Service) -> None:
    response = await service.stub.Generate(request([300], max_tokens=1, prompt_logprobs=3))
    assert [entries(row) for row in response.prompt_logprobs] == [[]]
    assert not service.scheduler.submits.get_nowait().sampling.HasField("prompt_logprobs")


@pytest.mark.parametrize("asked", ["logprobs", "prompt_logprobs"])
async def test_missing_logprobs_are_an_internal_error(service: Service, asked: str) -> None:
    call = await begin(service, request(**{asked: 1}))
    (number,) = service.scheduler.connection.live
    service.scheduler.send([(number, 0, PROMPT[0])])
    assert (await failure(rest(call))).code() == grpc.StatusCode.INTERNAL
    assert await service.scheduler.aborts.get() == number


async def test_beams_arrive_together_best_first(service: Service, hf: Any) -> None:
    message = request(beam_width=3, max_tokens=4)
    response = await service.stub.Generate(message)
    expected = [[PROMPT[(i + beam) % 5] for i in range(4)] for beam in range(3)]
    assert [list(c.token_ids) for c in response.completions] == expected
    assert [c.text for c in response.completions] == [hf.decode(ids) for ids in expected]
    assert [c.score for c in response.completions] == [-0.5, -1.5, -2.5]
    assert response.usage.completion_tokens == 12
    submit = service.scheduler.submits.get_nowait()
    assert (submit.n, submit.sampling.beam_width, submit.sampling.length_penalty) == (0, 3, 1)
    responses = await service.collect(message)
    assert [join(of_index(responses, i)) for i in range(3)] == list(response.completions)


async def test_beams_are_submitted_as_a_whole_after_a_lost_connection(service: Service) -> None:
    message = request(beam_width=3, max_tokens=4)
    whole = await service.stub.Generate(message)
    call = await begin(service, message)
    await service.reconnect()
    submit = await service.scheduler.submits.get()
    assert submit.resubmitted
    assert (submit.n, submit.sampling.beam_width, submit.generated_ids) == (0, 3, b"")
    assert service.scheduler.submits.empty()
    service.scheduler.step()
    responses = await rest(call)
    assert [join(of_index(responses, i)) for i in range(3)] == list(whole.completions)


RESUMED: list[tuple[str, dict[str, Any]]] = [
    ("naïve 👍🏽 你好!", {"max_tokens": 25}),
    ("👍", {"max_tokens": 5}),  # ends in the middle of a character
    ("Once upon a time", {"stop": ["a time", "never"], "max_tokens": 25}),
    ("Once upon a time", {"stop": ["upon a b"], "max_tokens": 14}),  # ends with text held back
    ("Once upon a time", {"stop": ["e u"], "min_tokens": 9, "max_tokens": 40}),
    ("Once upon a time", {"stop": ["pon"], "include_stop_in_output": True}),
    ("abc<|im_end|>", {}),
    ("abc<|im_end|>", {"include_stop_in_output": True, "skip_special_tokens": False}),
    ("abc", {"stop_token_ids": [67, 68, 69, 70]}),
]


@pytest.mark.parametrize(("text", "sampling"), RESUMED)
async def test_a_resumed_completion_is_the_rest_of_an_uninterrupted_one(
    service: Service, hf: Any, text: str, sampling: dict[str, Any]
) -> None:
    ids = hf(text).input_ids
    message = request(ids, logprobs=1, **sampling)
    whole = await service.stub.Generate(message)
    (completion,) = whole.completions
    count = len(completion.token_ids)
    call = await begin(service, message)
    chunks = []
    for _ in range(count):
        service.scheduler.step()
        chunks.append(await call.read())
    assert join(chunks) == completion

    service.scheduler.automatic = True
    assert service.scheduler.submits.empty()
    for cut in range(1, count):
        resumed = request(ids, completion.token_ids[:cut], logprobs=1, **sampling)
        response = await service.stub.Generate(resumed)
        assert response.completions[0] == join(chunks[cut:]), cut
        assert response.usage.completion_tokens == count, cut
        responses = await service.collect(resumed)
        assert join(responses) == join(chunks[cut:]), cut
        assert responses[0].token_offset == cut
        submit = await service.scheduler.submits.get()
        assert not submit.resubmitted
        assert np.frombuffer(submit.generated_ids, "<i4").tolist() == completion.token_ids[:cut]
        await service.scheduler.submits.get()

    response = await service.stub.Generate(request(ids, completion.token_ids, **sampling))
    (ended,) = response.completions
    assert service.scheduler.submits.empty()
    assert completion.text.endswith(ended.text)
    assert list(ended.token_ids) == []
    assert (ended.finish_reason, ended.stop_reason) == (
        completion.finish_reason,
        completion.stop_reason,
    )
    assert response.usage.completion_tokens == count


async def test_many_unread_tokens_arrive_in_several_chunks(service: Service) -> None:
    await accept_long_sequences(service)
    message = request(max_tokens=1000, logprobs=1)
    whole = await service.stub.Generate(message)
    call = await begin(service, message)
    (number,) = service.scheduler.connection.live
    tokens = list(whole.completions[0].token_ids)
    rows = [logprob_row(token, offset, 1) for offset, token in enumerate(tokens)]
    service.scheduler.send(
        [(number, offset, token) for offset, token in enumerate(tokens)],
        ended(number),
        [logprob_rows(number, False, 0, rows)],
    )
    chunks = await rest(call)
    assert join(chunks) == whole.completions[0]
    assert max(len(chunk.token_ids) for chunk in chunks) <= 128
    assert [bool(chunk.finish_reason) for chunk in chunks] == [False] * (len(chunks) - 1) + [True]
    assert chunks[-1].usage.completion_tokens == 1000
