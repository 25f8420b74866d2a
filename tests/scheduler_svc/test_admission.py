"""Whatever a worker would refuse is refused on admission, with a message that names it."""

from __future__ import annotations

from typing import Any

import pytest

from scheduler_svc.admission import sampling_problem
from scheduler_svc.sampling import Grammar, SamplingParams
from tests.oracle import VOCAB_SIZE

NAN, INF = float("nan"), float("inf")


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"temperature": -0.5}, "temperature: -0.5; must be finite and at least 0"),
        ({"temperature": NAN}, "temperature: nan; must be finite and at least 0"),
        ({"min_tokens": -1}, "min_tokens: -1; must be in [0, 9]"),
        ({"min_tokens": 10}, "min_tokens: 10; must be in [0, 9]"),
        ({"top_k": -1}, "top_k: -1; must be in [0, 2147483647]"),
        ({"top_p": NAN}, "top_p: nan; must be in (0, 1]"),
        ({"top_p": 1.5}, "top_p: 1.5; must be in (0, 1]"),
        ({"top_p": 0.0}, "top_p: 0.0; must be in (0, 1]"),
        ({"min_p": -0.1}, "min_p: -0.1; must be in [0, 1]"),
        (
            {"repetition_penalty": 0.0},
            "repetition_penalty: 0.0; must be finite and above 0",
        ),
        (
            {"repetition_penalty": INF},
            "repetition_penalty: inf; must be finite and above 0",
        ),
        ({"presence_penalty": INF}, "presence_penalty: inf; must be finite"),
        (
            {"frequency_penalty": NAN},
            "frequency_penalty: nan; must be finite",
        ),
        ({"logprobs": 1001}, "logprobs: 1001; must be in [0, 1000]"),
        ({"prompt_logprobs": -1}, "prompt_logprobs: -1; must be in [0, 1000]"),
        ({"beam_width": 65}, "beam_width: 65; must be in [0, 64]"),
        ({"length_penalty": -INF}, "length_penalty: -inf; must be in [-10, 10]"),
        ({"length_penalty": 3e38}, "length_penalty: 3e+38; must be in [-10, 10]"),
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


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"temperature": 0.0, "top_p": 1.0, "min_p": 1.0, "min_tokens": 9, "top_k": 2**31 - 1},
        {"logprobs": 0, "prompt_logprobs": 1000, "presence_penalty": -2.0},
        {"bias_ids": (0, 999), "bias_values": (-100.0, 100.0)},
        {"stop_token_ids": frozenset([5000])},  # outside the vocabulary, so never sampled
    ],
)
def test_good_values_are_accepted(fields: dict[str, Any]) -> None:
    assert sampling_problem(SamplingParams(9, **fields), VOCAB_SIZE) == ""


def test_there_are_no_more_log_probabilities_than_tokens() -> None:
    assert "in [0, 32]" in sampling_problem(SamplingParams(9, logprobs=33), 32)
