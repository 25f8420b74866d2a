"""Quantizes weights to int8 and int4 in one pass, with results that equal `quantization.quantize`'s
to the last bit.

In torch, many small operations, each on all cores, took most of the time of a first start.
"""

from __future__ import annotations

from functools import reduce
from typing import Any

import numpy as np
import torch
from llvmlite import ir
from numba import njit, prange, types
from numba.extending import intrinsic

from worker_svc.kernels.cpu.compiled import kernel
from worker_svc.kernels.cpu.simd import F32, I64, constant, function, larger, loop, splat
from worker_svc.weights.quantization.formats import Format, QuantizedWeight
from worker_svc.weights.quantization.quantize import DIVISORS, empty
from worker_svc.weights.quantization.quantize import quantize as quantize_in_torch

_LOWEST, _HIGHEST = np.float32(-8), np.float32(7)
_TINY = np.finfo(np.float32).tiny
_EIGHT = ir.VectorType(F32, 8)


def quantize(weight: torch.Tensor, format: Format) -> QuantizedWeight:
    """W [out, in] float32 -> its codes and scales.

    Raises:
        ModelError: as `group_size`.
    """
    if format == "fp8":
        return quantize_in_torch(weight, format)
    out, columns = weight.shape
    quantized = empty(out, columns, format)
    codes, scales = quantized.codes.numpy(), quantized.scales.numpy()
    if format == "int8":
        _quantize_int8(weight.numpy(), scales, codes)
    else:
        _quantize_int4(weight.numpy(), np.array(DIVISORS, np.float32), scales, codes)
    return quantized


@intrinsic
def _fit(_context: Any, weight: Any, start: Any, size: Any, inverse: Any) -> Any:
    """Computes Σxq and Σq² for `size` weights x from number `start` on and their codes q.

    Adds in torch's order: first into 32 sums, then every eighth of these sums, then all.
    """

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        weight, start, size, inverse = args
        data = context.make_array(signature.args[0])(context, builder, weight).data
        first = builder.bitcast(builder.gep(data, [start]), _EIGHT.as_pointer())
        factor = splat(builder, inverse, _EIGHT)
        rint = function(builder, "llvm.rint.v8f32", _EIGHT, [_EIGHT])
        larger, smaller = (
            function(builder, f"llvm.{name}num.v8f32", _EIGHT, [_EIGHT] * 2)
            for name in ("max", "min")
        )
        add_up = function(builder, "llvm.vector.reduce.fadd.v8f32", F32, [F32, _EIGHT])

        def body(number: Any, sums: list[Any]) -> list[Any]:
            *products, squares = sums
            for i in range(4):
                place = builder.add(builder.mul(number, I64(4)), I64(i))
                x = builder.load(builder.gep(first, [place]), align=4)
                code = builder.call(rint, [builder.fmul(x, factor)])
                code = builder.call(larger, [code, constant(-8, _EIGHT)])
                code = builder.call(smaller, [code, constant(7, _EIGHT)])
                products[i] = builder.fadd(products[i], builder.fmul(x, code))
                squares = builder.fadd(squares, builder.fmul(code, code))
            return [*products, squares]

        steps = builder.udiv(size, I64(32))
        *products, squares = loop(builder, steps, [constant(0, _EIGHT)] * 5, body)
        sums = reduce(builder.fadd, products), squares
        totals = [builder.call(add_up, [F32(0), each]) for each in sums]
        return context.make_tuple(builder, signature.return_type, totals)

    results = types.UniTuple(types.float32, 2)
    return results(weight, types.int64, types.int64, types.float32), codegen


@njit(inline="always")
def _inverse(scale: Any) -> Any:
    return np.float32(1) / scale if abs(scale) > _TINY else np.float32(0)


@njit(inline="always")
def _code(x: Any, inverse: Any) -> Any:
    return np.uint8(min(max(np.rint(x * inverse), _LOWEST), _HIGHEST) - _LOWEST)


@njit(inline="always")
def _extremes(weight: Any, row: int, start: int, end: int) -> Any:
    """The largest and the smallest number of weight[row, start:end]."""
    part = weight[row, start:end]
    high, opposite = part[0], -part[0]
    for i in range(len(part)):
        high, opposite = larger(high, part[i]), larger(opposite, -part[i])
    return high, -opposite


@kernel(parallel=True, nogil=True, error_model="numpy")
def _quantize_int8(weight: Any, scales: Any, codes: Any) -> None:
    columns = weight.shape[1]
    for row in prange(len(weight)):
        high, low = _extremes(weight, row, 0, columns)
        scales[row, 0] = scale = max(high, -low) / np.float32(127)
        inverse = _inverse(scale)
        for i in range(columns):
            codes[row, i] = np.int8(np.rint(weight[row, i] * inverse))


@kernel(parallel=True, nogil=True, error_model="numpy")
def _quantize_int4(weight: Any, divisors: Any, scales: Any, codes: Any) -> None:
    columns, groups = weight.shape[1], scales.shape[1]
    size = columns // groups
    for row in prange(len(weight)):
        for group in range(groups):
            start = group * size
            high, low = _extremes(weight, row, start, start + size)
            largest = -high if high > -low else -low
            best = gain = np.float32(0)
            for divisor in divisors:
                first = row * columns + start
                products, squares = _fit(weight, first, size, _inverse(largest / divisor))
                scale = products * _inverse(squares)
                if scale * products > gain:
                    best, gain = scale, scale * products
            scales[row, group] = best
            inverse = _inverse(best)
            for i in range(start // 2, (start + size) // 2):
                even, odd = weight[row, 2 * i], weight[row, 2 * i + 1]
                codes[row, i] = _code(even, inverse) | _code(odd, inverse) << 4
