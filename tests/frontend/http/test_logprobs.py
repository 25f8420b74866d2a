"""Log-probabilities and token ids: an entry per token, whatever the token shows."""

from __future__ import annotations

from typing import Any

import pytest

from tests.frontend.fake_scheduler import ended, logprob_row, logprob_rows
from tests.frontend.http.conftest import E_ACUTE, HttpService, Json, token_request

# "a", both bytes of "é", a special token that the text omits, "b".
IDS = [64, *E_ACUTE, 1534, 65]
BYTES = [[97], [0xC3], [0xA9], [], [98]]
SPECIAL = [*BYTES[:3], list(b"<|im_start|>"), BYTES[4]]
TEXTS = ["a", "\ufffd", "\ufffd", "<|im_start|>", "b"]
RESPONSES = {"include": ["message.output_text.logprobs"], "ignore_eos": True}
CHAT = {"logprobs": True, "ignore_eos": True}


def steered(service: HttpService) -> None:
    """Has the scheduler complete every prompt with IDS."""
    service.scheduler.next_token = lambda live: IDS[len(live.tokens) % len(IDS)]


def check(entries: list[Json], expected: list[list[int]] = BYTES) -> None:
    assert [entry["bytes"] for entry in entries] == expected
    assert [entry["token"] for entry in entries] == TEXTS
    assert [entry["logprob"] for entry in entries] == [-0.25 - i for i in range(5)]


@pytest.mark.parametrize("skip", [True, False])
async def test_a_chat_has_an_entry_per_token(service: HttpService, skip: bool) -> None:
    steered(service)
    body = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 5, **CHAT}
    body |= {"skip_special_tokens": skip}
    whole = await service.post("/v1/chat/completions", body)
    expected = BYTES if skip else SPECIAL
    check(whole["choices"][0]["logprobs"]["content"], expected)
    text = "aéb" if skip else "aé<|im_start|>b"
    assert whole["choices"][0]["message"]["content"] == text
    async with service.opened("/v1/chat/completions", body) as lines:
        for _ in range(5):
            await service.step()
        *events, _ = await lines.rest()
    parts = [choice for event in events for choice in event["choices"]]
    check([entry for part in parts for entry in part["logprobs"]["content"]], expected)
    assert "".join(part["delta"].get("content", "") for part in parts) == text


async def test_likeliest_tokens_come_in_their_order(service: HttpService) -> None:
    steered(service)
    body = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 1, **CHAT}
    whole = await service.post("/v1/chat/completions", {**body, "top_logprobs": 2})
    (entry,) = whole["choices"][0]["logprobs"]["content"]
    assert entry == {
        "token": "a",
        "logprob": -0.25,
        "bytes": [97],
        "top_logprobs": [
            {"token": "!", "logprob": 0.0, "bytes": [33]},
            {"token": '"', "logprob": -0.5, "bytes": [34]},
        ],
    }


async def test_a_completion_has_a_column_entry_per_token(service: HttpService) -> None:
    body = {"prompt": IDS, "max_tokens": 5, "logprobs": 1, "ignore_eos": True}
    whole = await service.post("/v1/completions", body)
    columns = whole["choices"][0]["logprobs"]
    assert columns["tokens"] == TEXTS
    assert columns["token_logprobs"] == [-0.25 - i for i in range(5)]
    answer = await service.stub.Generate(
        token_request(IDS, max_tokens=5, logprobs=1, ignore_eos=True)
    )
    rows = answer.completions[0].logprobs
    assert [bytes(row.entries[0].token) for row in rows] == [bytes(each) for each in SPECIAL]
    assert [row.entries[0].logprob for row in rows] == columns["token_logprobs"]
    assert columns["top_logprobs"][0] == {"a": -0.25, "!": 0.0}


