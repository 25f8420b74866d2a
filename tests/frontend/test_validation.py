"""Every field of a request, at and beyond its limits."""

from __future__ import annotations

from typing import Any

import pytest

from frontend.model_files import ModelFacts
from frontend.request import Sampling
from frontend.validation import (
    check_messages,
    check_prompt_length,
    check_request,
    check_sampling,
    check_token_ids,
)
from shared.errors import InvalidArgumentError
from shared.pb import frontend_pb2 as pb

FACTS = ModelFacts(name="m", vocab_size=1000, eos_token_ids=(7, 8), temperature=0.6)
NAN, INFINITY = float("nan"), float("inf")


def check(**fields: Any) -> Sampling:
    return check_sampling(pb.SamplingParams(**fields), FACTS, room=50, vocab_size=1000)


def test_defaults_are_the_models() -> None:
    sampling = check()
    assert sampling.temperature == 0.6
    assert sampling.max_tokens == 50
    assert sampling.eos_token_ids == (7, 8)
    assert sampling.stop == sampling.stop_token_ids == ()


def test_a_seed_is_drawn_for_each_request_without_one() -> None:
    assert len({check().seed for _ in range(8)}) == 8
    assert check(seed=0).seed == 0
    assert check(seed=2**64 - 1).seed == 2**64 - 1


def test_what_is_given_is_taken() -> None:
    sampling = check(
        temperature=0, max_tokens=50, ignore_eos=True, stop=["a", "b"], stop_token_ids=[999, 0]
    )
    assert sampling.temperature == 0
    assert sampling.max_tokens == 50
    assert sampling.eos_token_ids == ()
    assert sampling.stop == ("a", "b")
    assert sampling.stop_token_ids == (999, 0)
    assert check(ignore_eos=False).eos_token_ids == (7, 8)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"temperature": -0.1}, "sampling.temperature: -0.1"),
        ({"temperature": 2.1}, r"sampling.temperature: 2.09.* must be in \[0, 2\]"),
        ({"temperature": NAN}, "sampling.temperature: nan"),
        ({"temperature": INFINITY}, "sampling.temperature: inf"),
        ({"max_tokens": 0}, "sampling.max_tokens: 0 .* at least 1"),
        ({"max_tokens": -5}, "sampling.max_tokens: -5"),
        ({"max_tokens": 51}, "sampling.max_tokens: 51; .* room for 50"),
        ({"stop": ["x"] * 17}, "sampling.stop: 17 given; the limit is 16"),
        ({"stop": ["x", ""]}, r"sampling.stop\[1\]: 0 characters"),
        ({"stop": ["x" * 1025]}, r"sampling.stop\[0\]: 1025 characters; must be 1 to 1024"),
        ({"stop_token_ids": [0] * 65}, "sampling.stop_token_ids: 65 given; the limit is 64"),
        ({"stop_token_ids": [1, 1000]}, r"sampling.stop_token_ids\[1\]: 1000 .* 1000"),
        # Not supported yet: refused where it would change the outcome ...
        ({"top_k": 20}, "sampling.top_k: not supported by this version"),
        ({"top_p": 0.9}, "sampling.top_p: not supported by this version"),
        ({"min_p": 0.1}, "sampling.min_p: not supported by this version"),
        ({"repetition_penalty": 1.1}, "sampling.repetition_penalty: not supported"),
        ({"presence_penalty": 0.5}, "sampling.presence_penalty: not supported"),
        ({"frequency_penalty": 0.5}, "sampling.frequency_penalty: not supported"),
        ({"min_tokens": 1}, "sampling.min_tokens: not supported"),
        ({"include_stop_in_output": True}, "sampling.include_stop_in_output: not supported"),
        ({"logprobs": 0}, "sampling.logprobs: not supported"),
        ({"prompt_logprobs": 0}, "sampling.prompt_logprobs: not supported"),
        ({"n": 2}, "sampling.n: not supported"),
        ({"logit_bias": {3: 1.0}}, "sampling.logit_bias: not supported"),
        ({"skip_special_tokens": False}, "sampling.skip_special_tokens: not supported"),
        # ... and out of range all the same.
        ({"top_k": -1}, "sampling.top_k: -1 is out of range; must be at least 0"),
        ({"top_p": 0}, r"sampling.top_p: 0.0 is out of range; must be in \(0, 1\]"),
        ({"top_p": 2}, "sampling.top_p: 2.0 is out of range"),
        ({"top_p": NAN}, "sampling.top_p: nan is out of range"),
        ({"min_p": 1.5}, "sampling.min_p: 1.5 is out of range"),
        ({"repetition_penalty": 0}, "sampling.repetition_penalty: 0.0 .* above 0"),
        ({"presence_penalty": -3}, "sampling.presence_penalty: -3.0 is out of range"),
        ({"frequency_penalty": NAN}, "sampling.frequency_penalty: nan is out of range"),
        ({"min_tokens": -1}, "sampling.min_tokens: -1 is out of range"),
        ({"logprobs": -1}, "sampling.logprobs: -1 is out of range"),
        ({"n": 0}, "sampling.n: 0 is out of range"),
    ],
)
def test_bad_sampling_is_refused_by_name(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidArgumentError, match=f"^{message}"):
        check(**fields)


