"""OpenAI's completions: whole and streamed, one and several prompts, and as gRPC has them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from nano_vllm_grpc.pb import frontend_pb2 as pb
from tests.frontend.fake_scheduler import CACHED_PROMPT_TOKENS, echo_from_seed
from tests.frontend.http.conftest import (
    E_ACUTE,
    PROMPT,
    REASONS,
    HttpService,
    Json,
    token_request,
)

PATH = "/v1/completions"


def join(events: Sequence[Any]) -> dict[int, Json]:
    """The choices of a stream, joined by index, as a whole answer has them."""
    assert events[-1] == "[DONE]"
    choices: dict[int, Json] = {}
    for event in events[:-1]:
        assert event["object"] == "text_completion"
        for part in event["choices"]:
            known = choices.setdefault(part["index"], {**part, "text": "", "token_ids": []})
            known["text"] += part["text"]
            known["token_ids"] += part.get("token_ids") or []
            if part["logprobs"] and part["logprobs"] is not known["logprobs"]:
                for name, values in part["logprobs"].items():
                    known["logprobs"][name] += values
            known |= {name: part[name] for name in ("finish_reason", "stop_reason")}
    return choices


async def test_a_completion_is_that_of_grpc(service: HttpService) -> None:
    body = {"prompt": PROMPT, "max_tokens": 7, "return_token_ids": True, "model": "demo"}
    whole = await service.post(PATH, body)
    (expected,) = (await service.stub.Generate(token_request(max_tokens=7))).completions
    (choice,) = whole["choices"]
    assert choice == {
        "index": 0,
        "text": expected.text,
        "logprobs": None,
        "finish_reason": "length",
        "stop_reason": None,
        "token_ids": [105, 300, 511, 600, 42, 105, 300],
        "prompt_token_ids": PROMPT,
    }
    assert choice["token_ids"] == list(expected.token_ids)
    assert whole["usage"] == {
        "prompt_tokens": 5,
        "completion_tokens": 7,
        "total_tokens": 12,
        "prompt_tokens_details": None,
    }
    assert whole["object"] == "text_completion"
    assert whole["model"] == "demo"
    assert whole["id"].startswith("cmpl-")


@pytest.mark.parametrize(
    ("sampling", "grpc"),
    [
        ({}, {}),
        ({"logprobs": 2}, {"logprobs": 2}),
        ({"logprobs": 0, "n": 3, "seed": 1}, {"logprobs": 0, "n": 3, "seed": 1}),
        ({"stop": [" prov"]}, {"stop": [" prov"]}),
        ({"stop": " prov", "include_stop_str_in_output": True}, None),
        ({"stop": "K", "min_tokens": 7}, {"stop": ["K"], "min_tokens": 7}),
        ({"stop": "K", "min_tokens": 3}, {"stop": ["K"], "min_tokens": 3}),
        ({"stop_token_ids": [511]}, {"stop_token_ids": [511]}),
        ({"stop_token_ids": [105], "min_tokens": 2}, None),
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
    sampling = {"seed": 0, **sampling} if "use_beam_search" not in sampling else sampling
    grpc = {"seed": 0, **grpc} if "beam_width" not in grpc else grpc
    body = {"prompt": PROMPT, "max_tokens": 8, "return_token_ids": True, **sampling}
    answer = await service.stub.Generate(token_request(max_tokens=8, **grpc))
    whole = await service.post(PATH, body)
    events = await service.events(PATH, {**body, "stream_options": {"include_usage": True}})
    streamed = join(events)
    assert len(whole["choices"]) == len(answer.completions) == len(streamed)
    for choice, expected in zip(whole["choices"], answer.completions, strict=True):
        assert choice["text"] == expected.text
        assert choice["token_ids"] == list(expected.token_ids)
        assert choice["finish_reason"] == REASONS[expected.finish_reason]
        assert str(choice["stop_reason"] or "") == expected.stop_reason
        rows = (choice["logprobs"] or {}).get("token_logprobs", [])
        assert rows == [row.entries[0].logprob for row in expected.logprobs]
        part = streamed[choice["index"]]
        part.pop("prompt_token_ids", None)
        choice.pop("prompt_token_ids", None)
        assert part == choice
    usage = {key: whole["usage"][key] for key in ("prompt_tokens", "completion_tokens")}
    assert usage == {
        "prompt_tokens": answer.usage.prompt_tokens,
        "completion_tokens": answer.usage.completion_tokens,
    }
    assert events[-2]["choices"] == []
    assert events[-2]["usage"] == whole["usage"]
    assert all(event["usage"] is None for event in events[:-2])


async def test_a_stop_string_counts_only_after_min_tokens(service: HttpService) -> None:
    body = {"prompt": [64, 65, 66], "stop": ["b"], "max_tokens": 9}
    first = await service.post(PATH, body)
    later = await service.post(PATH, {**body, "min_tokens": 2})
    assert [c["text"] for c in first["choices"]] == ["a"]
    assert [c["text"] for c in later["choices"]] == ["abca"]
    assert later["choices"][0]["stop_reason"] == "b"
    assert later["usage"]["completion_tokens"] == 5


async def test_a_stop_token_is_the_stop_reason_as_a_number(service: HttpService) -> None:
    (choice,) = (
        await service.post(PATH, {"prompt": PROMPT, "stop_token_ids": [511], "max_tokens": 9})
    )["choices"]
    assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", 511)


@pytest.mark.parametrize("changes", [{"report_cached_tokens": True}])
async def test_cached_tokens_are_reported_if_the_setting_asks_for_it(service: HttpService) -> None:
    usage = (await service.post(PATH, {"prompt": PROMPT}))["usage"]
    assert usage["prompt_tokens_details"] == {"cached_tokens": CACHED_PROMPT_TOKENS}
    assert usage["completion_tokens"] == 16  # OpenAI's default


@pytest.mark.parametrize(
    "prompts", [["hi", "a time"], [PROMPT, [64, 65]], [[64, 65], [127], PROMPT]]
)
async def test_several_prompts_have_n_choices_each(service: HttpService, prompts: Any) -> None:
    service.scheduler.next_token = echo_from_seed
    body = {"max_tokens": 4, "seed": 3, "n": 2, "return_token_ids": True}
    alone = [await service.post(PATH, {**body, "prompt": prompt}) for prompt in prompts]
    together = await service.post(PATH, {**body, "prompt": prompts})
    streamed = join(await service.events(PATH, {**body, "prompt": prompts}))
    expected = [choice for each in alone for choice in each["choices"]]
    for index, choice in enumerate(expected):
        choice["index"] = index
        assert streamed[index] == choice
    assert together["choices"] == expected
    for name in ("prompt_tokens", "completion_tokens", "total_tokens"):
        assert together["usage"][name] == sum(each["usage"][name] for each in alone)


@pytest.mark.parametrize(
    ("prompt", "text"), [("hi time", "hi time"), ([1123, 436], "hi time"), (E_ACUTE, "é")]
)
async def test_echo_puts_the_prompt_before_the_completion(
    service: HttpService, prompt: Any, text: str
) -> None:
    body = {"prompt": prompt, "max_tokens": 2, "echo": True}
    whole = await service.post(PATH, body)
    assert whole["choices"][0]["text"] == 2 * text
    streamed = join(await service.events(PATH, body))
    assert streamed[0]["text"] == 2 * text


async def test_echo_without_new_tokens_scores_the_prompt(service: HttpService) -> None:
    body = {"prompt": [64, 65, 66], "max_tokens": 0, "echo": True, "logprobs": 1}
    body["return_token_ids"] = True
    for choice, usage in (
        await _whole(service, body),
        await _streamed(service, body),
    ):
        assert choice["text"] == "abc"
        assert choice["token_ids"] == []
        assert choice["finish_reason"] == "length"
        assert choice["logprobs"] == {
            "text_offset": [0, 1, 2],
            "token_logprobs": [None, -1.25, -2.25],  # of the fake scheduler, by position
            "tokens": ["a", "b", "c"],
            "top_logprobs": [None, {"b": -1.25, "!": -1.0}, {"c": -2.25, "!": -2.0}],
        }
        assert usage["prompt_tokens"] == usage["total_tokens"] == 3
        assert usage["completion_tokens"] == 0


async def _whole(service: HttpService, body: Json) -> tuple[Json, Json]:
    whole = await service.post(PATH, body)
    return whole["choices"][0], whole["usage"]


async def _streamed(service: HttpService, body: Json) -> tuple[Json, Json]:
    events = await service.events(PATH, {**body, "stream_options": {"include_usage": True}})
    return join(events)[0], events[-2]["usage"]


async def test_echoed_log_probabilities_come_before_those_of_the_completion(
    service: HttpService,
) -> None:
    body = {"prompt": [64, 65], "max_tokens": 2, "echo": True, "logprobs": 0}
    for choice, _ in (await _whole(service, body), await _streamed(service, body)):
        assert choice["text"] == "abab"
        assert choice["logprobs"]["tokens"] == ["a", "b", "a", "b"]
        assert choice["logprobs"]["text_offset"] == [0, 1, 2, 3]
        assert choice["logprobs"]["token_logprobs"] == [None, -1.25, -0.25, -1.25]


async def test_every_echoed_choice_has_the_log_probabilities_of_the_prompt(
    service: HttpService,
) -> None:
    body = {"prompt": [64, 65], "max_tokens": 1, "echo": True, "logprobs": 0, "n": 2}
    whole = await service.post(PATH, body)
    for choice in whole["choices"]:
        assert choice["text"] == "aba"
        assert choice["logprobs"]["tokens"] == ["a", "b", "a"]
        assert choice["logprobs"]["text_offset"] == [0, 1, 2]


async def test_a_completion_resumes_where_it_was_cut(service: HttpService) -> None:
    body = {"prompt": PROMPT, "max_tokens": 9, "logprobs": 1, "return_token_ids": True}
    whole, usage = await _whole(service, body)
    for cut in range(1, 9):
        resumed = {**body, "resume_token_ids": whole["token_ids"][:cut]}
        for choice, used in (await _whole(service, resumed), await _streamed(service, resumed)):
            assert whole["text"].endswith(choice["text"])
            assert choice["token_ids"] == whole["token_ids"][cut:]
            assert choice["finish_reason"] == whole["finish_reason"]
            for name in ("tokens", "token_logprobs", "top_logprobs"):
                assert choice["logprobs"][name] == whole["logprobs"][name][cut:]
            assert used == usage


async def test_a_resumed_text_continues_within_a_character(service: HttpService) -> None:
    body = {"prompt": [*E_ACUTE, 64], "max_tokens": 6, "return_token_ids": True}
    whole, _ = await _whole(service, body)
    assert whole["text"] == "éaéa"
    for cut, rest in ((1, "éaéa"), (2, "aéa"), (3, "éa"), (4, "éa"), (5, "a")):
        resumed = {**body, "resume_token_ids": whole["token_ids"][:cut]}
        assert (await _whole(service, resumed))[0]["text"] == rest


async def test_a_completion_that_is_resumed_with_all_its_tokens_has_ended(
    service: HttpService,
) -> None:
    body = {"prompt": PROMPT, "max_tokens": 2, "resume_token_ids": PROMPT[:2]}
    for choice, usage in (await _whole(service, body), await _streamed(service, body)):
        assert (choice["text"], choice["finish_reason"]) == ("", "length")
        assert usage["completion_tokens"] == 2


async def test_a_stream_has_a_chunk_per_step(service: HttpService) -> None:
    body = {"prompt": [64, 65], "max_tokens": 2, "stream_options": {"continuous_usage_stats": True}}
    async with service.opened(PATH, body) as lines:
        await service.step()
        (first,) = await lines.next()
        assert first["choices"][0]["text"] == "a"
        assert first["usage"]["completion_tokens"] == 1
        await service.step()
        second, *rest = await lines.rest()
        assert second["choices"][0]["text"] == "b"
        assert second["choices"][0]["finish_reason"] == "length"
        assert second["usage"]["completion_tokens"] == 2
        assert rest == ["[DONE]"]
        assert {k: first[k] for k in ("id", "created")} == {k: second[k] for k in ("id", "created")}


async def test_prompt_log_probabilities_are_a_map_per_token(service: HttpService) -> None:
    body = {"prompt": [64, 65, 66], "max_tokens": 1, "prompt_logprobs": 1}
    (whole, _), (streamed, _) = await _whole(service, body), await _streamed(service, body)
    assert whole["prompt_logprobs"] == streamed["prompt_logprobs"]
    answer = await service.stub.Generate(
        token_request([64, 65, 66], max_tokens=1, prompt_logprobs=1)
    )
    assert whole["prompt_logprobs"][0] is None
    assert whole["prompt_logprobs"][1] == {
        "65": {"logprob": -1.25, "rank": None, "decoded_token": "b"},
        "0": {"logprob": -1.0, "rank": 1, "decoded_token": "!"},
    }
    for row, expected in zip(whole["prompt_logprobs"][1:], answer.prompt_logprobs[1:], strict=True):
        values = {str(entry.token_id): entry.logprob for entry in expected.entries}
        assert {key: value["logprob"] for key, value in row.items()} == values


async def test_a_stream_that_begins_within_a_character_has_prompt_log_probabilities(
    service: HttpService,
) -> None:
    body = {"prompt": E_ACUTE, "max_tokens": 2, "prompt_logprobs": 0}
    async with service.opened(PATH, body) as lines:
        await service.step()
        await service.step()
        events = await lines.rest()
    found = [c for e in events[:-1] for c in e["choices"] if "prompt_logprobs" in c]
    assert [len(choice["prompt_logprobs"]) for choice in found] == [2]


async def test_a_request_id_names_all_prompts(service: HttpService) -> None:
    body = {"prompt": ["a", "b"], "max_tokens": 1}
    response = await service.http.post(PATH, json=body, headers={"X-Request-Id": "an-id"})
    assert response.headers["x-request-id"] == "an-id"
    assert response.json()["id"] == "cmpl-an-id"
    for _ in range(2):
        assert service.scheduler.submits.get_nowait().request_id == "an-id"
    whole = await service.post(PATH, {"prompt": "a", "request_id": "of-the-body"})
    assert whole["id"] == "cmpl-of-the-body"


async def test_the_header_has_the_id_that_was_made_for_a_request(service: HttpService) -> None:
    response = await service.http.post(PATH, json={"prompt": "a"})
    assert response.json()["id"] == f"cmpl-{response.headers['x-request-id']}"
    assert response.headers["x-request-id"] == service.scheduler.submits.get_nowait().request_id


async def test_beams_are_choices_in_their_order(service: HttpService) -> None:
    body = {"prompt": [64, 65, 66], "max_tokens": 3, "use_beam_search": True, "n": 3}
    whole = await service.post(PATH, {**body, "temperature": 0, "length_penalty": 2})
    assert [choice["text"] for choice in whole["choices"]] == ["abc", "bca", "cab"]
    submit = service.scheduler.submits.get_nowait()
    assert (submit.sampling.beam_width, submit.sampling.length_penalty) == (3, 2)
    assert whole["usage"]["completion_tokens"] == 9


async def test_a_special_token_shows_only_if_it_is_asked_for(service: HttpService) -> None:
    ids = [64, 1534, 65]
    body = {"prompt": ids, "max_tokens": 3, "ignore_eos": True}
    (hidden, _), (shown, _) = (
        await _whole(service, body),
        await _whole(service, {**body, "skip_special_tokens": False}),
    )
    assert (hidden["text"], shown["text"]) == ("ab", "a<|im_start|>b")


async def test_the_end_of_sequence_ends_a_completion(service: HttpService) -> None:
    whole, usage = await _whole(service, {"prompt": [64, 1535, 65], "max_tokens": 9})
    assert (whole["text"], whole["finish_reason"], whole["stop_reason"]) == ("a", "stop", None)
    assert usage["completion_tokens"] == 2
    answer = await service.stub.Generate(token_request([64, 1535, 65], max_tokens=9))
    assert answer.completions[0].finish_reason == pb.FINISH_REASON_EOS
