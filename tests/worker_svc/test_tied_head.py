"""Checkpoints of tied models that hold an output head beside the embedding."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import Qwen3ForCausalLM

from tests.worker_svc.device import DEVICE
from tests.worker_svc.harness import batch_for, load_rank, save_model
from tests.worker_svc.test_kept_memory import runner_of
from tests.worker_svc.test_model_runner import NUM_BLOCKS, last_logits, make_runner, prompts
from tests.worker_svc.thread_ranks import on_ranks
from worker_svc.kept_memory.memory import KeptMemory
from worker_svc.kernels.ops import PackedWeight
from worker_svc.layers.embedding import VocabPartition
from worker_svc.loader import Rows, WeightLoader
from worker_svc.ranks.distributed import TensorParallel

(TOKENS,) = prompts(301, [40])


def add_head(model_dir: Path, last_row: float | None = None) -> torch.Tensor:
    """Adds a copy of the embedding as the head, whose last row may differ."""
    path = model_dir / "model.safetensors"
    tensors = load_file(path)
    head = tensors["model.embed_tokens.weight"].clone()
    if last_row is not None:
        head[-1] = last_row
    save_file({**tensors, "lm_head.weight": head}, path, metadata={"format": "pt"})
    return head


@pytest.fixture
def heads(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The first rows of the heads that are loaded beside an embedding."""
    load = WeightLoader.head
    started: list[int] = []

    def noting(self: WeightLoader, rows: Rows, *args: int) -> PackedWeight:
        started.append(rows.start)
        return load(self, rows, *args)

    monkeypatch.setattr(WeightLoader, "head", noting)
    return started


@pytest.mark.parametrize("quantization", ["none", "int8", "int4"])
def test_a_copy_of_the_embedding_is_not_loaded(
    tmp_path: Path, heads: list[int], quantization: str
) -> None:
    save_model(tmp_path, intermediate_size=128)
    found = []
    for _ in range(2):
        runner, batch = make_runner(tmp_path, quantization=quantization)
        found.append(runner.logits(batch.step([(0, TOKENS)])))
        add_head(tmp_path)
    assert torch.equal(*found)
    assert heads == []


def test_a_head_that_differs_is_the_head(tmp_path: Path) -> None:
    save_model(tmp_path)
    add_head(tmp_path, last_row=1)
    oracle = Qwen3ForCausalLM.from_pretrained(tmp_path)
    assert not torch.equal(oracle.lm_head.weight, oracle.model.embed_tokens.weight)
    torch.testing.assert_close(*last_logits(tmp_path, oracle))


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_only_the_rank_whose_rows_differ_loads_them(
    tmp_path: Path, heads: list[int], ranks: int
) -> None:
    save_model(tmp_path, num_attention_heads=6, num_key_value_heads=6, intermediate_size=96)
    head = add_head(tmp_path, last_row=1)
    hidden = torch.randn(5, 64, generator=torch.Generator().manual_seed(0))

    def logits(tp: TensorParallel) -> torch.Tensor:
        return load_rank(tmp_path, tp).decoder.lm_head(hidden)

    found = torch.cat(on_ranks(ranks, logits), dim=1)
    torch.testing.assert_close(found[:, :301], hidden @ head.T, rtol=1e-5, atol=1e-5)
    assert heads == [VocabPartition(301, ranks - 1, ranks).start]


@pytest.mark.skipif(DEVICE.type != "cpu", reason="memory of a GPU is not kept")
@pytest.mark.parametrize("last_row", [None, 1.0])
@pytest.mark.parametrize("quantization", ["none", "int8"])
def test_the_next_fork_has_the_head(
    tmp_path: Path, quantization: str, last_row: float | None
) -> None:
    save_model(tmp_path)
    add_head(tmp_path, last_row)
    memory, found = KeptMemory(), []
    for _ in range(2):
        runner = runner_of(tmp_path, memory, quantization=quantization)
        runner.configure(1, NUM_BLOCKS)
        found.append(runner.logits(batch_for(runner, NUM_BLOCKS).step([(0, TOKENS)])))
    assert torch.equal(*found)
