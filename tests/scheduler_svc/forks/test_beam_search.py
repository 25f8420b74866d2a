"""Beam search against that of transformers, on the log-probabilities of the same small model."""

from __future__ import annotations

import random
from functools import cache
from typing import Any

import pytest
import torch
from transformers import GenerationConfig, Qwen3Config, Qwen3ForCausalLM
from transformers.generation import GenerationMode

from scheduler_svc.core.forks.beam_search import BeamSearch, Candidates, _token_ids
from scheduler_svc.core.sampling import SamplingParams

VOCAB_SIZE = 40
PROMPT = [3, 1, 4]


@cache
def random_model(seed: int) -> Qwen3ForCausalLM:
    """A model with weights large enough for likelihoods to differ, and a vocabulary small enough
    for completions to end."""
    torch.manual_seed(seed)
    config = Qwen3Config(
        vocab_size=VOCAB_SIZE,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=16,
        max_position_embeddings=64,
        tie_word_embeddings=False,
    )
    model = Qwen3ForCausalLM(config).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" not in name:
                parameter.normal_(std=0.15)
    return model


def log_probs(model: Qwen3ForCausalLM, beams: list[tuple[int, ...]]) -> torch.Tensor:
    """float32[beams, vocabulary]: the log-probabilities of the token after each beam."""
    with torch.no_grad():
        logits = model(torch.tensor([[*PROMPT, *beam] for beam in beams])).logits[:, -1]
    return torch.log_softmax(logits.float(), dim=-1)


def live_beams(search: BeamSearch) -> list[tuple[int, ...]]:
    return [_token_ids(beam.path) for beam in search._live]


def beam_search(width: int, max_tokens: int, *ends: int, **others: Any) -> BeamSearch:
    stops = frozenset(ends)
    return BeamSearch(SamplingParams(max_tokens, beam_width=width, stop_token_ids=stops, **others))


def candidates(model: Qwen3ForCausalLM, search: BeamSearch) -> list[Candidates]:
    count = search._params.num_logprobs or 0
    best = log_probs(model, live_beams(search)).topk(min(count, VOCAB_SIZE))
    return list(zip(best.indices.numpy(), best.values.numpy(), strict=True))


def expected(
    model: Qwen3ForCausalLM, search: BeamSearch
) -> tuple[list[tuple[int, ...]], list[float]]:
    """The completions that transformers finds, without padding, and their scores."""
    params = search._params
    found = model.generate(
        torch.tensor([PROMPT]),
        attention_mask=torch.ones(1, len(PROMPT), dtype=torch.long),
        num_beams=params.beam_width,
        num_return_sequences=params.beam_width,
        length_penalty=params.length_penalty,
        max_new_tokens=params.max_tokens,
        min_new_tokens=params.min_tokens or None,
        eos_token_id=sorted(params.end_token_ids) or None,
        pad_token_id=VOCAB_SIZE,  # never sampled
        early_stopping=False,
        do_sample=False,
        return_dict_in_generate=True,
        output_scores=True,
    )
    completions = [
        tuple(token for token in row[len(PROMPT) :].tolist() if token != VOCAB_SIZE)
        for row in found.sequences
    ]
    return completions, found.sequences_scores.tolist()


@pytest.mark.parametrize("length_penalty", [0.0, 0.5, 1.0, 2.0, -1.0])
@pytest.mark.parametrize("seed", range(10))
def test_the_hypotheses_are_those_of_transformers(
    seed: int, length_penalty: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    # transformers treats a width of one as greedy search, which never looks for a better ending.
    monkeypatch.setattr(
        GenerationConfig, "get_generation_mode", lambda *_: GenerationMode.BEAM_SEARCH
    )
    rng = random.Random(f"{seed}/{length_penalty}")
    model, width = random_model(seed), 1 + seed % 5
    end_token_ids = rng.choice([(), (7,), (7, 21)])
    others = {"length_penalty": length_penalty, "min_tokens": rng.choice([0, 0, 3])}
    search = beam_search(width, 8, *end_token_ids, **others)
    while continuations := search.advance(candidates(model, search)):
        assert len(continuations) == width
    completions, scores = expected(model, search)
    assert [h.token_ids for h in search.hypotheses] == completions
    assert [h.score for h in search.hypotheses] == pytest.approx(scores, abs=1e-4)


def step(*beams: dict[int, float]) -> list[Candidates]:
    return [(list(beam), list(beam.values())) for beam in beams]


def test_live_beams_name_their_parents_best_first() -> None:
    search = beam_search(2, 10, 0)
    assert search.advance(step({5: -0.5, 6: -1.0, 0: -2.0})) == [(0, 5), (0, 6)]
    assert live_beams(search) == [(5,), (6,)]
    assert search.advance(step({1: -3.0, 2: -4.0}, {3: -0.1, 4: -3.0})) == [(1, 3), (0, 1)]
    assert live_beams(search) == [(6, 3), (5, 1)]
    assert search.hypotheses == []  # the end token was not among the best two


def test_equals_go_by_beam_and_then_by_token() -> None:
    search = beam_search(2, 10)
    assert search.advance(step({9: -1.0, 4: -1.0, 7: -1.0})) == [(0, 4), (0, 7)]
    assert search.advance(step({8: -1.0, 3: -1.0}, {1: -1.0})) == [(0, 3), (0, 8)]


def test_no_end_token_before_min_tokens() -> None:
    search = beam_search(1, 10, 0, 1, min_tokens=1)
    assert search.advance(step({0: -0.1, 1: -0.2, 5: -3.0})) == [(0, 5)]
    assert search.advance(step({0: -0.1, 5: -3.0, 6: -4.0})) == []
    assert [h.token_ids for h in search.hypotheses] == [(5, 0)]
    assert search.hypotheses[0].score == pytest.approx(-3.1 / 2)
    assert live_beams(search) == []


def test_a_vocabulary_smaller_than_the_beam_is_searched_whole() -> None:
    search = beam_search(4, 2, length_penalty=0.0)
    assert search.advance(step({0: -0.5, 1: -1.0})) == [(0, 0), (0, 1)]
    assert search.advance(step({0: -0.5, 1: -1.0}, {0: -0.6, 1: -1.1})) == []
    assert [h.token_ids for h in search.hypotheses] == [(0, 0), (0, 1), (1, 0), (1, 1)]
