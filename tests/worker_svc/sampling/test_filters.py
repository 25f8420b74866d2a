from __future__ import annotations

from dataclasses import dataclass
from typing import Any, cast

import numpy as np
import pytest
import torch
from transformers import (
    MinPLogitsWarper,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from tests.worker_svc.device import DEVICE, ON_GPU, VOCAB_SIZES, by_device, cpu_only
from tests.worker_svc.thread_ranks import on_ranks, shard
from worker_svc.kernels.cpu import ops as cpu_ops
from worker_svc.kernels.ops import Ops
from worker_svc.kernels.triton import ops as triton_ops
from worker_svc.ranks.distributed import TensorParallel
from worker_svc.sampling.filters import Limit, keep_likely

EPS = 1e-6  # of probability: tokens this near to a boundary may be on either side of it
DEVICE_OPS: Any = triton_ops if ON_GPU else cpu_ops


@dataclass(frozen=True)
class Params:
    """The filters of a row."""

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0


def limit(params: list[Params], name: str, off: float, dtype: torch.dtype) -> Limit:
    rows = [row for row, each in enumerate(params) if getattr(each, name) != off]
    values = [getattr(params[row], name) for row in rows]
    return Limit(
        torch.tensor(rows, dtype=torch.int32, device=DEVICE),
        torch.tensor(values, dtype=dtype, device=DEVICE),
    )


def filtered(
    logits: torch.Tensor, params: list[Params], ranks: int = 1, ops: Ops = DEVICE_OPS
) -> torch.Tensor:
    """Filters whole logits [F, vocab] on all ranks; padding is NaN, and stays."""
    temperatures = torch.tensor([each.temperature for each in params], device=DEVICE)
    filters = {
        "top_k": limit(params, "top_k", 0, torch.int32),
        "top_p": limit(params, "top_p", 1, torch.float32),
        "min_p": limit(params, "min_p", 0, torch.float32),
    }
    filters = {name: each for name, each in filters.items() if len(each.rows)}

    def run(tp: TensorParallel) -> torch.Tensor:
        vocab, local = shard(logits.to(DEVICE), tp)
        keep_likely(local, vocab, temperatures, filters, tp, ops)
        assert local[:, vocab.num_tokens :].isnan().all()
        return local[:, : vocab.num_tokens].to(logits.device)

    return torch.cat(on_ranks(ranks, run), dim=1)


def warped(row: torch.Tensor, params: Params, nudge: float) -> torch.Tensor:
    """The tokens that transformers keeps, in float64, and those equal to one of them; with top_p
    and min_p a little stricter (-1) or laxer (1)."""
    kept = row > -torch.inf
    scores = TemperatureLogitsWarper(params.temperature)(None, row.double()[None])

    def keep(warper: Any) -> None:
        nonlocal kept
        left = warper(None, scores.masked_fill(~kept, -torch.inf))[0] > -torch.inf
        kept = kept & (row >= row[left].min())

    if params.top_k:
        keep(TopKLogitsWarper(params.top_k))
    top_p = params.top_p + nudge * EPS
    if params.top_p < 1 and top_p < 1:
        keep(TopPLogitsWarper(max(top_p, 0.0)))
    if params.min_p:
        # Rounding a logit to float32 is relative to the logit.
        blur = EPS + 2.0**-22 * float(row[kept].abs().max()) / params.temperature
        keep(MinPLogitsWarper(min(params.min_p * np.exp(min(-nudge * blur, 700)), 1.0)))
    return kept


def assert_as_transformers(
    logits: torch.Tensor, params: list[Params], ops: Ops = DEVICE_OPS
) -> None:
    actual = filtered(logits, params, ops=ops)
    for row, (before, after, each) in enumerate(zip(logits, actual, params, strict=True)):
        kept = after > -torch.inf
        assert torch.equal(before[kept], after[kept]), (row, each)
        assert (kept >= warped(before, each, -1)).all(), (row, each)
        assert (kept <= warped(before, each, +1)).all(), (row, each)
        assert kept[before.argmax()], (row, each)


def random_logits(rows: int, vocab: int, seed: int) -> torch.Tensor:
    """Ordinary logits, many equal ones, impossible tokens, and huge ranges, in turn."""
    logits = 3 * torch.randn(rows, vocab, generator=torch.Generator().manual_seed(seed))
    logits[1::4] = (logits[1::4] / 4).bfloat16().float()
    logits[2::4, ::3] = -torch.inf
    logits[3::4] *= 1e30
    return logits


def random_params(rows: int, vocab: int, seed: int) -> list[Params]:
    rng = np.random.default_rng(seed)

    def pick(*choices: float) -> float:
        return float(rng.choice(choices))

    return [
        Params(
            temperature=float(np.float32(pick(1e-3, 0.6, 1.0, 2.0))),
            top_k=int(pick(0, 0, 1, 2, 5, 20, vocab // 2, vocab - 1, vocab, 2**30)),
            top_p=float(np.float32(pick(1, 1, 1e-6, 0.1, 0.5, 0.95, 0.999999))),
            min_p=float(np.float32(pick(0, 0, 1e-6, 0.05, 0.5, 1))),
        )
        for _ in range(rows)
    ]


@pytest.mark.parametrize("vocab", [2, 7, 301, 1000])
@pytest.mark.parametrize("seed", range(3))
def test_keeps_what_transformers_keeps(vocab: int, seed: int) -> None:
    assert_as_transformers(random_logits(100, vocab, seed), random_params(100, vocab, seed))


@pytest.mark.parametrize("vocab", by_device(cpu=[151_936], gpu=VOCAB_SIZES))
def test_the_vocabulary_of_qwen3(vocab: int) -> None:
    params = [
        Params(0.6, top_k=20, top_p=0.95),
        Params(1.0, top_k=1000),
        Params(2.0, top_p=0.9),
        Params(1.0, top_p=0.999999, min_p=0.001),
        Params(1.0, top_k=vocab - 1),
        Params(1e-3, top_p=1e-6),
        Params(2.0, top_k=vocab // 2, top_p=0.5),
        Params(0.6, min_p=0.05),
    ]
    assert_as_transformers(random_logits(len(params), vocab, seed=7), params)


@cpu_only
def test_the_kernels_of_a_gpu_keep_the_same() -> None:
    vocab = 301
    logits, params = random_logits(12, vocab, seed=5), random_params(12, vocab, seed=5)
    assert_as_transformers(logits, params, triton_ops)
    assert torch.equal(filtered(logits, params), filtered(logits, params, ops=triton_ops))


@cpu_only
@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("vocab", [40, 1000])
def test_the_number_of_ranks_changes_nothing(ranks: int, vocab: int) -> None:
    """40 tokens are five chunks of eight: of four ranks the last has nothing but padding."""
    logits, params = random_logits(60, vocab, ranks), random_params(60, vocab, ranks)
    assert torch.equal(filtered(logits, params, ranks), filtered(logits, params))


def test_the_batch_changes_nothing() -> None:
    logits, params = random_logits(60, 301, seed=8), random_params(60, 301, seed=8)
    together = filtered(logits, params)
    for row in range(60):
        alone = filtered(logits[row : row + 1], params[row : row + 1])
        assert torch.equal(alone[0], together[row]), params[row]


def test_greedy_rows_and_rows_of_nothing_stay() -> None:
    """Their parameters do not matter."""
    logits = random_logits(3, 301, seed=9)
    logits[2] = -torch.inf
    params = [Params(t, top_k=3, top_p=0.5, min_p=0.5) for t in (0.0, 1.0, 1.0)]
    after = filtered(logits, params)
    assert torch.equal(after[0], logits[0])
    assert int((after[1] > -torch.inf).sum()) <= 3
    assert torch.equal(after[2], logits[2])


def test_without_filters_no_kernel_runs() -> None:
    logits = random_logits(2, 40, seed=1)
    after = filtered(logits, [Params(), Params()], ops=cast(Ops, None))
    assert torch.equal(after, logits)