def test_neutral_values_of_unsupported_fields_are_accepted() -> None:
    check(
        top_k=0,
        top_p=1,
        min_p=0,
        repetition_penalty=1,
        presence_penalty=0,
        frequency_penalty=0,
        min_tokens=0,
        include_stop_in_output=False,
        n=1,
        skip_special_tokens=True,
    )


def test_every_sampling_field_of_the_contract_is_either_used_or_refused() -> None:
    """So that none is silently ignored when the contract grows."""
    used = {"temperature", "seed", "max_tokens", "stop", "stop_token_ids", "ignore_eos"}
    samples: dict[str, Any] = {
        "logit_bias": {1: 1.0},
        "include_stop_in_output": True,
        "skip_special_tokens": False,
    }
    for name in pb.SamplingParams.DESCRIPTOR.fields_by_name:
        if name not in used:
            with pytest.raises(InvalidArgumentError, match=f"sampling.{name}"):
                check(**{name: samples.get(name, 2)})


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"request_id": "x" * 257}, "request_id"),
        ({"request_id": "a\nb"}, "request_id"),
        ({"cache_salt": "x" * 257}, "cache_salt"),
        ({"resume_token_ids": [1]}, "resume_token_ids"),
    ],
)
def test_bad_request_fields_are_refused_by_name(fields: dict[str, Any], field: str) -> None:
    with pytest.raises(InvalidArgumentError, match=f"^{field}: "):
        check_request(pb.GenerateRequest(**fields))


def test_request_ids_may_have_256_printable_characters() -> None:
    check_request(pb.GenerateRequest(request_id="é" * 256))


def test_roles_are_checked() -> None:
    assert check_messages(_chat("system", "user", "assistant"))[1]["role"] == "user"
    for role in ("", "tool", "User", "human"):
        with pytest.raises(InvalidArgumentError, match=r"^chat.messages\[1\].role: unknown"):
            check_messages(_chat("user", role))
    with pytest.raises(InvalidArgumentError, match=r"^chat.messages: empty"):
        check_messages(pb.Chat())


def test_a_prompt_leaves_room_for_a_token() -> None:
    check_prompt_length("text", 1, max_model_len=10)
    check_prompt_length("text", 9, max_model_len=10)
    with pytest.raises(InvalidArgumentError, match=r"^text: 10 tokens; the limit is 9"):
        check_prompt_length("text", 10, max_model_len=10)
    with pytest.raises(InvalidArgumentError, match=r"^text: empty"):
        check_prompt_length("text", 0, max_model_len=10)


def test_token_ids_are_below_the_vocabulary_size() -> None:
    check_token_ids("token_ids", [], vocab_size=10)
    check_token_ids("token_ids", [0, 9], vocab_size=10)
    with pytest.raises(InvalidArgumentError, match=r"^token_ids\[1\]: 10 is not below .* 10"):
        check_token_ids("token_ids", [0, 10, 11], vocab_size=10)


def _chat(*roles: str) -> pb.Chat:
    return pb.Chat(messages=[pb.ChatMessage(role=role, content="text") for role in roles])
