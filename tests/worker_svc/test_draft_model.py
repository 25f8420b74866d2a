"""Tokens drafted by a second model: right ones are accepted, and wrong ones change no token."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import LlamaForCausalLM

from tests.worker_svc.device import DEVICE
from tests.worker_svc.drafting import (
    NUM_BLOCKS,
    Speculation,
    cut,
    make_runner,
    plain_tokens,
)
from tests.worker_svc.harness import save_model, worker_settings
from tests.worker_svc.test_model_runner import prompts
from tests.worker_svc.thread_ranks import on_ranks
from worker_svc import model_runner
from worker_svc.devices.cpu import CpuPlatform
from worker_svc.errors import StartError
from worker_svc.kept_memory.memory import KeptMemory, kept_version
from worker_svc.model_runner import ModelRunner
from worker_svc.ranks.distributed import Ranks, TensorParallel

pytestmark = pytest.mark.skipif(DEVICE.type != "cpu", reason="rounds differently: see gpu_path")

LENGTH = 24
ALONE = TensorParallel()
TEXTS = prompts(301, [30, 7, 1, 45])


@pytest.fixture(scope="module")
def other_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of another family and shape, with the vocabulary of `tiny_dir`."""
    path = tmp_path_factory.mktemp("other")
    save_model(path, family=LlamaForCausalLM, hidden_size=32, num_hidden_layers=1, head_dim=24)
    return path


def begin(runner: ModelRunner, texts: list[list[int]], temperature: float = 0.0) -> Speculation:
    """Computes these prompts."""
    speculation = Speculation(runner, texts, temperature)
    speculation.prefill()
    return speculation


def speculate(runner: ModelRunner, temperature: float) -> Speculation:
    """Runs steps of all `TEXTS`, with random numbers of drafted tokens, until each has `LENGTH`
    more tokens. Half of the steps refer to the tokens of the last step."""
    rng = np.random.default_rng(0)
    speculation = begin(runner, TEXTS, temperature)
    while any(
        len(tokens) < len(text) + LENGTH
        for tokens, text in zip(speculation.tokens, TEXTS, strict=True)
    ):
        order = rng.permutation(len(TEXTS)).tolist()
        depths = rng.integers(0, 6, len(TEXTS)).tolist()
        speculation.step(dict(zip(order, depths, strict=True)), known=bool(rng.integers(2)))
    return speculation


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"kv_dtype": "int8"},
        {"dtype": "bfloat16"},
        {"quantization": "int4", "draft_quantization": "int4", "kv_dtype": "int8"},
    ],
    ids=str,
)
def test_a_model_accepts_all_that_it_drafts(
    tmp_path: Path, settings: dict[str, Any], temperature: float
) -> None:
    save_model(tmp_path, intermediate_size=96)
    expected = plain_tokens(make_runner(tmp_path, **settings), TEXTS, LENGTH, temperature)
    speculation = speculate(make_runner(tmp_path, tmp_path, **settings), temperature)
    assert cut(speculation.tokens, TEXTS, LENGTH) == expected
    assert speculation.num_accepted == speculation.num_drafted > 50


@pytest.mark.parametrize(("format", "temperature"), [("int4", 0.0), ("int8", 1.0)])
def test_most_drafts_of_a_quantized_model_are_accepted(
    tmp_path: Path, format: str, temperature: float
) -> None:
    save_model(tmp_path, intermediate_size=96)
    expected = plain_tokens(make_runner(tmp_path), TEXTS, LENGTH, temperature)
    runner = make_runner(tmp_path, tmp_path, draft_quantization=format)
    speculation = speculate(runner, temperature)
    assert cut(speculation.tokens, TEXTS, LENGTH) == expected
    print(f"accepted {speculation.num_accepted} of {speculation.num_drafted}")
    assert 0.5 < speculation.num_accepted / speculation.num_drafted < 1


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("settings", [{}, {"kv_dtype": "int8"}, {"block_size": 4}], ids=str)
def test_wrong_drafts_change_no_token(
    tiny_dir: Path, other_dir: Path, settings: dict[str, Any], temperature: float
) -> None:
    expected = plain_tokens(make_runner(tiny_dir, **settings), TEXTS, LENGTH, temperature)
    speculation = speculate(make_runner(tiny_dir, other_dir, **settings), temperature)
    assert cut(speculation.tokens, TEXTS, LENGTH) == expected
    assert speculation.num_accepted < speculation.num_drafted / 5


