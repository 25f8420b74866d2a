"""Every sampling parameter, at and beyond its limits, alone and together."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import pytest
from google.protobuf.descriptor import FieldDescriptor

from frontend.request import Sampling
from frontend.sampling_checks import check_resume, check_sampling
from frontend.text.model_files import ModelFacts
from nano_vllm_grpc.pb import frontend_pb2 as pb
from shared.errors import InvalidArgumentError
from shared.sampling_params import BOUNDS, Grammar, GrammarKind, SamplingNumbers

FACTS = ModelFacts(
    name="m",
    vocab_size=1000,
    eos_token_ids=(7, 8),
    defaults=SamplingNumbers(
        temperature=0.6, top_k=20, top_p=0.95, min_p=0.1, repetition_penalty=1.1
    ),
)
NAN, INFINITY = float("nan"), float("inf")
REGEX = pb.StructuredOutput(regex="a")


def check(**fields: Any) -> Sampling:
    return check_sampling(pb.SamplingParams(**fields), FACTS, room=50, vocab_size=1000)


def test_defaults_are_the_models_and_each_may_be_overridden() -> None:
    sampling = check()
    defaults = Sampling(
        temperature=0.6,
        seed=sampling.seed,
        max_tokens=50,
        eos_token_ids=(7, 8),
        stop_token_ids=(),
        stop=(),
        top_k=20,
        top_p=0.95,
        min_p=0.1,
        repetition_penalty=1.1,
    )
    assert sampling == defaults
    other: dict[str, Any] = {
        **{"temperature": 1, "top_k": 0, "top_p": 1, "min_p": 0, "repetition_penalty": 1}
    }
    for name, value in other.items():
        assert check(seed=0, **{name: value}) == replace(defaults, seed=0, **{name: value})


def test_a_seed_is_drawn_for_each_request_without_one() -> None:
    assert len({check().seed for _ in range(8)}) == 8
    assert check(seed=0).seed == 0
    assert check(seed=2**64 - 1).seed == 2**64 - 1


def test_given_values_are_used() -> None:
    same: dict[str, Any] = {
        **{"temperature": 1, "seed": 3, "max_tokens": 50, "min_tokens": 50, "top_k": 999},
        **{"top_p": 0.5, "min_p": 0.25, "repetition_penalty": 1.5, "presence_penalty": -2},
        **{"frequency_penalty": 2, "logprobs": 0, "prompt_logprobs": 20, "n": 16},
    }
    sampling = check(
        ignore_eos=True,
        stop=["a", "b"],
        stop_token_ids=[999, 0],
        logit_bias={999: 100, 3: -100, 5: 0},
        include_stop_in_output=True,
        skip_special_tokens=False,
        **same,
    )
    assert sampling == Sampling(
        eos_token_ids=(),
        stop_token_ids=(999, 0),
        stop=("a", "b"),
        logit_bias=((3, -100), (999, 100)),
        include_stop=True,
        show_special=True,
        **same,
    )
    assert check(ignore_eos=False).eos_token_ids == (7, 8)
    assert not check(skip_special_tokens=True).show_special


def test_filters_without_effect_are_off() -> None:
    greedy = check(temperature=0, top_k=5, top_p=0.5, min_p=0.5)
    assert (greedy.top_k, greedy.top_p, greedy.min_p) == (0, 1, 0)
    assert check(temperature=0).repetition_penalty == 1.1  # it may change which token is likeliest
    assert check(top_k=1000).top_k == 0
    assert check(logit_bias={3: 0}).logit_bias == ()


BAD: list[tuple[dict[str, Any], str]] = [
    ({"max_tokens": 0}, "sampling.max_tokens: 0 .* at least 1"),
    ({"max_tokens": -5}, "sampling.max_tokens: -5"),
    ({"max_tokens": 51}, "sampling.max_tokens: 51; .* room for 50 tokens"),
    ({"min_tokens": -1}, r"sampling.min_tokens: -1 is out of range; must be in \[0, 50\]"),
    ({"min_tokens": 6, "max_tokens": 5}, r"sampling.min_tokens: 6 .* must be in \[0, 5\]"),
    ({"min_tokens": 51}, r"sampling.min_tokens: 51 .* must be in \[0, 50\]"),
    ({"stop": ["x"] * 17}, "sampling.stop: 17 given; the limit is 16"),
    ({"stop": ["x", ""]}, r"sampling.stop\[1\]: 0 characters"),
    ({"stop": ["x" * 1025]}, r"sampling.stop\[0\]: 1025 characters; must be 1 to 1024"),
    ({"bad_words": ["x"] * 129}, "sampling.bad_words: 129 given; the limit is 128"),
    ({"bad_words": ["x", ""]}, r"sampling.bad_words\[1\]: 0 characters"),
    ({"stop_token_ids": [0] * 65}, "sampling.stop_token_ids: 65 given; the limit is 64"),
    ({"stop_token_ids": [1, 1000]}, r"sampling.stop_token_ids\[1\]: 1000 .* 1000"),
    ({"logit_bias": dict.fromkeys(range(1000), 1) | {1000: 1}}, "sampling.logit_bias: 1000 is not"),
    ({"logit_bias": dict.fromkeys(range(1025), 1)}, "sampling.logit_bias: 1025 given; .* is 1024"),
    ({"logit_bias": {3: 100.5}}, r"sampling.logit_bias\[3\]: 100.5 .* in \[-100, 100\]"),
    ({"logit_bias": {3: NAN}}, r"sampling.logit_bias\[3\]: nan"),
    ({"length_penalty": 2}, "sampling.length_penalty: 2 requires sampling.beam_width"),
    (
        {"structured_output": REGEX, "ignore_eos": True},
        "sampling.structured_output: cannot be used with sampling.ignore_eos",
    ),
]


@pytest.mark.parametrize(("fields", "message"), BAD)
def test_bad_sampling_is_rejected_by_field(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidArgumentError, match=f"^{message}"):
        check(**fields)


@pytest.mark.parametrize("name", BOUNDS)
def test_every_range_is_checked(name: str) -> None:
    valid = BOUNDS[name].public
    bad = [valid.low - 1, *([valid.low] if valid.above else [])]
    bad += [valid.high + 1] if valid.high < 2**31 else []
    if pb.SamplingParams.DESCRIPTOR.fields_by_name[name].type == FieldDescriptor.TYPE_FLOAT:
        bad += [NAN, INFINITY, -INFINITY]
    for value in bad:
        message = re.escape(f"is out of range; must be {valid}")
        with pytest.raises(InvalidArgumentError, match=f"^sampling.{name}: .* {message}$"):
            check(**{name: value})


def test_every_field_of_the_contract_is_checked_or_free() -> None:
    """Makes sure that no new field of the contract is silently ignored."""
    free = {"seed", "include_stop_in_output", "ignore_eos", "skip_special_tokens"}
    checked = {name for fields, _ in BAD for name in fields} | set(BOUNDS)
    assert free | checked == set(pb.SamplingParams.DESCRIPTOR.fields_by_name)


def test_beam_search_uses_the_models_own_probabilities() -> None:
    sampling = check(beam_width=3, max_tokens=9, min_tokens=2, stop_token_ids=[5])
    assert sampling == Sampling(
        temperature=0,
        seed=0,
        max_tokens=9,
        min_tokens=2,
        eos_token_ids=(7, 8),
        stop_token_ids=(5,),
        stop=(),
        beam_width=3,
        length_penalty=1,
    )
    assert sampling.num_completions == 3
    assert check(beam_width=1, length_penalty=-0.5).length_penalty == -0.5
    assert check(beam_width=0, n=2).num_completions == 2


NEUTRAL = {
    **{"n": 1, "temperature": 0, "top_k": 0, "top_p": 1, "min_p": 0, "repetition_penalty": 1},
    **{"presence_penalty": 0, "frequency_penalty": 0, "logit_bias": {3: 0}},
    "skip_special_tokens": False,
}
OF_SAMPLING = {
    **{"n": 2, "temperature": 0.5, "top_k": 5, "top_p": 0.5, "min_p": 0.5},
    **{"repetition_penalty": 1.5, "presence_penalty": 0.5, "frequency_penalty": 0.5},
    **{"logit_bias": {3: 1}, "seed": 0, "logprobs": 0, "prompt_logprobs": 0, "stop": ["x"]},
    "bad_words": ["x"],
    "structured_output": REGEX,
}


@pytest.mark.parametrize("name", OF_SAMPLING)
def test_beam_search_rejects_parameters_of_sampling(name: str) -> None:
    given = {name: OF_SAMPLING[name]}
    message = f"^sampling.beam_width: 2 cannot be used with sampling.{name};"
    with pytest.raises(InvalidArgumentError, match=message):
        check(beam_width=2, **given)
    check(beam_width=0, **given)


def test_neutral_values_go_with_beam_search() -> None:
    check(beam_width=2, **NEUTRAL)
    check(length_penalty=1)


def test_structured_output_becomes_a_grammar() -> None:
    assert check(structured_output=REGEX).grammar == Grammar(GrammarKind.REGEX, "a")


def test_resume_tokens_end_with_the_one_that_ends_the_completion() -> None:
    sampling = check(stop_token_ids=[5], max_tokens=4)
    assert check_resume([], check(n=2), 1000) == []
    assert check_resume([1, 2, 3, 4], sampling, 1000) == [1, 2, 3, 4]
    assert check_resume([1, 7, 3], sampling, 1000) == [1, 7]
    assert check_resume([5, 1], sampling, 1000) == [5]
    assert check_resume([1, 7, 3], check(ignore_eos=True), 1000) == [1, 7, 3]


@pytest.mark.parametrize(
    ("token_ids", "fields", "message"),
    [
        ([1, 1000], {}, "resume_token_ids[1]: 1000 is not below"),
        ([1] * 5, {"max_tokens": 4}, "resume_token_ids: 5 tokens; the limit is 4"),
        ([1] * 51, {}, "resume_token_ids: 51 tokens; the limit is 50"),
        ([1], {"n": 2}, "resume_token_ids: cannot be used with sampling.n 2"),
        ([1], {"beam_width": 1}, "resume_token_ids: cannot be used with sampling.beam_width"),
    ],
)
def test_bad_resume_tokens_are_rejected(
    token_ids: list[int], fields: dict[str, Any], message: str
) -> None:
    with pytest.raises(InvalidArgumentError, match=f"^{re.escape(message)}"):
        check_resume(token_ids, check(**fields), 1000)
