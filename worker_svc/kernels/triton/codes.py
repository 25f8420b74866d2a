"""Numbers as 8-bit codes in kernels: rounding to integers and to float8_e4m3fn, and back.

FP8 is converted with integers, the same on every GPU: sm_80 has no instruction for it.
"""

from __future__ import annotations

import triton
import triton.language as tl

MAX_E4M3 = 448.0


@triton.jit
def round_to_even(x: tl.tensor) -> tl.tensor:
    """x float32, at most 2²² in magnitude -> the nearest integer, the even one of two, as float32.
    If x is a product, launch with enable_fp_fusion=False: the sum must not be fused with it."""
    return (x + 12582912.0) - 12582912.0  # 1.5 · 2²³, from where on float32 has no fraction


@triton.jit
def to_e4m3(x: tl.tensor) -> tl.tensor:
    """x float32 -> the bits of the nearest float8_e4m3fn as uint8, the even one of two; the largest
    if x is beyond it."""
    magnitude = tl.minimum(tl.abs(x), 448.0)
    bits = magnitude.to(tl.int32, bitcast=True)
    normal = ((bits + 0x7FFFF + ((bits >> 20) & 1)) >> 20) - (120 << 3)
    # Below 2⁻⁶ codes are multiples of 2⁻⁹, the last place of 2¹⁴ in float32.
    small = (magnitude + 16384.0).to(tl.int32, bitcast=True) & 15
    code = tl.where(magnitude < 0.015625, small, normal)
    code = tl.where(x != x, 127, code)
    sign = (x.to(tl.int32, bitcast=True) >> 24) & 128
    return (code | sign).to(tl.uint8)


@triton.jit
def from_e4m3(code: tl.tensor, dtype: tl.constexpr) -> tl.tensor:
    """The bits of float8_e4m3fn as uint8 -> its value / 256, exact in any dtype: shifted by 7, they
    are those of a float16, whose exponent has another bias. NaN is not known."""
    bits = code.to(tl.uint16)
    bits = ((bits & 128) << 8) | ((bits & 127) << 7)
    return bits.to(tl.float16, bitcast=True).to(dtype)
