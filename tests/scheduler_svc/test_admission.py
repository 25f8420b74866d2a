"""Whatever a worker would refuse is refused on admission, with a message that names it."""

from __future__ import annotations

from typing import Any

import pytest

from scheduler_svc.core.admission import sampling_problem
from scheduler_svc.core.sampling import SamplingParams
from shared.sampling_params import BOUNDS, NUMBERS, Grammar
from tests.oracle import VOCAB_SIZE

NAN, INF = float("nan"), float("inf")


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"min_tokens": -1}, "min_tokens: -1; must be in [0, 9]"),
        ({"min_tokens": 10}, "min_tokens: 10; must be in [0, 9]"),
        ({"grammar": Grammar(9, "")}, "grammar: kind 9 is unknown"),
        (
            {"grammar": Grammar(2, "a"), "beam_width": 2},
            "beam_width: 2; must be 0 with a grammar",
        ),
        ({"bias_ids": (1,)}, "logit_bias: 0 values for 1 token ids"),
        ({"bias_ids": (1, 1), "bias_values": (1.0, 2.0)}, "logit_bias: a token id occurs twice"),
        ({"bias_ids": (-1,), "bias_values": (1.0,)}, "logit_bias: token ids must be below 1000"),
        ({"bias_ids": (1000,), "bias_values": (1.0,)}, "logit_bias: token ids must be below 1000"),
        ({"bias_ids": (1,), "bias_values": (-INF,)}, "logit_bias: values must be finite"),
        ({"bad_words": ((1, 2), (3, 1000))}, "bad_words: token ids must be below 1000"),
        ({"bad_words": ((1, 2), ())}, "bad_words: must be at most 256, of one token or more"),
        ({"bad_words": ((1,),) * 257}, "bad_words: must be at most 256, of one token or more"),
        (
            {"min_tokens": 1, "stop_token_ids": frozenset([1000])},
            "stop_token_ids: token ids must be below 1000",
        ),
        (
            {"min_tokens": 1, "eos_token_ids": frozenset([-1])},
            "eos_token_ids: token ids must be below 1000",
        ),
    ],
)
def test_bad_values_are_named(fields: dict[str, Any], message: str) -> None:
    found = sampling_problem(SamplingParams(9, **fields), VOCAB_SIZE)
    assert found.startswith(f"sampling.{message}")


@pytest.mark.parametrize("name", sorted(BOUNDS.keys() - {"max_tokens", "n"}))
def test_every_range_is_checked(name: str) -> None:
    valid = BOUNDS[name].engine
    whole = (name not in NUMBERS and name != "length_penalty") or name == "top_k"
    bad = [valid.low - 1, valid.high + 1] if whole else [NAN, INF, -INF]
    bad += [valid.low] if valid.above else []
    for value in bad:
        found = sampling_problem(SamplingParams(9, **{name: value}), VOCAB_SIZE)
        assert found == f"sampling.{name}: {value}; must be {valid}"


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"temperature": 0.0, "top_p": 1.0, "min_p": 1.0, "min_tokens": 9, "top_k": 2**31 - 1},
        {"logprobs": 0, "prompt_logprobs": 1000, "presence_penalty": -2.0},
        {"bias_ids": (0, 999), "bias_values": (-100.0, 100.0), "bad_words": ((0, 999),) * 256},
        {"stop_token_ids": frozenset([5000])},  # outside the vocabulary, so never sampled
    ],
)
def test_good_values_are_accepted(fields: dict[str, Any]) -> None:
    assert sampling_problem(SamplingParams(9, **fields), VOCAB_SIZE) == ""


def test_there_are_no_more_log_probabilities_than_tokens() -> None:
    assert "in [0, 32]" in sampling_problem(SamplingParams(9, logprobs=33), 32)
