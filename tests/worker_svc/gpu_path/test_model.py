"""The whole GPU path on CPU tensors: staging, Triton's kernels in its interpreter, the padded steps
that CUDA graphs run, and the FlashAttention backends on stand-ins."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.worker_svc.gpu_path.flash_attention import FlashAttention3Ops, install_flash_attn
from tests.worker_svc.harness import Asked, Batch, limits, save_model, worker_settings
from tests.worker_svc.interpreted import InterpretedPlatform
from tests.worker_svc.test_model_runner import oracle_logits, prompts
from worker_svc.cuda_graph import graph_sizes
from worker_svc.model_runner import ModelRunner, StepResult

VOCAB = 150
SMALL: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 40,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 96,
}
NUM_BLOCKS = 24
MAX_NUM_SEQS = 4  # graphs of 1, 2 and 4


def make_runner(
    path: Path, *, captures: bool = True, **overrides: Any
) -> tuple[ModelRunner, Batch, InterpretedPlatform]:
    values = {"attention": "triton", "max_num_seqs": MAX_NUM_SEQS, "max_num_batched_tokens": 16}
    settings = worker_settings(path, **{**values, **overrides})
    platform = InterpretedPlatform(settings, captures=captures)
    runner = ModelRunner(settings, platform)
    runner.configure(1, NUM_BLOCKS)
    batch = Batch(
        limits(
            vocab_size=VOCAB,
            num_blocks=NUM_BLOCKS,
            block_size=runner.info.block_size,
            max_num_seqs=MAX_NUM_SEQS,
        )
    )
    return runner, batch, platform


@pytest.fixture(scope="module")
def small_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("small")
    save_model(path, **SMALL)
    return path


@pytest.fixture(scope="module")
def tokens(small_dir: Path) -> list[list[int]]:
    """Of `decode`, from the CPU's path: other kernels, other layouts, the same random numbers."""
    runner = ModelRunner(worker_settings(small_dir, max_num_seqs=MAX_NUM_SEQS))
    runner.configure(1, NUM_BLOCKS)
    return decode(runner, Batch(limits(vocab_size=VOCAB, num_blocks=NUM_BLOCKS)))


@pytest.fixture
def flash_attention_3() -> Iterator[FlashAttention3Ops]:
    ops = FlashAttention3Ops()
    yield ops
    ops.close()


def check_logits(path: Path, oracle: Any, **overrides: Any) -> None:
    """Prompts whole and in chunks, decodes, and all of them in one step, against transformers."""
    runner, batch, _ = make_runner(path, captures=False, **overrides)
    texts = prompts(VOCAB, [1, 23, 60, 16])
    texts[0] += prompts(VOCAB, [3], seed=1)[0]
    worst = 0.0
    for chunks in (
        [(0, 1), (1, 20), (2, 17)],
        [(2, 43), (3, 15), (0, 1)],
        [(1, 1), (0, 2), (3, 1)],
    ):
        starts = {seq: batch.contexts.get(seq, 0) for seq, _ in chunks}
        parts = [(seq, texts[seq][starts[seq] : starts[seq] + n]) for seq, n in chunks]
        logits = runner.logits(batch.step(parts))[:, :VOCAB]
        for row, (seq, _) in zip(logits, chunks, strict=True):
            expected = oracle_logits(oracle, texts[seq][: batch.contexts[seq]])[-1]
            worst = max(worst, (row - expected).abs().max().item())
    print(f"largest difference {worst:.1e}")
    assert worst < 1e-4


