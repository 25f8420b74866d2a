"""Numba building blocks: bfloat16 <-> float32, and the inner loop of a matrix product.

Numba knows no bfloat16, so such arrays come as uint16: a bfloat16 is the upper half of a float32.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from llvmlite import ir
from numba import njit, types
from numba.core import cgutils
from numba.extending import intrinsic
from numpy.typing import NDArray

LANES = 16  # float32 in a 512-bit register
PANEL = 2 * LANES  # columns that the inner loop computes at once
FASTMATH = {"reassoc", "contract", "nsz"}  # sums in any order, but NaN and infinity as they are

_I32, _I64, _F32 = ir.IntType(32), ir.IntType(64), ir.FloatType()
_VECTOR_I32, _VECTOR_F32 = ir.VectorType(_I32, LANES), ir.VectorType(_F32, LANES)


def bits(tensor: torch.Tensor) -> NDArray[Any]:
    """The memory of a float32 tensor as float32, of a bfloat16 one as uint16."""
    if tensor.dtype == torch.bfloat16:
        return tensor.view(torch.int16).numpy().view(np.uint16)
    return tensor.numpy()


@intrinsic
def widen(_context: Any, value: Any) -> Any:
    """uint16 (a bfloat16) or float32 -> float32"""

    def codegen(_context: Any, builder: Any, signature: Any, args: Any) -> Any:
        if signature.args[0] == types.float32:
            return args[0]
        return builder.bitcast(builder.shl(builder.zext(args[0], _I32), _I32(16)), _F32)

    return types.float32(value), codegen


@intrinsic
def narrow(_context: Any, value: Any, like: Any) -> Any:
    """float32 -> the type of `like`: itself, or the nearest bfloat16 (ties to even) as uint16"""

    def codegen(_context: Any, builder: Any, signature: Any, args: Any) -> Any:
        if signature.args[1] == types.float32:
            return args[0]
        bits = builder.bitcast(args[0], _I32)
        odd = builder.and_(builder.lshr(bits, _I32(16)), _I32(1))
        rounded = builder.add(bits, builder.add(odd, _I32(0x7FFF)))
        return builder.trunc(builder.lshr(rounded, _I32(16)), ir.IntType(16))

    return like(types.float32, like), codegen


@intrinsic
def _power_of_two(_context: Any, exponent: Any) -> Any:
    """int32 in [-127, 127] -> 2 to its power as float32, 0 for -127"""

    def codegen(_context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        biased = builder.add(args[0], _I32(127))
        return builder.bitcast(builder.shl(biased, _I32(23)), _F32)

    return types.float32(types.int32), codegen


@njit(inline="always")
def exp(x: Any) -> Any:
    """e to the power of a float32, within 2 ulp of float32; unlike `math.exp` it is vectorized.

    The integer part of x / ln 2 becomes the exponent; on the rest, in [-0.5, 0.5] · ln 2, the
    Taylor series to the seventh power is exact to float32 (as in Moshier's Cephes, expf).
    """
    x = min(max(x, np.float32(-87.3)), np.float32(88.0))
    n = np.floor(x * np.float32(1.4426950408889634) + np.float32(0.5))
    r = x - n * np.float32(0.693359375) + n * np.float32(2.12194440e-4)
    series = np.float32(1 / 5040)
    series = series * r + np.float32(1 / 720)
    series = series * r + np.float32(1 / 120)
    series = series * r + np.float32(1 / 24)
    series = series * r + np.float32(1 / 6)
    series = series * r + np.float32(0.5)
    series = series * r + np.float32(1)
    series = series * r + np.float32(1)
    return series * _power_of_two(np.int32(n))


def panel_product(rows: int) -> Any:
    """Makes the inner loop for `rows` rows: an intrinsic

        (packed, panel, x, start, tile) -> None

    that sets tile [>= rows, PANEL] float32 to X Wᵀ, where X [rows, depth] float32 lies transposed
    at x[start * depth:] (element (k, r) at k * rows + r) and W is panel number `panel` of
    `packed` [panels, depth, LANES] uint32: lane i holds column i in its low half and column
    i + LANES in its high half.

    Written in LLVM's terms so that the rows x 2 sums stay in registers for the whole loop, which
    numba's own loops do not achieve. Each sum runs over `depth` in order: a row's result does not
    depend on the other rows. (Blocking as in Goto and van de Geijn, "Anatomy of High-Performance
    Matrix Multiplication", 2008.)
    """

    @intrinsic
    def product(_context: Any, packed: Any, panel: Any, x: Any, start: Any, tile: Any) -> Any:
        def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            def array(i: int) -> Any:
                return context.make_array(signature.args[i])(context, builder, args[i])

            def index(i: int) -> Any:
                return context.cast(builder, args[i], signature.args[i], types.intp)

            depth = cgutils.unpack_tuple(builder, array(0).shape)[1]
            vectors = ir.PointerType(_VECTOR_I32)
            w = builder.gep(builder.bitcast(array(0).data, vectors), [builder.mul(index(1), depth)])
            x_start = builder.gep(array(2).data, [builder.mul(index(3), depth)])
            sums = _depth_loop(builder, rows, depth, w, x_start)
            out = builder.bitcast(array(4).data, ir.PointerType(_VECTOR_F32))
            for i, value in enumerate(sums):
                builder.store(value, builder.gep(out, [_I64(i)]), align=4)
            return context.get_dummy_value()

        return types.void(packed, panel, x, start, tile), codegen

    return product


def _depth_loop(builder: Any, rows: int, depth: Any, w: Any, x: Any) -> list[Any]:
    """The sums of `rows` x 2 vectors, in row order; depth is at least 1."""
    zero = ir.Constant(_VECTOR_F32, [0.0] * LANES)
    fma = cgutils.get_or_insert_function(
        builder.module, ir.FunctionType(_VECTOR_F32, [_VECTOR_F32] * 3), f"llvm.fma.v{LANES}f32"
    )
    before = builder.block
    loop, after = (builder.append_basic_block(name) for name in ("depth", "depth.end"))
    builder.branch(loop)
    builder.position_at_end(loop)
    k = builder.phi(_I64)
    k.add_incoming(_I64(0), before)
    sums = [builder.phi(_VECTOR_F32) for _ in range(2 * rows)]
    pairs = builder.load(builder.gep(w, [k]), align=4)
    low = builder.shl(pairs, ir.Constant(_VECTOR_I32, [16] * LANES))
    high = builder.and_(pairs, ir.Constant(_VECTOR_I32, [0xFFFF0000] * LANES))
    columns = [builder.bitcast(half, _VECTOR_F32) for half in (low, high)]
    x_k = builder.gep(x, [builder.mul(k, _I64(rows))])
    added = []
    for row in range(rows):
        factor = _splat(builder, builder.load(builder.gep(x_k, [_I64(row)])))
        for half in range(2):
            added.append(builder.call(fma, [factor, columns[half], sums[2 * row + half]]))
    for total, value in zip(sums, added, strict=True):
        total.add_incoming(zero, before)
        total.add_incoming(value, loop)
    k_next = builder.add(k, _I64(1))
    k.add_incoming(k_next, loop)
    builder.cbranch(builder.icmp_signed("<", k_next, depth), loop, after)
    builder.position_at_end(after)
    return added


def _splat(builder: Any, scalar: Any) -> Any:
    undefined = ir.Constant(_VECTOR_F32, ir.Undefined)
    first = builder.insert_element(undefined, scalar, _I32(0))
    return builder.shuffle_vector(first, undefined, ir.Constant(_VECTOR_I32, [0] * LANES))
