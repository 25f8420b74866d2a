"""Every sampling parameter reaches the scheduler with the right value."""

from __future__ import annotations

import json
from array import array
from collections.abc import Iterable
from typing import Any

import numpy as np
import pytest
from google.protobuf.json_format import MessageToDict

from frontend.http.parameters import CompletionFields
from nano_vllm_grpc.pb import frontend_pb2 as pb
from shared.pb import scheduler_pb2
from shared.sampling_params import BANNED
from tests.frontend.http.conftest import POSTS, HttpService, Json

JSON_SCHEMA, REGEX, EBNF, ANY_JSON, TAG = range(1, 6)
SCHEMA = {"type": "object", "properties": {"z": {"type": "string"}, "a": {}}, "required": ["z"]}
SCHEMA_TEXT = '{"type":"object","properties":{"z":{"type":"string"},"a":{}},"required":["z"]}'
TAG_FORM = {"type": "structural_tag", "format": {"type": "regex", "pattern": "a+"}}
OLD_TAG = {
    "type": "structural_tag",
    "structures": [{"begin": "<", "schema": {}}],
    "triggers": ["<"],
}

# Parameters of a request, and the fields of TokenSampling or Submit that follow.
SAMPLING: list[tuple[Json, Json]] = [
    ({"temperature": 0}, {"temperature": 0.0}),
    ({"temperature": 1.5}, {"temperature": 1.5}),
    ({"temperature": None}, {"temperature": pytest.approx(0.6)}),  # of generation_config.json
    ({"top_p": 0.5}, {"top_p": 0.5}),
    ({"top_k": 7}, {"top_k": 7}),
    ({"top_k": -1}, {"top_k": 0}),
    ({"top_k": 0}, {"top_k": 0}),
    ({"min_p": 0.25}, {"min_p": 0.25}),
    ({"repetition_penalty": 1.5}, {"repetition_penalty": 1.5}),
    ({"presence_penalty": -1.5}, {"presence_penalty": -1.5}),
    ({"frequency_penalty": 2}, {"frequency_penalty": 2.0}),
    ({"min_tokens": 2}, {"min_tokens": 2}),
    ({"ignore_eos": True}, {"eos_token_ids": []}),
    ({"ignore_eos": False}, {"eos_token_ids": [1535, 1533]}),
    ({"stop_token_ids": [5, 6]}, {"stop_token_ids": [5, 6]}),
    *(
        ({"seed": seed}, {"seed": sent})
        for seed, sent in (
            (0, 0),
            (2**31, 2**31),
            (2**63 - 1, 2**63 - 1),
            (2**64 - 1, 2**64 - 1),
            (-1, 2**64 - 1),
            (-(2**63), 2**63),
        )
    ),
]
BIASES: list[tuple[Json, dict[int, float]]] = [
    ({"logit_bias": {"5": 1, "1535": -2.5}}, {5: 1.0, 1535: -2.5}),
    ({"logit_bias": {}}, {}),
    ({"logit_bias": {"7": 0}}, {}),
    ({"bad_words": ["b"]}, {65: BANNED, 300: BANNED}),
    ({"bad_words": [" b"], "logit_bias": {"9": 1}}, {65: BANNED, 300: BANNED, 9: 1.0}),
    ({"bad_words": ["b"], "logit_bias": {"65": 1}}, {65: BANNED, 300: BANNED}),
]
CONSTRAINTS: list[tuple[Json, tuple[int, str]]] = [
    ({"response_format": {"type": "text"}}, (0, "")),
    ({"response_format": {"type": "json_object"}}, (ANY_JSON, "")),
    (
        {
            "response_format": {
                "type": "json_schema",
                "json_schema": {"name": "n", "schema": SCHEMA},
            }
        },
        (JSON_SCHEMA, SCHEMA_TEXT),
    ),
    ({"response_format": TAG_FORM}, (TAG, json.dumps(TAG_FORM, separators=(",", ":")))),
    ({"response_format": OLD_TAG}, (TAG, json.dumps(OLD_TAG, separators=(",", ":")))),
    ({"structured_outputs": {"json": SCHEMA}}, (JSON_SCHEMA, SCHEMA_TEXT)),
    ({"structured_outputs": {"json": '{"a": 1}'}}, (JSON_SCHEMA, '{"a": 1}')),
    ({"structured_outputs": {"regex": "a|b"}}, (REGEX, "a|b")),
    ({"structured_outputs": {"choice": ["a", '"b']}}, (EBNF, 'root ::= "a" | "\\"b"')),
    ({"structured_outputs": {"grammar": 'root ::= "x"'}}, (EBNF, 'root ::= "x"')),
    ({"structured_outputs": {"json_object": True}}, (ANY_JSON, "")),
    (
        {"structured_outputs": {"structural_tag": json.dumps(TAG_FORM)}},
        (TAG, json.dumps(TAG_FORM)),
    ),
    ({"structured_outputs": {"regex": "a", "json": None}}, (REGEX, "a")),
    ({"regex": "a+"}, (REGEX, "a+")),
    ({"ebnf": 'root ::= "y"'}, (EBNF, 'root ::= "y"')),
]
# Tested elsewhere: how many completions there are, and what answers show.
ELSEWHERE = {
    *("n", "use_beam_search", "length_penalty", "stop", "include_stop_str_in_output"),
    *("skip_special_tokens", "prompt_logprobs", "truncate_prompt_tokens", "resume_token_ids"),
    *("request_id", "engine", "return_token_ids", "return_tokens_as_token_ids"),
}
WITHOUT_EFFECT = {
    "user": "u",
    "metadata": {"a": "b"},
    "service_tier": "auto",
    "safety_identifier": "s",
    "prompt_cache_key": "k",
    "prompt_cache_retention": "24h",
    "spaces_between_special_tokens": True,
}
ROUTED: list[tuple[Json, Json]] = [
    ({"priority": -5}, {"priority": -5}),
    ({"priority": 2**31 - 1}, {"priority": 2**31 - 1}),
    ({"cache_salt": "s"}, {"cache_salt": ":s"}),  # a colon ends the name of the client
    ({"store": False}, {"never_store": True}),
    ({"store": True}, {"never_store": False}),
    ({}, {"priority": 0, "cache_salt": "", "never_store": False}),
]