@pytest.mark.parametrize(
    ("shape", "block_size"),
    [
        ({"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}, 16),
        ({"attention_bias": True, "head_dim": 24, "tie_word_embeddings": False}, 7),
    ],
)
def test_logits_match_transformers(tmp_path: Path, shape: dict[str, Any], block_size: int) -> None:
    oracle = save_model(tmp_path, **{**SMALL, **shape})
    check_logits(tmp_path, oracle, block_size=block_size)


def decode(runner: ModelRunner, batch: Batch) -> list[list[int]]:
    """Prompts, then decodes of sequences that come and go, fed with what the step before sampled;
    all launched one after another, and only then waited for."""
    texts = prompts(VOCAB, [3, 18, 1])
    temperatures, seeds = [0.0, 0.9, 1.3], [5, 6, 7]
    steps: list[tuple[list[int], list[list[int]]]] = [
        ([0, 1, 2], texts),
        ([0, 1, 2], [[-1], [-2], [-3]]),
        ([2, 0], [[-3], [-1]]),
        ([0], [[-2]]),
        ([0, 1], [[-1], [7]]),  # one that was away, with a known token
    ]
    pending = []
    for seqs, ids in steps:
        step = batch.step(
            list(zip(seqs, ids, strict=True)),
            temperatures=[temperatures[seq] for seq in seqs],
            seeds=[seeds[seq] for seq in seqs],
        )
        pending.append(runner.launch(step))
    return [step.wait()[0].tolist() for step in pending]


def decode_with_features(runner: ModelRunner, batch: Batch) -> list[StepResult]:
    """The same sequences: prompts that are scored, then decodes that share steps with plain ones,
    the last of them in a copied block."""
    texts = prompts(VOCAB, [3, 18, 1])
    heavy = Asked(repetition=1.4, presence=0.3, frequency=0.4, top_k=30, top_p=0.9, min_p=0.01)
    first = replace(heavy, prompt_len=3, logprobs=0)
    second = Asked(bias={7: 3.0, 8: -np.inf}, allowed=range(0, VOCAB, 2), logprobs=3)
    steps: list[tuple[list[int], list[list[int]], dict[int, Asked]]] = [
        ([0, 1, 2], texts, {0: first, 1: second}),
        ([0, 1, 2], [[-1], [-2], [-3]], {0: first, 1: second}),
        ([2, 0], [[-3], [-1]], {1: first}),
        ([0], [[-2]], {0: first}),
        ([3, 1], [[-1], [7]], {0: first}),
    ]
    pending = []
    for index, (seqs, ids, asked) in enumerate(steps):
        copies = []
        if index == 4:
            copies = [(batch.tables[0][0], batch.free.pop())]
            batch.tables[3], batch.contexts[3] = [copies[0][1]], batch.contexts[0]
        step = batch.step(
            list(zip(seqs, ids, strict=True)),
            temperatures=[0.9] * len(seqs),
            seeds=[5 + seq for seq in seqs],
            copies=copies,
            features=asked,
            targets={1: texts[1][1:]} if index == 0 else None,
            num_prompt_logprobs=2,
        )
        pending.append(runner.launch(step))
    return [step.wait() for step in pending]


def poison(runner: ModelRunner) -> None:
    for cache in runner._caches:
        cache.fill_(torch.nan)


def test_padded_steps_on_static_buffers_equal_eager_ones(
    small_dir: Path, tokens: list[list[int]]
) -> None:
    """Bit for bit: tokens, the cache, and what of the cache nobody may write."""
    caches = []
    for captures in (False, True):
        runner, batch, platform = make_runner(small_dir, captures=captures, block_size=16)
        assert len(platform.captured) == (3 if captures else 0)
        poison(runner)
        assert decode(runner, batch) == tokens
        caches.append(runner._caches[0])
    eager, padded = caches
    assert torch.equal(eager.isnan(), padded.isnan())
    assert torch.equal(eager.nan_to_num(), padded.nan_to_num())
    unwritten = eager[0].isnan().flatten(2).all(2).sum().item()
    assert unwritten == NUM_BLOCKS * 16 - sum(batch.contexts.values())


@pytest.mark.parametrize("captures", [False, True])
def test_features_equal_those_of_a_cpu(small_dir: Path, captures: bool) -> None:
    """Beside the graphs, which know nothing of them."""
    cpu = ModelRunner(worker_settings(small_dir, max_num_seqs=MAX_NUM_SEQS))
    cpu.configure(1, NUM_BLOCKS)
    theirs = decode_with_features(cpu, Batch(limits(vocab_size=VOCAB, num_blocks=NUM_BLOCKS)))
    runner, batch, _ = make_runner(
        small_dir, captures=captures, block_size=16, max_num_batched_tokens=32
    )
    ours = decode_with_features(runner, batch)
    for here, there in zip(ours, theirs, strict=True):
        assert here.token_ids.tolist() == there.token_ids.tolist()
        assert here.logprob_ids.tolist() == there.logprob_ids.tolist()
        np.testing.assert_allclose(here.logprob_values, there.logprob_values, atol=1e-4)
    assert [len(result.logprob_ids) for result in ours] == [1 + 4 + 17 * 3, 5, 1, 1, 1]


def test_graphs_leave_their_logits_in_one_buffer(small_dir: Path) -> None:
    """Kept in each graph's own memory, they would take it many times."""
    runner, batch, _ = make_runner(small_dir, block_size=16)
    assert runner._graphs
    addresses = set()
    for rows in (1, 2, 4):
        step = batch.step([(seq, [seq]) for seq in range(rows)])
        with torch.inference_mode():
            _, logits = runner._graphs.replay(step)
        assert logits.shape[0] == rows
        addresses.add(logits.data_ptr())
    assert len(addresses) == 1


def test_a_new_epoch_keeps_the_graphs_of_a_cache_of_the_same_size(
    small_dir: Path, tokens: list[list[int]]
) -> None:
    runner, batch, platform = make_runner(small_dir, block_size=16)
    runner.configure(2, NUM_BLOCKS)
    assert len(platform.captured) == 3
    runner.configure(3, NUM_BLOCKS + 1)
    assert len(platform.captured) == 6
    assert decode(runner, batch) == tokens


def test_fa3(
    small_dir: Path,
    tmp_path: Path,
    flash_attention_3: FlashAttention3Ops,
    tokens: list[list[int]],
) -> None:
    runner, batch, _ = make_runner(small_dir, attention="fa3", block_size=16)
    assert runner.info.attention_backend == "fa3"
    assert decode(runner, batch) == tokens
    # What layers share is computed once a step.
    flash_attention_3.calls.clear()
    oracle = save_model(tmp_path, **{**SMALL, "num_hidden_layers": 2})
    check_logits(tmp_path, oracle, attention="fa3", block_size=16)
    assert flash_attention_3.calls.count("fwd") == 2 * flash_attention_3.calls.count("schedule")


@pytest.mark.parametrize("attention", ["flash_attn", "auto"])
def test_flash_attn(
    small_dir: Path, monkeypatch: pytest.MonkeyPatch, tokens: list[list[int]], attention: str
) -> None:
    """Without FlashAttention 3, auto takes FlashAttention 2 for prompts and Triton for decodes."""
    calls = install_flash_attn(monkeypatch)
    runner, batch, _ = make_runner(small_dir, attention=attention)
    assert runner.info.block_size == 256
    assert decode(runner, batch) == tokens
    if attention == "auto":
        assert runner.info.attention_backend == "flash_attn+triton"
        assert set(calls) == {"flash_attn_varlen_func"}
    else:
        assert runner.info.attention_backend == "flash_attn"
        assert set(calls) == {"flash_attn_varlen_func", "flash_attn_with_kvcache"}


@pytest.mark.parametrize("limit", [1, 3, 8, 9, 16, 100, 256, 257, 600, 1024])
def test_graph_sizes(limit: int) -> None:
    sizes = graph_sizes(limit)
    assert sizes == sorted(set(sizes))
    assert sizes[-1] == limit
    for seqs in range(1, limit + 1):
        size = next(size for size in sizes if size >= seqs)
        assert size - seqs < max(2, 16, seqs / 8 + 1)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_half_precision(small_dir: Path, dtype: str) -> None:
    """How exact it is, `make gpu-check` finds out; here that no dtypes are mixed, nothing overflows
    and nothing is read that was not written."""
    runner, batch, _ = make_runner(small_dir, captures=False, block_size=16, dtype=dtype)
    poison(runner)
    tokens = np.concatenate(decode(runner, batch))
    assert ((tokens >= 0) & (tokens < VOCAB)).all()
