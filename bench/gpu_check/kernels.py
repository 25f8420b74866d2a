"""Every kernel against its reference in float32."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product

import torch

from bench.gpu_check.inputs import count_differences, poisoned, relative_error, rounding
from bench.gpu_check.kernels_attention import check_decode, check_large_cache, check_prompt
from bench.gpu_check.kernels_features import check_filters, check_history, check_masks
from bench.gpu_check.kernels_sampling import check_sampling
from bench.gpu_check.parts import PartPlan
from bench.gpu_check.records import Report
from bench.gpu_check.setup import Heads, Setup
from worker_svc.kernels.embedding import embed, embed_reference
from worker_svc.kernels.kv_store import store_kv, store_kv_reference
from worker_svc.kernels.qk_norm_rope import norm_rope_store, norm_rope_store_reference
from worker_svc.kernels.rms_norm import (
    add_rms_norm,
    add_rms_norm_reference,
    rms_norm,
    rms_norm_reference,
)
from worker_svc.kernels.silu_mul import silu_and_multiply, silu_and_multiply_reference

EPS = 1e-6
BLOCK_SIZE = 16
MAX_POSITION = 5000


def parts(setup: Setup) -> list[PartPlan[Setup]]:
    return [
        PartPlan("rms_norm", check_rms_norm),
        PartPlan("add_rms_norm", check_add_rms_norm),
        PartPlan("silu_and_multiply", check_silu_and_multiply),
        PartPlan("embed", check_embed),
        PartPlan("store_kv", check_store_kv),
        PartPlan("norm_rope_store", check_norm_rope_store),
        PartPlan("sampling", check_sampling),
        PartPlan("token history", check_history),
        PartPlan("token masks", check_masks),
        PartPlan("filters", check_filters),
        PartPlan("decode_attention", check_decode),
        PartPlan("prompt_attention", check_prompt),
        PartPlan("cache over 2^31 elements", check_large_cache),
    ]


def check_rms_norm(setup: Setup, report: Report) -> None:
    for case, x, weight, _ in _rows(setup, "rms_norm"):
        with poisoned():
            out = rms_norm(x, weight, EPS)
        exact = rms_norm_reference(x.float(), weight.float(), EPS)
        report.check(case, relative_error(out, exact), rounding(x.dtype))


def check_add_rms_norm(setup: Setup, report: Report) -> None:
    for case, x, weight, residual in _rows(setup, "add_rms_norm"):
        total = residual.to(torch.float32, copy=True)
        exact = add_rms_norm_reference(x.float(), total, weight.float(), EPS)
        with poisoned():
            out = add_rms_norm(x, residual, weight, EPS)
        report.check(case, relative_error(out, exact), rounding(x.dtype))
        report.check(f"{case}, residual", relative_error(residual, total), rounding(x.dtype))


def check_silu_and_multiply(setup: Setup, report: Report) -> None:
    for case, x, _, up in _rows(setup, "silu_and_multiply"):
        gate_up = torch.cat((3 * x, up), dim=1)
        with poisoned():
            out = silu_and_multiply(gate_up)
        exact = silu_and_multiply_reference(gate_up.float())
        report.check(case, relative_error(out, exact), rounding(x.dtype))


def check_embed(setup: Setup, report: Report) -> None:
    """Of the second of three ranks, with a fifth of the ids those of the step before: exactly."""
    generator = setup.generator("embed")
    rows = 999
    for dtype, size, tokens in product(setup.sizes.dtypes, setup.sizes.widths, setup.sizes.tokens):
        weight = _random(generator, rows, size, dtype)
        ids, last = (
            torch.randint(3 * rows, (n,), generator=generator, device=setup.device).int()
            for n in (tokens, 256)
        )
        earlier = torch.rand(tokens, generator=generator, device=setup.device) < 0.2
        ids = torch.where(earlier, -1 - ids % 256, ids)
        with poisoned():
            out = embed(ids, last, weight, rows, rows)
        expected = embed_reference(ids, last, weight, rows, rows)
        different = count_differences(out, expected)
        report.check(f"{tokens} x {size} {_name(dtype)}", different, 0, "elements that differ")


def check_store_kv(setup: Setup, report: Report) -> None:
    """Exactly; all that is not written stays as it was."""
    for case, qkv, slots, cache, heads in _projections(setup, "store_kv"):
        sizes = (heads.heads, heads.kv_heads, heads.kv_heads)
        _, k, v = qkv.unflatten(1, (-1, heads.head_dim)).split(sizes, dim=1)
        expected = cache.clone()
        store_kv_reference(k, v, slots, expected)
        store_kv(k, v, slots, cache)
        report.check(case, count_differences(cache, expected), 0, "elements that differ")


def check_norm_rope_store(setup: Setup, report: Report) -> None:
    for case, qkv, slots, cache, heads in _projections(setup, "norm_rope_store"):
        generator = setup.generator(case)
        q_weight, k_weight = 1 + 0.2 * _random(generator, 2, heads.head_dim, qkv.dtype)
        half = heads.head_dim // 2
        angles = _random(generator, MAX_POSITION, half, torch.float32)
        cos_sin = torch.stack((angles.cos(), angles.sin()), dim=1)
        size, device = (len(qkv),), setup.device
        positions = torch.randint(MAX_POSITION, size, generator=generator, device=device).int()
        exact_cache = cache.to(torch.float32, copy=True)
        exact = norm_rope_store_reference(
            qkv.float(),
            heads.heads,
            q_weight.float(),
            k_weight.float(),
            EPS,
            cos_sin,
            positions,
            slots,
            exact_cache,
        )
        with poisoned():
            out = norm_rope_store(
                qkv, heads.heads, q_weight, k_weight, EPS, cos_sin, positions, slots, cache
            )
        report.check(f"{case}, queries", relative_error(out, exact), rounding(qkv.dtype))
        untouched = exact_cache.isnan()
        difference = float((untouched != cache.isnan()).sum())
        report.check(f"{case}, slots written", difference, 0, "elements that differ")
        error = relative_error(cache.nan_to_num(), exact_cache.nan_to_num())
        report.check(f"{case}, keys and values", error, rounding(qkv.dtype))


def _rows(
    setup: Setup, part: str
) -> Iterator[tuple[str, torch.Tensor, torch.Tensor, torch.Tensor]]:
    """A case's name, x [T, size], a weight [size] around 1, and another x. Rows of the first lie
    apart."""
    generator = setup.generator(part)
    for dtype, size, tokens in product(setup.sizes.dtypes, setup.sizes.widths, setup.sizes.tokens):
        x = _random(generator, tokens, size + 16, dtype)[:, :size]
        weight = 1 + 0.2 * _random(generator, 1, size, dtype)[0]
        other = _random(generator, tokens, size, dtype)
        yield f"{tokens} x {size} {_name(dtype)}", x, weight, other


def _projections(
    setup: Setup, part: str
) -> Iterator[tuple[str, torch.Tensor, torch.Tensor, torch.Tensor, Heads]]:
    """A case's name, qkv [T, (heads + 2 · kv_heads) · head_dim], as many slots, a fifth of them −1,
    and a cache full of NaN."""
    generator = setup.generator(part)
    device = setup.device
    for dtype, heads, tokens in product(setup.sizes.dtypes, setup.sizes.heads, setup.sizes.tokens):
        width = (heads.heads + 2 * heads.kv_heads) * heads.head_dim
        qkv = _random(generator, tokens, width, dtype)
        blocks = -(-tokens // BLOCK_SIZE) + 1
        shape = (2, blocks, BLOCK_SIZE, heads.kv_heads, heads.head_dim)
        cache = torch.full(shape, torch.nan, dtype=dtype, device=device)
        slots = torch.randperm(blocks * BLOCK_SIZE, generator=generator, device=device)[:tokens]
        padding = torch.rand(tokens, generator=generator, device=device) < 0.2
        slots = torch.where(padding, -1, slots).int()
        yield f"{tokens} x {heads} {_name(dtype)}", qkv, slots, cache, heads


def _random(
    generator: torch.Generator, rows: int, columns: int, dtype: torch.dtype
) -> torch.Tensor:
    size = (rows, columns)
    return torch.randn(size, generator=generator, device=generator.device).to(dtype)


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
