"""Features through the whole model: the same on every path, and as transformers' logits have it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import Qwen3ForCausalLM

from tests.worker_svc.harness import Asked, Batch, batch_for
from tests.worker_svc.test_model_runner import NUM_BLOCKS, make_runner, oracle_logits, prompts
from worker_svc.model_runner import ModelRunner
from worker_svc.step.wire import Int32s
from worker_svc.step_result import StepResult

VOCAB = 301
# Every feature that changes logits, so that a wrong token in the history shows.
HEAVY = Asked(
    repetition_penalty=1.4,
    presence_penalty=0.3,
    frequency_penalty=0.4,
    top_k=40,
    top_p=0.9,
    min_p=0.01,
)


@pytest.fixture(scope="module")
def tiny(tiny_dir: Path) -> ModelRunner:
    """A runner whose cache holds what other tests left."""
    return make_runner(tiny_dir)[0]


@pytest.fixture
def batch(tiny: ModelRunner) -> Batch:
    return batch_for(tiny, NUM_BLOCKS)


def run(runner: ModelRunner, batch: Batch, *args: Any, **kwargs: Any) -> StepResult:
    return runner.launch(batch.step(*args, **kwargs)).wait()


def generate(
    runner: ModelRunner,
    batch: Batch,
    text: Sequence[int],
    count: int,
    *,
    chunk: int = 512,
    ahead: bool = False,
    crowd: Sequence[Sequence[int]] = (),
    asked: Asked = HEAVY,
) -> list[int]:
    """Generates `count` tokens of a sequence with features, at temperature 0.8 and seed 7.

    Args:
        chunk: most tokens of the prompt in a step.
        ahead: decodes are fed with what the device keeps, and waited for at the end.
        crowd: prompts of sequences that come and go, without features.
    """
    asked = replace(asked, prompt_len=len(text))
    pending: list[tuple[int, Any]] = []
    completion: list[int] = []
    parts = [text[i : i + chunk] for i in range(0, len(text), chunk)]
    row = 0
    for index in range(len(parts) + count - 1):
        if index < len(parts):
            mine: Sequence[int] = parts[index]
        else:
            mine = [-1 - row] if ahead else [completion[-1]]
        chunks = [(0, mine)]
        if crowd and index % 3 != 2:
            chunks.insert(index % 2, (100 + index, crowd[index % len(crowd)]))
        row = [seq for seq, _ in chunks].index(0)
        samples = index >= len(parts) - 1
        step = batch.step(
            chunks,
            silent=[] if samples else [0],
            temperatures=[0.8] * len(chunks),
            seeds=[7] * len(chunks),
            features={row: asked} if samples else None,
        )
        launched = runner.launch(step)
        if samples:
            pending.append((row, launched))
            if not ahead:
                completion.append(int(launched.wait().token_ids[row]))
    return [int(launched.wait().token_ids[row]) for row, launched in pending]


def heavy(text: Sequence[int], rows: int = 1) -> dict[str, Any]:
    """The features that `generate` asks for in rows whose prompt is `text`."""
    features = dict.fromkeys(range(rows), replace(HEAVY, prompt_len=len(text)))
    return {"temperatures": [0.8] * rows, "seeds": [7] * rows, "features": features}


@pytest.fixture(scope="module")
def text() -> list[int]:
    return prompts(VOCAB, [37], seed=4)[0]


@pytest.fixture(scope="module")
def completion(tiny: ModelRunner, text: list[int]) -> list[int]:
    """The tokens of a sequence that runs alone, the prompt whole, one step after another."""
    return generate(tiny, batch_for(tiny, NUM_BLOCKS), text, 30)


@pytest.mark.parametrize(
    "path",
    [
        {"chunk": 5},
        {"ahead": True},
        {"crowd": [[1, 2, 3], [4] * 20, [5]]},
        {"chunk": 16, "ahead": True, "crowd": [[1, 2, 3], [4] * 20, [5]]},
    ],
    ids=["chunked", "one step ahead", "batched", "all of it"],
)
def test_every_path_gives_the_same(
    tiny: ModelRunner,
    batch: Batch,
    text: list[int],
    completion: list[int],
    path: dict[str, Any],
) -> None:
    assert generate(tiny, batch, text, 30, **path) == completion


def test_features_matter(tiny: ModelRunner, text: list[int], completion: list[int]) -> None:
    for name, off in (
        ("repetition_penalty", 1.0),
        ("presence_penalty", 0.0),
        ("frequency_penalty", 0.0),
    ):
        asked = replace(HEAVY, **{name: off})
        assert generate(tiny, batch_for(tiny, NUM_BLOCKS), text, 30, asked=asked) != completion


def test_preempted_and_computed_again(
    tiny: ModelRunner, text: list[int], completion: list[int]
) -> None:
    """It is computed in other blocks, generated tokens included."""
    for done in (1, 12, 29):
        again = batch_for(tiny, NUM_BLOCKS)
        again.free = again.free[: -10 * done % 200]
        result = run(tiny, again, [(0, text + completion[:done])], **heavy(text))
        assert result.token_ids[0] == completion[done]


def test_a_shared_prefix_is_part_of_the_history(
    tiny: ModelRunner, batch: Batch, text: list[int], completion: list[int]
) -> None:
    """The prefix is another sequence's, whose blocks this one only refers to."""
    size = batch.limits.paging.block_size
    run(tiny, batch, [(1, text[: 2 * size])])
    batch.tables[0], batch.contexts[0] = list(batch.tables[1]), 2 * size
    result = run(tiny, batch, [(0, text[2 * size :])], **heavy(text))
    assert result.token_ids[0] == completion[0]


