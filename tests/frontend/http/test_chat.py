"""OpenAI's chat completions: whole and streamed, and as gRPC has them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from nano_vllm_grpc.pb import frontend_pb2 as pb
from tests.frontend.fake_scheduler import echo_from_seed
from tests.frontend.http.conftest import REASONS, HttpService, Json, chat_request

PATH = "/v1/chat/completions"
MESSAGES = [{"role": "user", "content": "Once upon a time, 你好!"}]
USAGE = {"stream_options": {"include_usage": True}}


def join(events: Sequence[Any]) -> dict[int, Json]:
    """The choices of a stream, joined by index, as a whole answer has them."""
    assert events[-1] == "[DONE]"
    choices: dict[int, Json] = {}
    for event in events[:-1]:
        assert event["object"] == "chat.completion.chunk"
        for part in event["choices"]:
            if part["index"] not in choices:
                assert part["delta"]["role"] == "assistant"
                choices[part["index"]] = {
                    "index": part["index"],
                    "message": {"role": "assistant", "content": "", "refusal": None},
                    "logprobs": None,
                    "token_ids": [],
                }
            else:
                assert "role" not in part["delta"]
            known = choices[part["index"]]
            known["message"]["content"] += part["delta"].get("content", "")
            known["token_ids"] += part["token_ids"] or []
            if part["logprobs"]:
                known["logprobs"] = known["logprobs"] or {"content": []}
                known["logprobs"]["content"] += part["logprobs"]["content"]
            known |= {name: part[name] for name in ("finish_reason", "stop_reason")}
    return choices


async def test_an_answer_is_that_of_grpc(service: HttpService) -> None:
    body = {"messages": MESSAGES, "max_tokens": 40, "ignore_eos": True, "model": "demo"}
    whole = await service.post(PATH, {**body, "return_token_ids": True})
    answer = await service.stub.Generate(chat_request(MESSAGES, max_tokens=40, ignore_eos=True))
    (expected,), (choice,) = answer.completions, whole["choices"]
    assert choice == {
        "index": 0,
        "message": {"role": "assistant", "content": expected.text, "refusal": None},
        "logprobs": None,
        "finish_reason": "length",
        "stop_reason": None,
        "token_ids": list(expected.token_ids),
    }
    tokenized = await service.stub.Tokenize(pb.TokenizeRequest(chat=chat_request(MESSAGES).chat))
    assert whole["prompt_token_ids"] == list(tokenized.token_ids)
    assert whole["usage"] == {
        "prompt_tokens": len(tokenized.token_ids),
        "completion_tokens": 40,
        "total_tokens": len(tokenized.token_ids) + 40,
        "prompt_tokens_details": None,
    }
    assert whole["object"] == "chat.completion"
    assert whole["model"] == "demo"


@pytest.mark.parametrize(
    ("sampling", "grpc"),
    [
        ({}, {}),
        ({"max_completion_tokens": 5}, {"max_tokens": 5}),
        ({"max_completion_tokens": 5, "max_tokens": 9}, {"max_tokens": 5}),
        ({"logprobs": True}, {"logprobs": 0}),
        ({"logprobs": True, "top_logprobs": 3}, {"logprobs": 3}),
        ({"logprobs": True, "top_logprobs": 1, "n": 3}, {"logprobs": 1, "n": 3}),
        ({"stop": ["upon"]}, {"stop": ["upon"]}),
        ({"stop": "upon", "include_stop_str_in_output": True}, None),
        ({"stop_token_ids": [1534], "min_tokens": 2}, None),
        ({"ignore_eos": True, "skip_special_tokens": False}, None),
        ({"n": 2, "use_beam_search": True, "temperature": 0}, {"beam_width": 2, "temperature": 0}),
    ],
)
async def test_whole_and_streamed_answers_say_what_grpc_says(
    service: HttpService, sampling: Json, grpc: Json | None
) -> None:
    service.scheduler.next_token = echo_from_seed
    if grpc is None:
        names = {"include_stop_str_in_output": "include_stop_in_output"}
        grpc = {names.get(name, name): value for name, value in sampling.items()}
        grpc |= {"stop": [sampling["stop"]]} if "stop" in sampling else {}
    if "beam_width" not in grpc:
        sampling, grpc = {"seed": 1, **sampling}, {"seed": 1, **grpc}
    body = {"messages": MESSAGES, "max_tokens": 30, "return_token_ids": True, **sampling}
    answer = await service.stub.Generate(chat_request(MESSAGES, **{"max_tokens": 30, **grpc}))
    whole = await service.post(PATH, body)
    events = await service.events(PATH, {**body, **USAGE})
    streamed = join(events)
    assert len(whole["choices"]) == len(answer.completions) == len(streamed)
    for choice, expected in zip(whole["choices"], answer.completions, strict=True):
        assert choice["message"]["content"] == expected.text
        assert choice["token_ids"] == list(expected.token_ids)
        assert choice["finish_reason"] == REASONS[expected.finish_reason]
        assert str(choice["stop_reason"] or "") == expected.stop_reason
        rows = (choice["logprobs"] or {}).get("content", [])
        assert [row["logprob"] for row in rows] == [
            row.entries[0].logprob for row in expected.logprobs
        ]
        assert streamed[choice["index"]] == choice
    assert events[-2]["choices"] == []
    assert events[-2]["usage"] == whole["usage"]
    assert whole["usage"]["completion_tokens"] == answer.usage.completion_tokens
    assert all(event["usage"] is None for event in events[:-2])
    with_prompt = [event for event in events[:-1] if "prompt_token_ids" in event]
    assert [event["prompt_token_ids"] for event in with_prompt] == [whole["prompt_token_ids"]]


async def test_an_answer_resumes_where_it_was_cut(service: HttpService) -> None:
    body = {"messages": MESSAGES, "max_tokens": 30, "return_token_ids": True, "ignore_eos": True}
    whole = await service.post(PATH, body)
    (choice,) = whole["choices"]
    content, token_ids = choice["message"]["content"], choice["token_ids"]
    for cut in (1, 7, 11, 12, 29, 30):  # also within the bytes of a character
        resumed = {**body, "resume_token_ids": token_ids[:cut]}
        again = await service.post(PATH, resumed)
        streamed = join(await service.events(PATH, resumed))
        for (found,) in (again["choices"], streamed.values()):
            text = found["message"]["content"]
            assert content.endswith(text)
            assert bool(text) == (cut < 30)
            assert found["token_ids"] == token_ids[cut:]
            assert found["finish_reason"] == "length"
        grpc = chat_request(MESSAGES, max_tokens=30, ignore_eos=True)
        grpc.resume_token_ids.extend(token_ids[:cut])
        (expected,) = (await service.stub.Generate(grpc)).completions
        assert again["choices"][0]["message"]["content"] == expected.text
        assert again["usage"] == whole["usage"]


async def test_a_stream_has_a_chunk_per_step_with_text(service: HttpService) -> None:
    body = {"messages": MESSAGES, "max_tokens": 3, "stream_options": {"include_usage": False}}
    async with service.opened(PATH, body) as lines:
        await service.step()  # the mark of a message, which does not show
        (first,) = await lines.next()
        await service.step()
        (second,) = await lines.next()
        await service.step()
        events = await lines.rest()
    deltas = [event["choices"][0]["delta"] for event in (first, second, events[0])]
    assert deltas == [{"role": "assistant", "content": ""}, {"content": "u"}, {"content": "ser"}]
    assert events[1:] == ["[DONE]"]
    assert "usage" not in first


async def test_usage_can_come_with_every_chunk(service: HttpService) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    body = {"messages": MESSAGES, "max_tokens": 4, "stream_options": options}
    events = await service.events(PATH, body)
    assert all(event["usage"]["prompt_tokens"] > 0 for event in events[:-1])
    assert events[-2]["usage"]["completion_tokens"] == 4


async def test_the_last_message_can_be_continued(service: HttpService) -> None:
    messages = [*MESSAGES, {"role": "assistant", "content": "It was"}]
    body = {
        "messages": messages,
        "continue_final_message": True,
        "add_generation_prompt": False,
        "return_token_ids": True,
        "max_tokens": 2,
    }
    whole = await service.post(PATH, body)
    chat = chat_request(messages).chat
    chat.continue_final_message = True
    tokenized = await service.stub.Tokenize(pb.TokenizeRequest(chat=chat))
    assert whole["prompt_token_ids"] == list(tokenized.token_ids)
    text = (await service.stub.Detokenize(pb.DetokenizeRequest(token_ids=tokenized.token_ids))).text
    assert text.endswith("It was")


@pytest.mark.parametrize("continues", [False, True])
async def test_continuing_contradicts_a_new_answer(service: HttpService, continues: bool) -> None:
    body = {"messages": MESSAGES, "continue_final_message": continues}
    status, error = await service.error(PATH, {**body, "add_generation_prompt": continues})
    assert status == 400
    assert error["error"]["param"] == "add_generation_prompt"


async def test_prompt_log_probabilities_come_once(service: HttpService) -> None:
    body = {"messages": MESSAGES, "max_tokens": 4, "prompt_logprobs": 1, "n": 2}
    whole = await service.post(PATH, body)
    events = await service.events(PATH, body)
    found = [event["prompt_logprobs"] for event in events[:-1] if "prompt_logprobs" in event]
    assert found == [whole["prompt_logprobs"]]
    grpc = chat_request(MESSAGES, max_tokens=4, prompt_logprobs=1, n=2)
    answer = await service.stub.Generate(grpc)
    assert len(found[0]) == len(answer.prompt_logprobs)
    assert [
        {str(entry.token_id): entry.logprob for entry in row.entries}
        for row in answer.prompt_logprobs[1:]
    ] == [{key: value["logprob"] for key, value in row.items()} for row in found[0][1:]]


async def test_a_request_id_is_used_and_echoed(service: HttpService) -> None:
    body = {"messages": MESSAGES, "max_tokens": 1, "request_id": "of-the-body"}
    response = await service.http.post(PATH, json=body, headers={"X-Request-Id": "a-header"})
    assert response.headers["x-request-id"] == "a-header"
    assert response.json()["id"] == "chatcmpl-a-header"
    assert service.scheduler.submits.get_nowait().request_id == "a-header"
    assert (await service.post(PATH, body))["id"] == "chatcmpl-of-the-body"
    for wrong in ("x" * 257, "a\tb"):
        status, error = await service.error(PATH, body, **{"X-Request-Id": wrong})
        assert (status, error["error"]["param"]) == (400, "X-Request-Id")


async def test_the_context_is_cut_to_the_last_tokens(service: HttpService) -> None:
    body = {"messages": [{"role": "user", "content": "a b c " * 200}], "max_tokens": 8}
    status, error = await service.error(PATH, body)
    assert (status, error["error"]["param"]) == (400, "messages")
    body["return_token_ids"] = True
    for keep, length in ((-1, 120), (5, 5), (4096, 120)):
        whole = await service.post(PATH, {**body, "truncate_prompt_tokens": keep})
        assert len(whole["prompt_token_ids"]) == length
        assert whole["usage"]["completion_tokens"] == 8


async def test_reasoning_effort_needs_a_template_that_reads_it(service: HttpService) -> None:
    body = {"messages": MESSAGES, "max_tokens": 1}
    assert await service.post(PATH, {**body, "reasoning_effort": "none"})
    status, error = await service.error(PATH, {**body, "reasoning_effort": "high"})
    assert (status, error["error"]["param"]) == (400, "reasoning_effort")