def test_drafts_are_in_the_order_of_their_rows(tiny_dir: Path) -> None:
    """Groups of different depth, beside chunks of prompts, one of more tokens than run at once."""
    expected = plain_tokens(make_runner(tiny_dir), TEXTS[:2], 8)
    runner = make_runner(tiny_dir, tiny_dir)
    speculation = begin(runner, TEXTS[:2])
    chunks = [(5, prompts(301, [300])[0]), (6, TEXTS[3][:20])]
    found = speculation.step({1: 5, 0: 2}, chunks, silent=[6])
    assert found == [expected[1][8:13], expected[0][31:33]]
    assert speculation.num_accepted == 7

    # The chunks are in the draft model's cache, too.
    fresh = Speculation(runner, TEXTS[3:], batch=speculation.batch)
    fresh.batch.contexts[0], fresh.batch.tables[0] = 20, speculation.batch.tables[6]
    fresh.tokens = [TEXTS[3][20:]]
    fresh.prefill()
    fresh.step({0: 4})
    assert fresh.num_accepted == 4


def test_known_drafts_are_in_the_draft_models_cache(tiny_dir: Path) -> None:
    """Rows of one sequence whose tokens come from elsewhere, then rows with drafted tokens."""
    expected = plain_tokens(make_runner(tiny_dir), TEXTS[:1], 12)[0]
    speculation = begin(make_runner(tiny_dir, tiny_dir), TEXTS[:1])
    last = len(TEXTS[0])
    speculation.tokens = [expected[: last + 3]]
    speculation.step({0: 3}, [(0, [token]) for token in expected[last : last + 2]])
    assert speculation.num_accepted == 3


def test_copies_are_made_in_the_draft_models_cache(tiny_dir: Path) -> None:
    speculation = begin(make_runner(tiny_dir, tiny_dir), TEXTS[:1])
    batch = speculation.batch
    copies = [(block, batch.free.pop()) for block in batch.tables[0]]
    batch.contexts[1], batch.tables[1] = batch.contexts[0], [to for _, to in copies]
    speculation.tokens.append([*speculation.tokens[0]])
    speculation.step({1: 5}, copies=copies)
    assert speculation.num_accepted == 5


@pytest.mark.parametrize("settings", [{}, {"kv_dtype": "int8"}], ids=str)
def test_garbage_in_the_draft_models_cache_changes_no_token(
    tiny_dir: Path, settings: dict[str, Any]
) -> None:
    """NaN, or any bytes that a cache in 8 bits may hold, with scales that are NaN."""
    expected = plain_tokens(make_runner(tiny_dir, **settings), TEXTS, 12, 0.5)
    runner = make_runner(tiny_dir, tiny_dir, **settings)
    speculation = begin(runner, TEXTS, 0.5)
    assert runner._draft
    for cache in runner._draft.caches:
        cache.view(torch.uint8).fill_(0xFF)
    for _ in range(11):
        speculation.step(dict.fromkeys(range(len(TEXTS)), 2))
    assert cut(speculation.tokens, TEXTS, 12) == expected
    assert speculation.num_accepted < speculation.num_drafted


def test_a_new_process_keeps_the_models_cache_but_not_the_draft_models(tiny_dir: Path) -> None:
    expected = plain_tokens(make_runner(tiny_dir), TEXTS, 12)
    memory = KeptMemory()
    settings = worker_settings(tiny_dir, max_num_seqs=32, speculation=str(tiny_dir))
    first = ModelRunner(settings, memory=memory)
    first.configure(1, NUM_BLOCKS)
    speculation = begin(first, TEXTS)
    speculation.step(dict.fromkeys(range(len(TEXTS)), 3))
    assert speculation.num_accepted == speculation.num_drafted

    second = ModelRunner(settings, memory=memory)
    assert second.info == first.info
    second.configure(2, NUM_BLOCKS, keep=first.cache_id)
    after = Speculation(second, TEXTS, batch=speculation.batch)
    after.tokens = speculation.tokens
    for _ in range(8):
        after.step(dict.fromkeys(range(len(TEXTS)), 3))
    assert cut(after.tokens, TEXTS, 12) == expected

    fresh = begin(second, TEXTS)  # the draft model's weights are kept
    fresh.step(dict.fromkeys(range(len(TEXTS)), 3))
    assert fresh.num_accepted == fresh.num_drafted


def test_a_new_epoch_keeps_the_draft_models_cache(tiny_dir: Path) -> None:
    runner = make_runner(tiny_dir, tiny_dir)
    speculation = begin(runner, TEXTS)
    runner.configure(2, NUM_BLOCKS, keep=runner.cache_id)
    speculation.step(dict.fromkeys(range(len(TEXTS)), 3))
    assert speculation.num_accepted == speculation.num_drafted


