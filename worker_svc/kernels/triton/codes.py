"""Conversions between numbers and 8-bit codes in kernels: integers and float8_e4m3fn.

Integer arithmetic converts float8, because sm_80 has no instruction for it. The result is then the
same on every GPU.
"""

from __future__ import annotations

import triton
import triton.language as tl

MAX_E4M3 = 448.0


@triton.jit
def round_to_even(x: tl.tensor) -> tl.tensor:
    """x float32, at most 2²² in magnitude -> the nearest integer, ties to even, as float32. If x is
    a product, launch with enable_fp_fusion=False, because the product must not be fused into the
    sum."""
    return (x + 12582912.0) - 12582912.0  # 1.5 · 2²³; float32 has no fraction from 2²³ on


@triton.jit
def to_e4m3(x: tl.tensor) -> tl.tensor:
    """x float32 -> the bits of the nearest float8_e4m3fn as uint8, ties to even. A larger x becomes
    the largest code."""
    magnitude = tl.minimum(tl.abs(x), 448.0)
    bits = magnitude.to(tl.int32, bitcast=True)
    normal = ((bits + 0x7FFFF + ((bits >> 20) & 1)) >> 20) - (120 << 3)
    # Codes below 2⁻⁶ are multiples of 2⁻⁹, which is the last place of 2¹⁴ in float32.
    small = (magnitude + 16384.0).to(tl.int32, bitcast=True) & 15
    code = tl.where(magnitude < 0.015625, small, normal)
    code = tl.where(x != x, 127, code)
    sign = (x.to(tl.int32, bitcast=True) >> 24) & 128
    return (code | sign).to(tl.uint8)


@triton.jit
def from_e4m3(code: tl.tensor, dtype: tl.constexpr) -> tl.tensor:
    """The bits of float8_e4m3fn as uint8 -> its value / 256, exact in any dtype. Shifted by 7, the
    bits are a float16's, whose exponent has another bias. NaN is not supported."""
    bits = code.to(tl.uint16)
    bits = ((bits & 128) << 8) | ((bits & 127) << 7)
    return bits.to(tl.float16, bitcast=True).to(dtype)
