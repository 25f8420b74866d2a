"""The effect of features on logits, against transformers' processors."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch
from transformers import (
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from tests.worker_svc.harness import Asked, Batch, limits
from tests.worker_svc.thread_ranks import on_ranks, random_logits, shard
from worker_svc.kernels.cpu import ops as cpu_ops
from worker_svc.kv_cache import TokenCache
from worker_svc.ranks.distributed import TensorParallel
from worker_svc.sampling.features import FeatureSampler, feature_tensors
from worker_svc.sampling.sampler import Sampler
from worker_svc.step.arrays import StepArrays
from worker_svc.step.tensors import StepTensors, upload, upload_step

VOCAB = 301
CPU = torch.device("cpu")
UPLOAD = partial(upload, device=CPU, pinned=False)
INF = float("inf")


def make_step(
    texts: Sequence[Sequence[int]],
    asked: dict[int, Asked],
    temperatures: Sequence[float],
    vocab: int = VOCAB,
) -> StepArrays:
    batch = Batch(limits(vocab_size=vocab))
    seeds = list(range(len(texts)))
    return batch.step(
        list(enumerate(texts)), temperatures=temperatures, seeds=seeds, features=asked
    )


def history_of(step: StepArrays) -> TokenCache:
    """The history of sequences that have all their tokens in `step`."""
    cache = TokenCache.allocate(256, 16, torch.device("cpu"))
    cache.slots[step.slot_mapping.tolist()] = torch.from_numpy(step.input_ids.copy())
    return cache


def on_device(step: StepArrays) -> StepTensors:
    return upload_step(step, step.query_lens[:0], CPU)


def process(logits: torch.Tensor, step: StepArrays, ranks: int = 1) -> torch.Tensor:
    """Whole logits [S, vocab] of all rows -> those of the rows that features change, [F, vocab]."""
    tensors, history = on_device(step), history_of(step)

    def run(tp: TensorParallel) -> torch.Tensor:
        vocab, local = shard(logits, tp)
        assert step.features
        features = feature_tensors(step.features, step.temperatures, vocab, UPLOAD)
        chosen = local[features.rows]
        temperatures = tensors.temperatures[features.rows]
        sampler = FeatureSampler(vocab, tp, cpu_ops)
        sampler.process(chosen, temperatures, features, tensors, history)
        return chosen[:, : vocab.num_tokens]

    return torch.cat(on_ranks(ranks, run), dim=1)


def sample(logits: torch.Tensor, step: StepArrays, ranks: int = 1) -> list[int]:
    """The tokens of the rows that features change; all ranks must sample the same."""
    tensors, history = on_device(step), history_of(step)

    def run(tp: TensorParallel) -> list[int]:
        vocab, local = shard(logits, tp)
        assert step.features
        features = feature_tensors(step.features, step.temperatures, vocab, UPLOAD)
        return FeatureSampler(vocab, tp, cpu_ops)(local, features, tensors, history).tolist()

    first, *others = on_ranks(ranks, run)
    assert all(other == first for other in others)
    return first


def expected(
    logits: torch.Tensor, text: Sequence[int], asked: Asked, temperature: float
) -> torch.Tensor:
    """Logits [vocab] -> processed, and divided by the temperature unless it is 0."""
    ids, scores = torch.tensor([text]), logits.float().clone()[None]
    for token, value in asked.bias.items():
        scores[0, token] += value
    scores = RepetitionPenaltyLogitsProcessor(asked.repetition_penalty)(ids, scores)
    for token, times in zip(*np.unique(text[asked.prompt_len :], return_counts=True), strict=True):
        scores[0, int(token)] -= asked.frequency_penalty * int(times) + asked.presence_penalty
    if asked.allowed is not None:
        banned = torch.ones(scores.shape, dtype=torch.bool)
        banned[0, list(asked.allowed)] = False
        scores = scores.masked_fill(banned, -torch.inf)
    if temperature == 0:
        return scores[0]
    scores = TemperatureLogitsWarper(temperature)(ids, scores)
    if asked.top_k:
        scores = TopKLogitsWarper(asked.top_k)(ids, scores)
    if asked.top_p < 1:
        scores = TopPLogitsWarper(asked.top_p)(ids, scores)
    if asked.min_p:
        scores = MinPLogitsWarper(asked.min_p)(ids, scores)
    return scores[0]


def random_asked(rng: np.random.Generator, vocab: int, length: int) -> Asked:
    """Asks for any combination, each feature in about half of the rows, and at least a bias."""

    def maybe(asked: Asked, **features: object) -> Asked:
        return replace(asked, **features) if rng.random() < 0.5 else asked  # type: ignore[arg-type]

    biased = rng.choice(vocab, 5, replace=False).tolist()
    asked = Asked(prompt_len=int(rng.integers(length + 1)))
    asked = replace(asked, bias=dict(zip(biased, [1.5, -2.0, -INF, 100.0, 0.1], strict=True)))
    asked = maybe(asked, repetition_penalty=float(rng.uniform(0.5, 2)))
    asked = maybe(asked, presence_penalty=float(rng.uniform(-2, 2)))
    asked = maybe(asked, frequency_penalty=float(rng.uniform(-2, 2)))
    asked = maybe(asked, allowed=rng.choice(vocab, vocab // 2, replace=False).tolist())
    asked = maybe(asked, top_k=int(rng.integers(1, vocab)))
    asked = maybe(asked, top_p=float(rng.uniform(0.05, 0.99)))
    return maybe(asked, min_p=float(rng.uniform(0.001, 0.5)))


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize(("vocab", "ranks"), [(VOCAB, 1), (VOCAB, 2), (1001, 3), (33, 4)])
def test_combinations_equal_transformers(seed: int, vocab: int, ranks: int) -> None:
    rng = np.random.default_rng(seed)
    lengths = rng.integers(1, 60, 16).tolist()
    texts = [rng.integers(min(vocab, 40), size=length).tolist() for length in lengths]
    asked = {row: random_asked(rng, vocab, lengths[row]) for row in range(0, 16, 2)}
    temperatures = rng.choice([0.0, 0.5, 1.0, 1.7], 16).tolist()
    logits = random_logits(16, vocab, seed)
    before = logits.clone()
    processed = process(logits, make_step(texts, asked, temperatures, vocab), ranks)
    assert torch.equal(logits, before)
    for ours, (row, features) in zip(processed, asked.items(), strict=True):
        theirs = expected(logits[row], texts[row], features, temperatures[row])
        ours = ours / (temperatures[row] or 1)
        assert torch.equal(ours == -torch.inf, theirs == -torch.inf), (row, features)
        torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_tokens_are_those_of_the_processed_logits(ranks: int) -> None:
    """They use the random numbers that the rows have without features."""
    seed = 8
    print(f"seed {seed}")
    rng = np.random.default_rng(seed)
    texts = [rng.integers(VOCAB, size=length).tolist() for length in range(1, 41)]
    asked = {row: random_asked(rng, VOCAB, row + 1) for row in range(0, 40, 3)}
    step = make_step(texts, asked, rng.choice([0.0, 0.8, 1.3], 40).tolist())
    logits = random_logits(40, VOCAB, seed)
    tensors, rows = on_device(step), list(asked)

    def run(tp: TensorParallel) -> list[int]:
        vocab, local = shard(process(logits, step), tp)
        sampler = Sampler(vocab, tp, cpu_ops)
        return sampler(local, tensors.temperatures[rows], tensors.uniforms[rows]).tolist()

    assert sample(logits, step, ranks) == on_ranks(1, run)[0]


def test_logits_stay_where_features_change_nothing() -> None:
    asked = {
        0: Asked(logprobs=3),
        1: Asked(top_k=4, top_p=0.5),  # greedy
        2: Asked(top_k=4),
        3: Asked(),
    }
    step = make_step([[1]] * 4, asked, [0.7, 0.0, 0.7, 0.7])
    assert step.features
    vocab, _ = shard(random_logits(1, VOCAB, 0), TensorParallel())
    features = feature_tensors(step.features, step.temperatures, vocab, UPLOAD)
    assert features.rows.tolist() == [2]
    assert features.scored_rows.tolist() == [0]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("ranks", [1, 2])
def test_a_row_that_may_sample_nothing_samples_something(temperature: float, ranks: int) -> None:
    everything = dict.fromkeys(range(VOCAB), -INF)
    asked = {
        0: Asked(allowed=[], top_k=3, top_p=0.5, min_p=0.1),
        1: Asked(bias=everything),
        2: Asked(
            bias=everything, repetition_penalty=2.0, frequency_penalty=1.0, allowed=[3], top_p=0.5
        ),
    }
    step = make_step([[1, 2]] * 4, asked, [temperature] * 4)
    tokens = sample(random_logits(4, VOCAB, 2), step, ranks)
    assert len(tokens) == 3
    assert all(0 <= token < VOCAB for token in tokens)
