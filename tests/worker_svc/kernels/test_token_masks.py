from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch

from worker_svc.kernels import cpu_tokens
from worker_svc.kernels import token_masks as module
from worker_svc.kernels.token_masks import apply_masks, apply_masks_reference
from worker_svc.layers.embedding import VocabPartition


@pytest.mark.parametrize("function", [apply_masks, apply_masks_reference, cpu_tokens.apply_masks])
@pytest.mark.parametrize("ranks", [1, 2, 4])
@pytest.mark.parametrize("vocab_size", [32, 40, 1001])
def test_masked_tokens_are_impossible(
    function: Callable[..., None], ranks: int, vocab_size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As numpy unpacks the bits. Other rows, and padding, stay as they are."""
    monkeypatch.setattr(module, "TILE", 256)
    rng = np.random.default_rng(vocab_size)
    words = -(-vocab_size // 32)
    masked = torch.tensor([3, 0, 4], dtype=torch.int32)
    masks = rng.integers(-(2**31), 2**31, (3, words), dtype=np.int64).astype(np.int32)
    masks[2] = -1
    bits = np.unpackbits(masks.view(np.uint8), axis=1, bitorder="little")[:, :vocab_size]
    allowed = torch.ones(5, vocab_size, dtype=torch.bool)
    allowed[masked] = torch.from_numpy(bits.astype(bool))

    logits = torch.from_numpy(rng.standard_normal((5, vocab_size))).float()
    parts = []
    for rank in range(ranks):
        vocab = VocabPartition(vocab_size, rank, ranks)
        whole = torch.full((5, vocab.shard_size + 16), torch.nan)
        part = whole[:, : vocab.num_tokens]
        part.copy_(logits[:, vocab.start : vocab.start + vocab.num_tokens])
        local = whole[:, : vocab.shard_size]
        function(local, vocab.start, vocab.num_tokens, masked, torch.from_numpy(masks))
        assert whole[:, vocab.num_tokens :].isnan().all()
        parts.append(part)
    assert torch.equal(torch.cat(parts, dim=1), logits.masked_fill(~allowed, -torch.inf))


def test_no_rows_launch_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_apply_masks_kernel", None)
    none = torch.empty(0, dtype=torch.int32)
    apply_masks(torch.empty(0, 40), 0, 40, none, torch.empty(0, 2, dtype=torch.int32))
    apply_masks(torch.empty(1, 40), 0, 0, none.new_zeros(1), none.new_zeros(1, 2))
