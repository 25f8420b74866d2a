"""Launches of products, most with quantized weights, with the sizes of Qwen3: see
`compiled.Case`."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch

from tests.worker_svc.kernels.triton.compile_cases_pointwise import empty
from tests.worker_svc.kernels.triton.compiled import Case
from worker_svc.kernels.ops import PackedWeight
from worker_svc.kernels.triton import batch_invariance
from worker_svc.kernels.triton.embedding import embed
from worker_svc.kernels.triton.quantized.products import Grouped, choose_tiles
from worker_svc.kernels.triton.quantized.row_quantization import quantize
from worker_svc.kernels.triton.quantized.weights import CodeWeight, Int8Weight, InvariantWeight
from worker_svc.kernels.triton.row_matmul import RowWeight
from worker_svc.kernels.triton.thin_matmul import ThinWeight
from worker_svc.weights.quantization.formats import Format

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
EXPERTS = 64
# Rows of x that have to share a binary, for each size of tiles.
ROWS = ((1, 15, 16), (17, 64), (65, 250), (257, 4096))


def make_int8(out: int, columns: int) -> Int8Weight:
    codes, scales = empty(out, columns, dtype=torch.int8), empty(out, dtype=FP32)
    return Int8Weight(codes, scales, BF16)


def make_codes(
    name: Format, out: int, columns: int, group: int, zeros: bool, width: int = 64
) -> CodeWeight:
    if name == "int4":
        codes = empty(out, -(-columns // (2 * width)), width, dtype=torch.uint8)
    else:
        kind = torch.int8 if name == "int8" else torch.float8_e4m3fn
        codes = empty(out, columns, dtype=kind)
    groups = columns // group
    shift = empty(groups, out, dtype=torch.int16) if zeros else None
    return CodeWeight(codes, empty(groups, out, dtype=FP32), shift, BF16, columns)


def products(weight: PackedWeight, columns: int, dtype: torch.dtype, rows: tuple[int, ...]) -> None:
    for count in rows:
        weight.matmul(empty(count, columns, dtype=dtype), None)


def invariant_products(weight: PackedWeight, columns: int, rows: tuple[int, ...]) -> None:
    batch_invariance.switch(True)
    try:
        products(weight, columns, BF16, rows)
    finally:
        batch_invariance.switch(False)


def cases() -> Iterator[Case]:
    for rows in ROWS:
        number = f"{rows[-1]} rows"
        int8 = partial(products, make_int8(6144, 4096), 4096, BF16, rows)
        yield Case(f"W8A8 {number}", int8, uses_wgmma=True)
        kinds: list[tuple[Format, bool]] = []
        if rows != ROWS[2]:  # which differ from the rows before in not being split
            kinds += [("int4", True), ("fp8", False)]
        if rows in (ROWS[0], ROWS[-1]):
            kinds += [("int4", False), ("int8", True)]
            odd = partial(products, make_codes("int4", 1000, 352, 32, True, 32), 352, FP16, rows)
            yield Case(f"int4 groups of 32 {number}", odd, uses_wgmma=True)
        for name, zeros in kinds:
            weight = make_codes(name, 1024, 3072, 128, zeros)
            launch = partial(products, weight, 3072, BF16, rows)
            yield Case(f"{name} zeros {zeros} {number}", launch, uses_wgmma=True)
    plain = InvariantWeight(empty(1024, 3072, dtype=BF16))
    for rows in ((1, 16, 256), (257, 4096)):
        launch = partial(invariant_products, plain, 3072, rows)
        yield Case(f"invariant {rows[-1]} rows", launch, uses_wgmma=True)
    thin = ThinWeight(empty(1024, 3072, dtype=BF16))
    for outs, columns in ((1024, 3072), (6144, 1024)):
        weight = RowWeight(empty(outs, columns, dtype=BF16))
        yield Case(f"one row, {outs} outputs", partial(products, weight, columns, BF16, (1,)))
    for rows in ((2, 16), (17, 32), (33, 64)):
        launch = partial(products, thin, 3072, BF16, rows)
        yield Case(f"thin {rows[-1]} rows", launch, uses_wgmma=rows[-1] == 64)
    odd = partial(products, make_int8(1000, 352), 352, FP16, (16,))
    yield Case("W8A8 odd sizes", odd, uses_wgmma=True)
    yield Case(
        "fp32 rows", partial(products, make_codes("int4", 64, 128, 64, False), 128, FP32, (1,))
    )
    for size in (1024, 12288):
        x = empty(3, size, dtype=BF16)
        yield Case(f"quantize {size}", partial(quantize, x, torch.int8))
        maxima = empty(3, dtype=FP32)
        yield Case(f"quantize {size} given", partial(quantize, x, torch.int8, maxima=maxima))
        fp8 = partial(quantize, x, torch.float8_e4m3fn)
        yield Case(f"quantize {size} fp8", fp8)
        yield Case(f"quantize {size} blocks", partial(fp8, group=128, multiple=4))
    ints = empty(3, dtype=torch.int32)
    yield Case("embed int8", partial(embed, ints, ints, make_int8(151936, 1024), 0, 151936))


def expert_products(weight: Any, columns: int, counts: tuple[int, ...]) -> None:
    for count in counts:
        tiles = choose_tiles(-(-count // EXPERTS), BF16)
        matrices = empty(min(count, count // tiles.rows + EXPERTS), dtype=torch.int32)
        x = empty(len(matrices) * tiles.rows, columns, dtype=BF16)
        weight.matmul(x, None, grouped=Grouped(matrices, tiles))


def expert_cases() -> Iterator[Case]:
    """Those of one of two ranks of Qwen3-30B-A3B, by the rows of all its experts."""
    sizes = EXPERTS, 2048, 768
    scales = empty(EXPERTS, 1, 2048, dtype=FP16)
    scales_of_groups = empty(EXPERTS, 6, 2048, dtype=FP16)
    nibbles = empty(EXPERTS, 2048, 6, 64, dtype=torch.uint8)
    weights = {
        "bf16": CodeWeight(empty(*sizes, dtype=BF16), scales, None, BF16),
        "fp8": CodeWeight(empty(*sizes, dtype=torch.float8_e4m3fn), scales, None, BF16),
        "int8": Int8Weight(empty(*sizes, dtype=torch.int8), empty(*sizes[:2], dtype=FP32), BF16),
        "int4": CodeWeight(nibbles, scales_of_groups, None, BF16, 768),
    }
    for counts in ((8, 80, 1024), (1280, 4096, 16384), (32768, 65536)):
        for name, weight in weights.items():
            launch = partial(expert_products, weight, 768, counts)
            yield Case(f"experts {name}, {counts[0]} rows", launch, uses_wgmma=True)


CASES = [*cases(), *expert_cases()]
