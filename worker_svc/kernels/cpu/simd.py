"""Building blocks of numba kernels: bfloat16 <-> float32, exp, and vectors in LLVM code.

Numba has no bfloat16, so bfloat16 arrays are passed as uint16. A bfloat16 is the upper half of a
float32.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

import numpy as np
import torch
from llvmlite import ir
from numba import njit, types
from numba.core import cgutils
from numba.extending import intrinsic, overload
from numpy.typing import NDArray

LANES = (
    16  # 32-bit numbers in a 512-bit register, or in two registers if the CPU has only shorter ones
)
FASTMATH = {"reassoc", "contract", "nsz"}  # sums may be reordered, but NaN and infinity stay exact

I8, I16, I32, I64 = (ir.IntType(bits) for bits in (8, 16, 32, 64))
F32 = ir.FloatType()
I32S, F32S = ir.VectorType(I32, LANES), ir.VectorType(F32, LANES)


def bits(tensor: torch.Tensor) -> NDArray[Any]:
    """The memory of a tensor as an array. A bfloat16 tensor gives uint16."""
    return (tensor.view(torch.uint16) if tensor.dtype == torch.bfloat16 else tensor).numpy()


def on_tensors(kernel: Callable[..., None]) -> Callable[..., None]:
    """Makes a function that takes tensors and calls `kernel` with their arrays."""

    @wraps(kernel)
    def call(*arguments: Any) -> None:
        kernel(*(bits(x) if isinstance(x, torch.Tensor) else x for x in arguments))

    return call


def by_type(choose: Callable[..., Any]) -> Any:
    """Makes a function for use in kernels. When a kernel is compiled, `choose` gets the types of
    the arguments and returns the implementation."""

    def chosen(*arguments: Any) -> Any: ...

    overload(chosen, strict=False)(choose)
    return chosen


@intrinsic
def widen(_context: Any, value: Any) -> Any:
    """uint16 (a bfloat16) or float32 -> float32"""

    def codegen(_context: Any, builder: Any, signature: Any, args: Any) -> Any:
        if signature.args[0] == types.float32:
            return args[0]
        return builder.bitcast(builder.shl(builder.zext(args[0], I32), I32(16)), F32)

    return types.float32(value), codegen


@intrinsic
def narrow(_context: Any, value: Any, like: Any) -> Any:
    """float32 -> itself, or the nearest bfloat16 (ties to even) as uint16, by the type of `like`"""

    def codegen(_context: Any, builder: Any, signature: Any, args: Any) -> Any:
        if signature.args[1] == types.float32:
            return args[0]
        bits = builder.bitcast(args[0], I32)
        odd = builder.and_(builder.lshr(bits, I32(16)), I32(1))
        rounded = builder.add(bits, builder.add(odd, I32(0x7FFF)))
        return builder.trunc(builder.lshr(rounded, I32(16)), I16)

    return like(types.float32, like), codegen


@intrinsic
def float_of(_context: Any, bits: Any) -> Any:
    """uint32 -> the float32 with these bits"""

    def codegen(_context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        return builder.bitcast(args[0], F32)

    return types.float32(types.uint32), codegen


@intrinsic
def _power_of_two(_context: Any, exponent: Any) -> Any:
    """int32 n in [-127, 127] -> 2ⁿ as float32, 0 for -127"""

    def codegen(_context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        biased = builder.add(args[0], I32(127))
        return builder.bitcast(builder.shl(biased, I32(23)), F32)

    return types.float32(types.int32), codegen


@njit(inline="always")
def exp(x: Any) -> Any:
    """eˣ of a float32, within 2 ulp of float32, or 0 if it is below 2⁻¹²⁶. Unlike `math.exp` it is
    vectorized.

    The integer part of x / ln 2 becomes the exponent. For the rest, in [-0.5, 0.5] · ln 2, the
    Taylor series to the seventh power is exact to float32 (as in Moshier's Cephes, expf).
    """
    x = min(max(x, np.float32(-88.0)), np.float32(88.0))
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


@intrinsic
def larger(_context: Any, x: Any, y: Any) -> Any:
    """The larger of two float32, or either of them if one is NaN. Unlike `max` it is vectorized."""

    def codegen(_context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        x, y = args
        no_nan = ("nnan", "nsz")
        return builder.select(builder.fcmp_ordered(">", x, y, flags=no_nan), x, y, flags=no_nan)

    return types.float32(types.float32, types.float32), codegen


@njit(inline="always")
def largest(numbers: Any, row: int, start: int, end: int) -> Any:
    """The largest of numbers[row, start:end] float32, or −inf if there are none. If one is NaN, the
    result may be any of the other numbers or −inf, but not NaN."""
    part, top = numbers[row, start:end], np.float32(-np.inf)
    for i in range(len(part)):
        top = larger(top, part[i])
    # LLVM assumes that `larger` never returns NaN, so this has to check the bits.
    is_nan = np.float32(top).view(np.int32) & 0x7FFFFFFF > 0x7F800000
    return np.float32(-np.inf) if is_nan else top


@intrinsic
def take(_context: Any, counter: Any) -> Any:
    """Adds 1 to counter[0] int64 atomically -> the value before."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        array = context.make_array(signature.args[0])(context, builder, args[0])
        return builder.atomic_rmw("add", array.data, I64(1), "monotonic")

    return types.int64(counter), codegen


@intrinsic
def put(_context: Any, numbers: Any, index: Any, number: Any) -> Any:
    """Sets numbers[index] = number in an array of one dimension. The store is atomic, because LLVM
    would otherwise turn a loop of stores into scatter instructions, which take longer."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        array = context.make_array(signature.args[0])(context, builder, args[0])
        place = builder.gep(array.data, [args[1]])
        builder.store_atomic(args[2], place, "unordered", signature.args[0].dtype.bitwidth // 8)
        return context.get_dummy_value()

    return types.void(numbers, types.int64, numbers.dtype), codegen


@intrinsic
def num_threads(_context: Any) -> Any:
    """The number of threads that a kernel may use. Numba's own function takes longer than many
    kernels if it is called outside a kernel. Inside a kernel, it keeps the kernel out of the cache.
    """

    def codegen(_context: Any, builder: Any, _signature: Any, _args: Any) -> Any:
        return builder.call(function(builder, "get_num_threads", I64, []), [])

    return types.int64(), codegen


def function(builder: Any, name: str, result: Any, arguments: list[Any]) -> Any:
    """Declares LLVM's function or intrinsic `name` -> the function."""
    return cgutils.get_or_insert_function(builder.module, ir.FunctionType(result, arguments), name)


def fma(builder: Any, x: Any, y: Any, z: Any) -> Any:
    """x · y + z of float32 vectors"""
    f = function(builder, f"llvm.fma.v{LANES}f32", F32S, [F32S] * 3)
    return builder.call(f, [x, y, z])


def pointer(builder: Any, address: Any, element: Any) -> Any:
    """An address (int64) as a pointer to `element`s."""
    return builder.inttoptr(address, ir.PointerType(element))


def splat(builder: Any, scalar: Any, vector: Any) -> Any:
    """`scalar` in each lane of `vector`."""
    undefined = ir.Constant(vector, ir.Undefined)
    first = builder.insert_element(undefined, scalar, I32(0))
    return builder.shuffle_vector(first, undefined, constant(0, ir.VectorType(I32, vector.count)))


def constant(value: int, vector: Any) -> Any:
    return ir.Constant(vector, [value] * vector.count)


def loop(
    builder: Any, count: Any, start: list[Any], body: Callable[[Any, list[Any]], list[Any]]
) -> list[Any]:
    """Emits a loop over 0 to count − 1, where count is at least 1 -> the last values.

    The values are `start` at first. `body` gets the number and the values and returns new values.
    """
    before = builder.block
    block, after = (builder.append_basic_block(name) for name in ("loop", "loop.end"))
    builder.branch(block)
    builder.position_at_end(block)
    number = builder.phi(I64)
    number.add_incoming(I64(0), before)
    values = [builder.phi(each.type) for each in start]
    following = body(number, values)
    end = builder.block
    for value, begin, result in zip(values, start, following, strict=True):
        value.add_incoming(begin, before)
        value.add_incoming(result, end)
    number_next = builder.add(number, I64(1))
    number.add_incoming(number_next, end)
    builder.cbranch(builder.icmp_signed("<", number_next, count), block, after)
    builder.position_at_end(after)
    return following