def test_a_changed_draft_model_has_another_version(tmp_path: Path, tiny_dir: Path) -> None:
    save_model(tmp_path)
    settings = worker_settings(tiny_dir, speculation=str(tmp_path))
    before = kept_version(settings)
    assert kept_version(settings) == before
    save_model(tmp_path, num_hidden_layers=1)
    assert kept_version(settings) != before


def test_the_draft_models_cache_takes_a_share_of_the_memory(
    tiny_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each token of the model takes 768 bytes and an id of 4, so a draft model of equal shape
    nearly halves the number of blocks."""
    monkeypatch.setattr(CpuPlatform, "cache_bytes", lambda *_: 16 * 772 * 1000)
    for draft, num_blocks in ((None, 1000), (tiny_dir, 1000 * 772 // (772 + 768))):
        assert make_runner(tiny_dir, draft).info.num_blocks == num_blocks


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_two_ranks_draft_the_tokens_of_one(
    tiny_dir: Path, other_dir: Path, temperature: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They accept them, too, if both models are the same."""
    ranks: dict[int, TensorParallel] = {}
    monkeypatch.setattr(Ranks, "join", lambda *_: None)
    monkeypatch.setattr(model_runner, "TensorParallel", lambda rank, *_: ranks.get(rank, ALONE))
    expected = plain_tokens(make_runner(tiny_dir), TEXTS, LENGTH, temperature)
    alone = speculate(make_runner(tiny_dir, other_dir), temperature)

    def run(tp: TensorParallel, draft: Path) -> Speculation:
        ranks[tp.rank] = tp
        return speculate(make_runner(tiny_dir, draft, rank=tp.rank, tp=2), temperature)

    for draft in (other_dir, tiny_dir):
        first, second = on_ranks(2, lambda tp, draft=draft: run(tp, draft))
        assert first.tokens == second.tokens
        assert first.num_accepted == second.num_accepted
        assert cut(first.tokens, TEXTS, LENGTH) == expected
        if draft == other_dir:
            assert (first.tokens, first.num_accepted) == (alone.tokens, alone.num_accepted)
        else:
            assert first.num_accepted == first.num_drafted


@pytest.mark.parametrize(
    ("settings", "shape", "reason"),
    [
        ({}, {"vocab_size": 300}, "vocab_size: 300, but the model's is 301"),
        ({"draft_quantization": "int4"}, {"hidden_size": 48}, "quantization"),
        ({"block_size": 5}, {"dtype": torch.bfloat16}, "block_size: 5 is not a multiple of 2"),
        (
            {"tp": 2},
            {"num_attention_heads": 3, "num_key_value_heads": 1},
            "num_attention_heads: 3 cannot be split over tp = 2",
        ),
    ],
)
def test_what_cannot_draft_is_named(
    tiny_dir: Path, tmp_path: Path, settings: dict[str, Any], shape: dict[str, Any], reason: str
) -> None:
    save_model(tmp_path, **shape)
    with pytest.raises(StartError, match=f"^speculation: {reason}"):
        make_runner(tiny_dir, tmp_path, **settings)


def test_a_draft_model_that_is_not_there(tiny_dir: Path) -> None:
    with pytest.raises(StartError, match=r"^speculation: .*/nothing"):
        make_runner(tiny_dir, tiny_dir / "nothing")


@pytest.mark.parametrize("value", ["auto", "none", "ngram"])
def test_other_values_name_no_draft_model(tiny_dir: Path, value: str) -> None:
    assert not ModelRunner(worker_settings(tiny_dir, speculation=value)).drafts


def test_tokenizers_need_equal_vocabularies(tmp_path: Path) -> None:
    """Added tokens may differ. Without a tokenizer, nothing is compared."""
    target, draft = tmp_path / "target", tmp_path / "draft"
    for each in (target, draft):
        save_model(each)
    vocab = {"a": 0, "b": 1}

    def write(path: Path, **tokenizer: Any) -> None:
        (path / "tokenizer.json").write_text(json.dumps(tokenizer))

    write(target, model={"vocab": vocab})
    make_runner(target, draft)
    write(draft, model={"vocab": vocab}, added_tokens=[{"id": 2, "content": "<think>"}])
    make_runner(target, draft)
    write(draft, model={"vocab": {"b": 0, "a": 1}})
    with pytest.raises(StartError, match=r"^speculation: tokenizer\.json: not the vocabulary"):
        make_runner(target, draft)
    write(draft, model=[])
    with pytest.raises(StartError, match=r"^speculation: tokenizer\.json: cannot be read"):
        make_runner(target, draft)
