from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch

from tests.worker_svc.device import (
    DEVICE,
    ON_GPU,
    ROWS,
    VOCAB_SIZES,
    by_device,
    of_cpu,
)
from tests.worker_svc.thread_ranks import on_parts
from worker_svc.kernels.triton.sampling import token_masks as module
from worker_svc.kernels.triton.sampling.token_masks import apply_masks
from worker_svc.layers.embedding import VocabPartition


@pytest.mark.parametrize(
    "function",
    [apply_masks, *of_cpu("cpu.sampling.tokens", "apply_masks")],
)
@pytest.mark.parametrize("ranks", [1, 2, 4])
@pytest.mark.parametrize("vocab_size", by_device(cpu=[32, 40, 1001], gpu=[40, *VOCAB_SIZES]))
@pytest.mark.parametrize("rows", by_device(cpu=[5], gpu=ROWS))
def test_masked_tokens_are_impossible(
    function: Callable[..., None],
    ranks: int,
    vocab_size: int,
    rows: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The bits are those that numpy unpacks; one mask excludes nothing. Other rows, and padding,
    stay as they are."""
    if not ON_GPU:
        monkeypatch.setattr(module, "TILE", 256)
    rng = np.random.default_rng(vocab_size)
    words = -(-vocab_size // 32)
    masked = torch.from_numpy(rng.permutation(rows)[: rows // 2 + 1].astype(np.int32))
    masks = rng.integers(-(2**31), 2**31, (len(masked), words), dtype=np.int64).astype(np.int32)
    masks[2:3] = -1
    bits = np.unpackbits(masks.view(np.uint8), axis=1, bitorder="little")[:, :vocab_size]
    allowed = torch.ones(rows, vocab_size, dtype=torch.bool)
    allowed[masked] = torch.from_numpy(bits.astype(bool))

    logits = torch.from_numpy(rng.standard_normal((rows, vocab_size), np.float32))
    place = masked.to(DEVICE), torch.from_numpy(masks).to(DEVICE)

    def mask(part: torch.Tensor, vocab: VocabPartition) -> None:
        function(part, vocab.start, vocab.num_tokens, *place)

    found = on_parts(logits.to(DEVICE), ranks, mask).cpu()
    assert torch.equal(found, logits.masked_fill(~allowed, -torch.inf))
