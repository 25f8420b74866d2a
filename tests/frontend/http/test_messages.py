"""Anthropic's messages: whole and streamed, and as gRPC has them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from nano_vllm_grpc.pb import frontend_pb2 as pb
from tests.frontend.fake_scheduler import CACHED_PROMPT_TOKENS
from tests.frontend.http.conftest import HttpService, Json, chat_request

PATH = "/v1/messages"
MESSAGES = [{"role": "user", "content": "Once upon a time, 你好!"}]


def join(events: Sequence[Any]) -> Json:
    """The message that a stream makes, by Anthropic's rules."""
    assert events[0]["type"] == "message_start"
    assert events[-1]["type"] == "message_stop"
    message: Json = events[0]["message"]
    is_open = False
    for event in events[1:-1]:
        match event["type"]:
            case "content_block_start":
                assert not is_open
                assert event["index"] == len(message["content"])
                is_open = True
                message["content"].append(event["content_block"])
            case "content_block_delta":
                assert is_open
                assert event["index"] == len(message["content"]) - 1
                assert event["delta"]["type"] == "text_delta"
                message["content"][-1]["text"] += event["delta"]["text"]
            case "content_block_stop":
                assert is_open
                is_open = False
            case "message_delta":
                assert not is_open
                message |= event["delta"]
                message["usage"] |= event["usage"]
            case kind:
                raise AssertionError(kind)
    return message


@pytest.mark.parametrize(
    ("body", "grpc", "reason", "sequence"),
    [
        ({"max_tokens": 20, "ignore_eos": True}, {}, "max_tokens", None),
        ({"max_tokens": 90}, {}, "end_turn", None),
        (
            {"max_tokens": 9, "stop_sequences": ["upon"]},
            {"stop": ["upon"]},
            "stop_sequence",
            "upon",
        ),
        ({"max_tokens": 9, "stop": "upon"}, {"stop": ["upon"]}, "stop_sequence", "upon"),
        ({"max_tokens": 9, "stop_token_ids": [198]}, {}, "end_turn", None),
        ({"max_tokens": 1}, {}, "max_tokens", None),  # whose text is empty
    ],
)
async def test_whole_and_streamed_answers_say_what_grpc_says(
    service: HttpService, body: Json, grpc: Json, reason: str, sequence: str | None
) -> None:
    body = {"messages": MESSAGES, "model": "demo", **body}
    sampling = {
        name: body[name] for name in ("max_tokens", "ignore_eos", "stop_token_ids") if name in body
    }
    answer = await service.stub.Generate(chat_request(MESSAGES, **sampling, **grpc))
    (expected,) = answer.completions
    whole = await service.post(PATH, body, **{"X-Request-Id": "mine"})
    assert whole == {
        "id": "msg_mine",
        "type": "message",
        "role": "assistant",
        "model": "demo",
        "content": [{"type": "text", "text": expected.text}] if expected.text else [],
        "stop_reason": reason,
        "stop_sequence": sequence,
        "usage": {
            "input_tokens": answer.usage.prompt_tokens,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": 0,
            "output_tokens": answer.usage.completion_tokens,
        },
    }
    events = await service.events(PATH, body, **{"X-Request-Id": "mine"})
    assert events[0]["message"]["usage"]["output_tokens"] == 0
    assert events[0]["message"]["content"] == []
    assert join(events) == whole


async def test_events_come_step_by_step(service: HttpService) -> None:
    async with service.opened(PATH, {"messages": MESSAGES, "max_tokens": 3}) as lines:
        await service.step()
        assert [event["type"] for event in await lines.next()] == ["message_start"]
        await service.step()
        begin, delta = await lines.next()
        assert begin["content_block"] == {"type": "text", "text": ""}
        assert delta["delta"] == {"type": "text_delta", "text": "u"}
        await service.step()
        delta, *rest = await lines.rest()
        assert delta["delta"]["text"] == "ser"
        kinds = ["content_block_stop", "message_delta", "message_stop"]
        assert [event["type"] for event in rest] == kinds


@pytest.mark.parametrize("changes", [{"report_cached_tokens": True}])
async def test_cached_tokens_are_no_input_tokens(service: HttpService) -> None:
    whole = await service.post(PATH, {"messages": MESSAGES, "max_tokens": 1})
    counted = await service.post(f"{PATH}/count_tokens", {"messages": MESSAGES})
    usage = whole["usage"]
    assert usage["cache_read_input_tokens"] == CACHED_PROMPT_TOKENS
    assert usage["input_tokens"] + CACHED_PROMPT_TOKENS == counted["input_tokens"]


async def test_tokens_are_counted_as_grpc_has_them(service: HttpService) -> None:
    body = {"messages": MESSAGES, "system": "Be brief.", "model": "demo"}
    counted = await service.post(f"{PATH}/count_tokens", body)
    chat = chat_request([{"role": "system", "content": "Be brief."}, *MESSAGES]).chat
    tokenized = await service.stub.Tokenize(pb.TokenizeRequest(chat=chat))
    assert counted == {"input_tokens": len(tokenized.token_ids)}


@pytest.mark.parametrize("wrong", [{"n": 2}, {"use_beam_search": True}])
async def test_a_message_has_one_completion(service: HttpService, wrong: Json) -> None:
    body = {"messages": MESSAGES, "max_tokens": 1, **wrong}
    status, error = await service.error(PATH, body)
    assert (status, error["error"]["type"]) == (400, "invalid_request_error")


async def test_the_assistants_last_message_is_continued(service: HttpService) -> None:
    messages = [*MESSAGES, {"role": "assistant", "content": "It was"}]
    await service.post(PATH, {"messages": messages, "max_tokens": 1})
    submit = service.scheduler.submits.get_nowait()
    await service.post(
        "/v1/chat/completions",
        {"messages": messages, "max_tokens": 1, "continue_final_message": True},
    )
    assert submit.prompt_ids == service.scheduler.submits.get_nowait().prompt_ids