@pytest.mark.parametrize("ahead", [True, False])
def test_sequences_part_at_a_copied_block(
    tiny: ModelRunner, batch: Batch, text: list[int], completion: list[int], ahead: bool
) -> None:
    """Two sequences share whole blocks; the last one, partly filled, is copied as they part."""
    first = run(tiny, batch, [(0, text)], **heavy(text)).token_ids[0]
    *shared, last = batch.tables[0]
    copy = batch.free.pop()
    batch.tables[1], batch.contexts[1] = [*shared, copy], batch.contexts[0]
    tokens = [[-1], [-1]] if ahead else [[first], [first]]
    both = heavy(text, rows=2)
    result = run(tiny, batch, [(0, tokens[0]), (1, tokens[1])], copies=[(last, copy)], **both)
    assert result.token_ids.tolist() == [completion[1]] * 2
    # From now on, neither sees what the other writes.
    run(tiny, batch, [(0, [3]), (1, [completion[1]])], **both)
    parted = run(tiny, batch, [(0, [3]), (1, [completion[2]])], **both).token_ids
    whole = [(0, [*text, first, 3, 3])]
    alone = run(tiny, batch_for(tiny, NUM_BLOCKS), whole, **heavy(text)).token_ids
    assert parted.tolist() == [alone[0], completion[3]]


