from __future__ import annotations

from collections.abc import Callable
from itertools import product

import numpy as np
import pytest
import torch

from tests.worker_svc.device import DEVICE, TOKENS, WIDTHS, by_device, int32
from tests.worker_svc.kernels.cpu import eager_ops
from tests.worker_svc.kernels.triton.precision import DTYPES, assert_rounded_once, poisoned_memory
from worker_svc.kernels.ops import PlainWeight
from worker_svc.kernels.triton.embedding import embed
from worker_svc.kernels.triton.ops import pack
from worker_svc.layers.embedding import VocabPartition
from worker_svc.weights.quantization.formats import QuantizedWeight

VOCAB = 1001

OF_CPU = by_device(cpu=[eager_ops.embed], gpu=[])
both = pytest.mark.parametrize("embed", [embed, *OF_CPU])


@pytest.mark.parametrize(
    ("ranks", "size", "dtype", "tokens"),
    by_device(
        cpu=[
            (1, 16, torch.float32, 20),
            (1, 2560, torch.bfloat16, 20),
            (2, 100, torch.bfloat16, 20),
            (2, 1024, torch.float32, 20),
            (4, 100, torch.float16, 20),
            (4, 2560, torch.float16, 20),
        ],
        gpu=product((1, 2, 4), WIDTHS, DTYPES, TOKENS),
    ),
)
@both
def test_one_rank_has_the_row(
    embed: Callable[..., torch.Tensor], ranks: int, size: int, dtype: torch.dtype, tokens: int
) -> None:
    """The parts of all ranks add up to the rows of the whole matrix. Given and sampled ids, first
    those at the ends of parts; rows past the vocabulary are NaN and never read."""
    if dtype == torch.float16 and embed in OF_CPU:
        dtype = torch.bfloat16  # a CPU does not serve float16
    whole = torch.randn(VOCAB, size, generator=torch.Generator().manual_seed(size)).to(dtype)
    parts = [VocabPartition(VOCAB, rank, ranks) for rank in range(ranks)]
    ends = [i for part in parts for i in (part.start, part.start + part.num_tokens - 1)]
    rng = np.random.default_rng(size)
    ids = np.array(ends + rng.integers(VOCAB, size=tokens).tolist())[:tokens]
    order = rng.permutation(tokens)
    last_tokens = int32(*ids[order])
    input_ids = int32(*np.where(rng.random(tokens) < 0.3, -1 - order.argsort(), ids))

    total = torch.zeros(tokens, size, dtype=dtype, device=DEVICE)
    for part in parts:
        weight = torch.full((part.shard_size, size), torch.nan, dtype=dtype)
        weight[: part.num_tokens] = whole[part.start : part.start + part.num_tokens]
        table = PlainWeight(weight.to(DEVICE))
        with poisoned_memory():
            total += embed(input_ids, last_tokens, table, part.start, part.num_tokens)
    assert torch.equal(total.cpu(), whole[ids])


@both
def test_the_first_step_has_no_last_tokens(embed: Callable[..., torch.Tensor]) -> None:
    weight = torch.arange(12.0, device=DEVICE).view(4, 3)
    rows = embed(int32(3, 0), int32(), PlainWeight(weight), 0, 4)
    assert torch.equal(rows, weight[[3, 0]])


@pytest.mark.parametrize("dtype", DTYPES)
def test_quantized_rows(dtype: torch.dtype) -> None:
    """Ids here, sampled ones, and another rank's."""
    random = torch.Generator().manual_seed(0)
    codes = torch.randint(-127, 128, (40, 100), generator=random).to(torch.int8)
    scales = torch.rand(40, 1, generator=random)
    packed = pack(QuantizedWeight("int8", codes.to(DEVICE), scales.to(DEVICE)), dtype)
    out = embed(int32(13, -2, 9, 49, 50), int32(1, 20), packed, 10, 40)
    exact = (codes * scales)[[3, 10, 0, 39, 0]]
    exact[[2, 4]] = 0
    assert_rounded_once(out.cpu(), exact)
    assert not out[[2, 4]].any()
