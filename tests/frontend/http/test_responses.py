"""OpenAI's responses that are not stored: whole and streamed, and as gRPC has them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from tests.frontend.http.conftest import HttpService, Json, chat_request

PATH = "/v1/responses"
TEXT = "Once upon a time, 你好!"
MESSAGES = [{"role": "user", "content": TEXT}]


def check_stream(events: Sequence[Any]) -> Json:
    """The response with which a stream ends; all events before must lead to it."""
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    assert [event["type"] for event in events[:2]] == ["response.created", "response.in_progress"]
    final: Json = events[-1]["response"]
    assert events[-1]["type"] == f"response.{final['status']}"
    for index, item in enumerate(final["output"]):
        of_item = [event for event in events if event.get("output_index") == index]
        kinds = [event["type"] for event in of_item]
        assert kinds[:2] == ["response.output_item.added", "response.content_part.added"]
        assert kinds[-3:] == [
            "response.output_text.done",
            "response.content_part.done",
            "response.output_item.done",
        ]
        assert set(kinds[2:-3]) == {"response.output_text.delta"}
        text = "".join(event["delta"] for event in of_item[2:-3])
        assert item["content"][0]["text"] == text == of_item[-3]["text"]
        assert of_item[0]["item"]["content"] == []
        assert of_item[-1]["item"] == item
        assert {event.get("item_id", item["id"]) for event in of_item} == {item["id"]}
    return final


def without_ids(response: Json) -> Json:
    items = [item | {"id": ""} for item in response["output"]]
    return response | {"id": "", "created_at": 0, "output": items}


@pytest.mark.parametrize(
    ("body", "grpc", "status"),
    [
        ({"max_output_tokens": 20, "ignore_eos": True}, {"max_tokens": 20}, "incomplete"),
        ({"max_output_tokens": 90}, {"max_tokens": 90}, "completed"),
        ({"stop": ["upon"]}, {"stop": ["upon"]}, "completed"),
        ({"max_output_tokens": 9, "stop_token_ids": [198]}, {"max_tokens": 9}, "completed"),
    ],
)
async def test_whole_and_streamed_answers_say_what_grpc_says(
    service: HttpService, body: Json, grpc: Json, status: str
) -> None:
    body = {"input": TEXT, "model": "demo", "metadata": {"a": "b"}, **body}
    same = {name: body[name] for name in ("ignore_eos", "stop_token_ids") if name in body}
    answer = await service.stub.Generate(chat_request(MESSAGES, **same, **grpc))
    (expected,) = answer.completions
    whole = await service.post(PATH, body)
    assert whole["status"] == status
    (item,) = whole["output"]
    assert (item["type"], item["role"], item["status"]) == ("message", "assistant", status)
    assert item["content"] == [
        {"type": "output_text", "text": expected.text, "annotations": [], "logprobs": []}
    ]
    reason = {"reason": "max_output_tokens"} if status == "incomplete" else None
    assert whole["incomplete_details"] == reason
    assert whole["usage"] == {
        "input_tokens": answer.usage.prompt_tokens,
        "input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0},
        "output_tokens": answer.usage.completion_tokens,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": answer.usage.prompt_tokens + answer.usage.completion_tokens,
    }
    assert whole["object"] == "response"
    assert whole["error"] is None
    assert whole["metadata"] == {"a": "b"}
    assert whole["temperature"] == pytest.approx(0.6)  # of generation_config.json
    assert not whole["store"]
    streamed = check_stream(await service.events(PATH, body))
    assert without_ids(streamed) == without_ids(whole)


async def test_events_come_step_by_step(service: HttpService) -> None:
    async with service.opened(PATH, {"input": TEXT, "max_output_tokens": 3}) as lines:
        await service.step()
        begin = [event["type"] for event in await lines.next()]
        assert begin == ["response.created", "response.in_progress"]
        await service.step()
        assert [event.get("delta") for event in await lines.next()] == [None, None, "u"]
        await service.step()
        delta, *rest = await lines.rest()
        assert delta["delta"] == "ser"
        assert rest[-1]["type"] == "response.incomplete"


async def test_a_request_id_is_used(service: HttpService) -> None:
    body = {"input": "hi", "max_output_tokens": 1}
    response = await service.http.post(PATH, json=body, headers={"X-Request-Id": "mine"})
    assert response.headers["x-request-id"] == "mine"
    assert service.scheduler.submits.get_nowait().request_id == "mine"


@pytest.mark.parametrize(
    ("wrong", "param"),
    [
        ({"n": 2}, "n"),
        ({"use_beam_search": True}, "use_beam_search"),
        ({"resume_token_ids": [1]}, "resume_token_ids"),
        ({"return_token_ids": True}, "return_token_ids"),
        ({"prompt_logprobs": 0}, "prompt_logprobs"),
        ({"response_format": {"type": "json_object"}}, "response_format"),
        ({"include": ["file_search_call.results"]}, "include"),
        ({"top_logprobs": 1}, "top_logprobs"),
        ({"truncation": "auto"}, "truncation"),
        ({"previous_response_id": "resp_1"}, "previous_response_id"),
        ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
        ({"reasoning": {"effort": "high"}}, "reasoning.effort"),
    ],
)
async def test_what_a_response_does_not_have_is_an_error(
    service: HttpService, wrong: Json, param: str
) -> None:
    status, error = await service.error(PATH, {"input": "hi", **wrong})
    assert (status, error["error"]["param"]) == (400, param)