def test_blocks_are_copied_before_the_step_writes(tiny: ModelRunner, batch: Batch) -> None:
    """It writes to the copies, and to the blocks that were copied."""
    texts = prompts(VOCAB, [10, 10], seed=5)
    chunks = [(seq, [*texts[seq % 2], 9 + seq // 2]) for seq in range(4)]
    whole = run(tiny, batch_for(tiny, NUM_BLOCKS), chunks).token_ids
    run(tiny, batch, [(0, texts[0]), (1, texts[1])])
    copies = []
    for seq in (0, 1):
        copies.append((batch.tables[seq][0], batch.free.pop()))
        batch.tables[2 + seq], batch.contexts[2 + seq] = [copies[-1][1]], 10
    tokens = run(tiny, batch, [(seq, [9 + seq // 2]) for seq in range(4)], copies=copies).token_ids
    assert tokens.tolist() == whole.tolist()


def test_features_and_scores_of_some_rows_change_no_other(tiny: ModelRunner, batch: Batch) -> None:
    """Runs prompt chunks, decodes and rows that sample nothing."""
    texts = prompts(VOCAB, [20, 3, 41, 8], seed=6)
    sampling: dict[str, Any] = {"temperatures": [0.9] * 4, "seeds": [1, 2, 3, 4], "silent": [2]}
    chunks = [(i, text[:30]) for i, text in enumerate(texts)]
    plain = run(tiny, batch_for(tiny, NUM_BLOCKS), chunks, **sampling).token_ids
    asked = {1: Asked(allowed=[5], logprobs=1), 3: Asked(logprobs=0)}
    targets = {0: texts[0][1:], 2: []}
    mixed = run(tiny, batch, chunks, **sampling, features=asked, targets=targets)
    assert mixed.token_ids.tolist() == [plain[0], 5, -1, plain[3]]
    assert mixed.logprob_ids.tolist()[0] == 5
    assert mixed.logprob_ids.tolist()[2:] == [plain[3], *texts[0][1:]]
    assert len(mixed.logprob_values) == len(mixed.logprob_ids)


def check_scores(
    ids: Int32s, values: Any, oracle: torch.Tensor, tokens: Sequence[int], k: int
) -> None:
    """Checks the scores of consecutive tokens against the oracle's logits [N, vocab]."""
    logprobs = oracle.log_softmax(1)
    ids, values = ids.reshape(-1, 1 + k), values.reshape(-1, 1 + k)
    assert ids[:, 0].tolist() == list(tokens)
    assert ids[:, 1:].tolist() == logprobs.topk(k).indices.tolist()
    theirs = logprobs.gather(1, torch.from_numpy(ids.astype(np.int64)))
    np.testing.assert_allclose(values, theirs, atol=1e-4)


@pytest.mark.parametrize("k", [0, 1, 7, VOCAB])
def test_logprobs_are_of_the_models_own_logits(
    tiny: ModelRunner, tiny_oracle: Qwen3ForCausalLM, batch: Batch, k: int
) -> None:
    """It does not matter what else the row asks for."""
    texts = prompts(VOCAB, [20, 3, 11], seed=8)
    asked = {0: replace(HEAVY, logprobs=k, bias={4: 50.0}), 2: Asked(logprobs=k)}
    result = run(tiny, batch, list(enumerate(texts)), temperatures=[1.0] * 3, features=asked)
    assert result.token_ids[0] == 4
    oracle = torch.stack([oracle_logits(tiny_oracle, texts[i])[-1] for i in (0, 2)])
    tokens = result.token_ids[[0, 2]].tolist()
    check_scores(result.logprob_ids, result.logprob_values, oracle, tokens, k)


@pytest.mark.parametrize("chunk", [300, 299, 64, 1])
@pytest.mark.parametrize("k", [0, 5])
def test_prompt_logprobs(
    tiny: ModelRunner, tiny_oracle: Qwen3ForCausalLM, batch: Batch, chunk: int, k: int
) -> None:
    """Scores more tokens than fit at a time, whole and in chunks, beside another sequence."""
    text, other = prompts(VOCAB, [300, 60], seed=9)
    if chunk == 1:
        text = text[:20]
    ids, values = [], []
    for start in range(0, len(text), chunk):
        part = text[start : start + chunk]
        targets = text[start + 1 : start + 1 + chunk]
        last = start + chunk >= len(text)
        beside = other[start : start + 1] or [1]
        result = run(
            tiny,
            batch,
            [(1, beside), (0, part)],
            silent=[] if last else [0],
            features={1: Asked(logprobs=k)} if last else None,
            targets={1: targets},
            num_prompt_logprobs=k,
        )
        # Those of the sampled tokens come first.
        sampled = 1 + k if last else 0
        assert len(result.logprob_ids) == sampled + len(targets) * (1 + k)
        ids.append(result.logprob_ids[sampled:])
        values.append(result.logprob_values[sampled:])
    oracle = oracle_logits(tiny_oracle, text)[:-1]
    check_scores(np.concatenate(ids), np.concatenate(values), oracle, text[1:], k)


def test_rows_with_nothing_to_score(tiny: ModelRunner, batch: Batch) -> None:
    result = run(tiny, batch, [(0, [1]), (1, [2])], targets={0: [], 1: []})
    assert len(result.logprob_ids) == 0
    assert (result.token_ids >= 0).all()