async def submitted(
    service: HttpService, parameters: Json, path: str = "/v1/completions"
) -> scheduler_pb2.Submit:
    """Returns the message that the scheduler gets for a request with these parameters."""
    await service.post(path, {**POSTS[path], **parameters})
    return service.scheduler.submits.get_nowait()


def values(message: Any, names: Iterable[str]) -> Json:
    found = {name: getattr(message, name) for name in names}
    return {k: list(v) if k.endswith("_ids") else v for k, v in found.items()}


def biases(sampling: scheduler_pb2.TokenSampling) -> dict[int, float]:
    ids = np.frombuffer(sampling.bias_ids, "<i4").tolist()
    return dict(zip(ids, np.frombuffer(sampling.bias_values, "<f4").tolist(), strict=True))


OF_PATHS = {"model", "stream", "stream_options"}


def test_no_parameter_is_forgotten() -> None:
    tables: list[Any] = [SAMPLING, BIASES, CONSTRAINTS, ROUTED]
    covered = {name for table in tables for parameters, _ in table for name in parameters}
    assert (
        covered | ELSEWHERE | WITHOUT_EFFECT.keys()
        == CompletionFields.model_fields.keys() - OF_PATHS
    )


@pytest.mark.parametrize("path", POSTS)
async def test_numbers_reach_the_scheduler(service: HttpService, path: str) -> None:
    for parameters, expected in SAMPLING:
        submit = await submitted(service, parameters, path)
        assert values(submit.sampling, expected) == expected, parameters
        assert submit.sampling.max_tokens == 3
    for parameters, routed in ROUTED:
        submit = await submitted(service, parameters, path)
        assert values(submit, routed) == routed, parameters


@pytest.mark.parametrize("path", POSTS)
async def test_bad_words_of_several_tokens_reach_the_scheduler(
    service: HttpService, path: str
) -> None:
    submit = await submitted(service, {"bad_words": [" user", "fox den", "\n\n\n"]}, path)
    encode = service.stub.Tokenize
    expected = set()
    for text in ("user", " user", "fox den", " fox den", "\n\n\n", " \n\n\n"):
        ids = tuple((await encode(pb.TokenizeRequest(text=text))).token_ids)
        expected |= {ids} if len(ids) > 1 else set()
    found = [tuple(array("i", word)) for word in submit.sampling.bad_words]
    assert expected
    assert sorted(found) == sorted(expected)