async def _columns(service: HttpService, ids: list[int], *, at_once: bool) -> tuple[Json, str]:
    """The log-probabilities and the text of a stream whose tokens come at once, or one by one."""
    columns: Json = {}
    body: Json = {"prompt": ids, "max_tokens": len(ids), "logprobs": 0}
    async with service.opened("/v1/completions", body) as lines:
        number, rows = lines.number, [logprob_row(token, i, 0) for i, token in enumerate(ids)]
        if at_once:
            tokens = [(number, i, token) for i, token in enumerate(ids)]
            scored = [logprob_rows(number, False, 0, rows)]
            service.scheduler.send(tokens, ended(number), scored)
            events = await lines.rest()
        else:
            events = []
            for _ in ids:
                await service.step()
                events += await lines.next()
    choices = [event["choices"][0] for event in events if event != "[DONE]"]
    for choice in choices:
        for name, values in choice["logprobs"].items():
            columns.setdefault(name, []).extend(values)
    return columns, "".join(choice["text"] for choice in choices)


@pytest.mark.parametrize(
    ("ids", "offsets"),
    [
        ([64, 65, 1123], [0, 1, 2]),
        ([*E_ACUTE, 64], [0, 0, 1]),
        ([1534, 64], [0, 0]),
    ],
)
async def test_offsets_are_places_in_the_text(
    service: HttpService, ids: list[int], offsets: list[int]
) -> None:
    by_step, text = await _columns(service, ids, at_once=False)
    assert by_step["text_offset"] == offsets
    assert await _columns(service, ids, at_once=True) == (by_step, text)


async def test_tokens_can_be_written_as_their_ids(service: HttpService) -> None:
    steered(service)
    written = [f"token_id:{token_id}" for token_id in IDS]
    body: Json = {"max_tokens": 5, "return_tokens_as_token_ids": True, "ignore_eos": True}
    whole = await service.post("/v1/completions", {**body, "prompt": "hi", "logprobs": 1})
    assert whole["choices"][0]["logprobs"]["tokens"] == written
    assert "token_id:0" in whole["choices"][0]["logprobs"]["top_logprobs"][0]
    messages = [{"role": "user", "content": "hi"}]
    whole = await service.post(
        "/v1/chat/completions", {**body, "messages": messages, "logprobs": True}
    )
    entries = whole["choices"][0]["logprobs"]["content"]
    assert [entry["token"] for entry in entries] == written
    assert [entry["bytes"] for entry in entries] == BYTES


def _entries(response: Json) -> list[Json]:
    return [
        entry
        for item in response["output"]
        for part in item["content"]
        for entry in part["logprobs"]
    ]


async def _response(service: HttpService, streams: bool) -> Json:
    body: Json = {"input": "hi", "max_output_tokens": 5, **RESPONSES}
    if not streams:
        return await service.post("/v1/responses", body)
    async with service.opened("/v1/responses", body) as lines:
        for _ in range(5):
            await service.step()
        events = await lines.rest()
    deltas = [each for each in events if each["type"] == "response.output_text.delta"]
    response: Json = events[-1]["response"]
    assert [entry for each in deltas for entry in each["logprobs"]] == _entries(response)
    return response


@pytest.mark.parametrize("streams", [False, True])
async def test_a_response_has_an_entry_per_token(service: HttpService, streams: bool) -> None:
    steered(service)
    check(_entries(await _response(service, streams)))


async def test_a_response_that_begins_within_a_character_has_all_entries(
    service: HttpService,
) -> None:
    ids = [*E_ACUTE, 64, 65, 66]
    service.scheduler.next_token = lambda live: ids[len(live.tokens)]
    entries: Any = _entries(await _response(service, True))
    assert [entry["bytes"] for entry in entries] == [[0xC3], [0xA9], [97], [98], [99]]


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
async def test_impossible_tokens_have_the_least_number_that_json_can_hold(
    service: HttpService, path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "tests.frontend.fake_scheduler.logprob_row",
        lambda token, position, count: [(token, float("-inf"))],
    )
    if path == "/v1/completions":
        whole = await service.post(path, {"prompt": "hi", "max_tokens": 1, "logprobs": 0})
        assert whole["choices"][0]["logprobs"]["token_logprobs"] == [-9999.0]
        return
    body = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 1, "logprobs": True}
    whole = await service.post(path, body)
    assert whole["choices"][0]["logprobs"]["content"][0]["logprob"] == -9999.0