@pytest.mark.parametrize("path", POSTS)
async def test_biases_reach_the_scheduler(service: HttpService, path: str) -> None:
    for parameters, expected in BIASES:
        submit = await submitted(service, parameters, path)
        assert biases(submit.sampling) == expected, parameters


@pytest.mark.parametrize("path", POSTS)
async def test_constraints_reach_the_scheduler(service: HttpService, path: str) -> None:
    for parameters, expected in CONSTRAINTS:
        if path in ("/v1/responses", "/v1/messages") and "response_format" in parameters:
            continue
        grammar = (await submitted(service, parameters, path)).sampling.grammar
        assert (grammar.kind, grammar.text) == expected, parameters


async def test_the_format_of_a_responses_text_is_a_constraint(service: HttpService) -> None:
    path = "/v1/responses"
    for form, expected in (
        ({"type": "text"}, (0, "")),
        ({"type": "json_object"}, (ANY_JSON, "")),
        ({"type": "json_schema", "name": "n", "schema": SCHEMA}, (JSON_SCHEMA, SCHEMA_TEXT)),
    ):
        submit = await submitted(service, {"text": {"format": form}}, path)
        assert (submit.sampling.grammar.kind, submit.sampling.grammar.text) == expected


@pytest.mark.parametrize("path", POSTS)
async def test_parameters_without_effect_change_nothing(service: HttpService, path: str) -> None:
    plain = await submitted(service, {"seed": 1}, path)
    for name, value in WITHOUT_EFFECT.items():
        other = await submitted(service, {"seed": 1, name: value}, path)
        other.request, other.request_id = plain.request, plain.request_id
        assert MessageToDict(other) == MessageToDict(plain)


@pytest.mark.parametrize("path", POSTS)
async def test_null_is_unset(service: HttpService, path: str) -> None:
    nothing = dict.fromkeys(CompletionFields.model_fields)
    plain, other = [await submitted(service, each, path) for each in ({}, nothing)]
    other.request, other.request_id = plain.request, plain.request_id
    other.sampling.seed = plain.sampling.seed  # random
    assert MessageToDict(other) == MessageToDict(plain)


async def test_the_prompts_score_is_asked_for(service: HttpService) -> None:
    several = {"prompt": "hi time"}  # a single token follows nothing
    for path, prompt in (("/v1/completions", several), ("/v1/chat/completions", {})):
        submit = await submitted(service, {"prompt_logprobs": 2, **prompt}, path)
        assert submit.sampling.prompt_logprobs == 2
        assert not submit.sampling.HasField("logprobs")


async def test_prompt_logprobs_count_with_echo(service: HttpService) -> None:
    parameters = {"echo": True, "logprobs": 1, "prompt_logprobs": 5, "prompt": [64, 65, 66]}
    assert (await submitted(service, parameters)).sampling.prompt_logprobs == 5


async def test_n_completions_are_one_submission(service: HttpService) -> None:
    submit = await submitted(service, {"n": 3, "seed": -1})
    assert (submit.n, submit.sampling.seed) == (3, 2**64 - 1)


@pytest.mark.parametrize(
    "two",
    [
        {"regex": "a", "ebnf": 'root ::= "y"'},
        {"structured_outputs": {"regex": "a", "json_object": True}},
        {"structured_outputs": {"regex": "a"}, "response_format": {"type": "json_object"}},
    ],
)
async def test_two_constraints_are_an_error(service: HttpService, two: Json) -> None:
    for path, body in POSTS.items():
        if path in ("/v1/responses", "/v1/messages") and "response_format" in two:
            continue
        status, error = await service.error(path, {**body, **two})
        assert status == 400
        assert "one constraint, not 2" in error["error"]["message"]


async def test_a_responses_text_has_one_constraint(service: HttpService) -> None:
    body = {"input": "hi", "text": {"format": {"type": "json_object"}}}
    other = {"structured_outputs": {"json_object": True}}
    status, error = await service.error("/v1/responses", body | other)
    assert status == 400
    assert "another constraint" in error["error"]["message"]
