"""Emits the inner loops of attention as LLVM code for numba. They compute scores of queries and
keys, and sums of weighted values.

A 32-bit word of a cache holds several numbers, in the layout of the instructions that add up
products. They are dimensions of one key, or one dimension of several values. The queries or weights
that multiply a word are its *factors*:

    cache     numbers in a word  factors of a word
    float32   1                  a float32
    bfloat16  2                  two bfloat16, or two float32 if the CPU does not multiply bfloat16
    int8      4                  four codes of 16 bits, their upper bytes and then the lower bytes

Codes of 16 bits are precise enough for a cache of 8 bits, and their sums are exact.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from worker_svc.kernels.cpu.panels import add_codes, add_floats, add_pairs
from worker_svc.kernels.cpu.simd import (
    F32S,
    I32,
    I32S,
    I64,
    LANES,
    constant,
    fma,
    loop,
    pointer,
    splat,
)
from worker_svc.kernels.cpu_features import has

CHUNK = 256  # keys whose scores are computed at once
# The floats from one row of scores to the next. With a power of two, all rows would compete for the
# same lines of the CPU's cache.
SCORES = CHUNK + LANES
# The bytes from one row of weights to the next.
WEIGHTS = 4 * SCORES
# The rows that a loop takes -> the vectors that it takes at once. All sums fit into registers.
WIDTHS = {6: 2, 4: 2, 2: 4, 1: 4} if has("avx512f") else {2: 1, 1: 2}

FACTORS = 2  # the maximum number of 32-bit factors per word of a cache

Vectors = list[Any]
# (builder, factors, words, sums so far) -> sums
Add = Callable[[Any, Any, Any, Any], Any]
# (step, number) -> the address of a vector
VectorAt = Callable[[Any, int], Any]
# (step, row, number of a factor) -> its address
FactorAt = Callable[[Any, int, int], Any]


class Kind(NamedTuple):
    """Describes how words are multiplied.

    Args:
        parts: for each factor, the part of a word that it multiplies.
        sums: 1, or the number of factors if each factor has a sum of its own.
    """

    parts: list[Callable[[Any, Any], Any]]
    sums: int
    sum_type: Any
    add_keys: Add
    add_values: Add


def _whole(_builder: Any, words: Any) -> Any:
    return words


def _first(builder: Any, words: Any) -> Any:
    return builder.shl(words, constant(16, I32S))


def _second(builder: Any, words: Any) -> Any:
    return builder.and_(words, constant(0xFFFF0000, I32S))


def _add_signed_codes(builder: Any, factors: Any, words: Any, total: Any) -> Any:
    return add_codes(builder, words, factors, total)


# Kinds by the dtype of a cache. A bfloat16 cache is an array of uint16.
KINDS = {
    "float32": Kind([_whole], 1, F32S, add_floats, add_floats),
    "uint16": Kind([_whole], 1, F32S, add_pairs, add_pairs)
    if has("avx512bf16")
    else Kind([_first, _second], 1, F32S, add_floats, add_floats),
    # Keys are unsigned bytes, and so are the factors of values.
    "int8": Kind([_whole, _whole], 2, I32S, add_codes, _add_signed_codes),
}


def _products(
    builder: Any,
    kind: Kind,
    add: Add,
    rows: int,
    width: int,
    steps: Any,
    start: Vectors,
    vector_at: VectorAt,
    factor_at: FactorAt,
) -> Vectors:
    """Adds the products of `width` vectors with each row's factors to the vectors `start`
    [rows, width, kind.sums]."""

    def step(number: Any, sums: Vectors) -> Vectors:
        words = [
            builder.load(pointer(builder, vector_at(number, i), I32S), align=4)
            for i in range(width)
        ]
        added = list(sums)
        for row in range(rows):
            for f, part in enumerate(kind.parts):
                factor = builder.load(pointer(builder, factor_at(number, row, f), I32))
                factors = splat(builder, factor, I32S)
                for i, each in enumerate(words):
                    place = (row * width + i) * kind.sums + f % kind.sums
                    added[place] = add(builder, factors, part(builder, each), added[place])
        return added

    return loop(builder, steps, start, step)


def _to_floats(builder: Any, kind: Kind, sums: Vectors) -> Vectors:
    """Sums [..., kind.sums] -> one float32 vector each."""
    if kind.sums == 1:
        return sums
    floats = [builder.sitofp(each, F32S) for each in sums]
    upper = ir.Constant(F32S, [256.0] * LANES)
    return [
        fma(builder, high, upper, low) for high, low in zip(floats[::2], floats[1::2], strict=True)
    ]


def _in_blocks(builder: Any, count: Any, width: int, emit: Callable[[Any, int], None]) -> None:
    """Emits a loop with `emit(first, width)` over blocks of `width` of `count` items, and then one
    with `emit(first, 1)` over the items that are left."""
    blocks = builder.sdiv(count, I64(width))
    with cgutils.for_range(builder, blocks, intp=I64) as block:
        emit(builder.mul(block.index, I64(width)), width)
    if width > 1:
        done = builder.mul(blocks, I64(width))
        with cgutils.for_range(builder, builder.sub(count, done), intp=I64) as rest:
            emit(builder.add(done, rest.index), 1)


def _offset(builder: Any, address: Any, *terms: tuple[Any, int] | int) -> Any:
    """`address` plus the terms, each a number or a product of two numbers."""
    for term in terms:
        added = I64(term) if isinstance(term, int) else builder.mul(term[0], I64(term[1]))
        address = builder.add(address, added)
    return address


def _load(builder: Any, address: Any, element: Any) -> Any:
    return builder.load(pointer(builder, address, element), align=4)


def _splat(builder: Any, address: Any, vector: Any) -> Any:
    return splat(builder, _load(builder, address, vector.element), vector)


def score(rows: int) -> Any:
    """Makes an intrinsic that computes the scores of vectors of 16 keys each:

        (cache, keys, columns, vectors, query, steps, starts, scales, key_scales, scores) -> None

    `cache` is any array of the cache's dtype. The other arguments are addresses and numbers:

        keys        int64 [vectors], addresses of [steps] vectors of words
        columns     int64 [vectors], indices in a row of scores
        query       [steps, rows, factors] of 32 bits
        scores      float32 [rows], SCORES apart

    Only int8 uses these:

        starts      int32 [rows, 2], the initial values of the sums
        scales      float32 [rows]
        key_scales  float32, by column
    """

    @intrinsic
    def score_keys(
        _context: Any,
        cache: Any,
        keys: Any,
        columns: Any,
        vectors: Any,
        query: Any,
        steps: Any,
        starts: Any,
        scales: Any,
        key_scales: Any,
        scores: Any,
    ) -> Any:
        def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            _, keys, columns, vectors, query, steps, starts, scales, key_scales, scores = args
            kind = KINDS[signature.args[0].dtype.name]
            factors = len(kind.parts)

            def factor_at(step: Any, row: int, factor: int) -> Any:
                within = 4 * (row * factors + factor)
                return _offset(builder, query, (step, 4 * rows * factors), within)

            def emit(first: Any, width: int) -> None:
                places = [builder.add(first, I64(i)) for i in range(width)]
                bases = [_load(builder, _offset(builder, keys, (p, 8)), I64) for p in places]
                ends = [_load(builder, _offset(builder, columns, (p, 8)), I64) for p in places]
                start = [ir.Constant(kind.sum_type, [0] * LANES)] * (rows * width)
                if kind.sums > 1:
                    begin = [
                        _splat(builder, _offset(builder, starts, 4 * i), I32S)
                        for i in range(rows * kind.sums)
                    ]
                    start = [
                        each
                        for row in range(rows)
                        for each in begin[row * kind.sums : (row + 1) * kind.sums] * width
                    ]
                sums = _products(
                    builder,
                    kind,
                    kind.add_keys,
                    rows,
                    width,
                    steps,
                    start,
                    lambda step, i: _offset(builder, bases[i], (step, 4 * LANES)),
                    factor_at,
                )
                for n, total in enumerate(_to_floats(builder, kind, sums)):
                    row, i = divmod(n, width)
                    if kind.sums > 1:
                        scale = _splat(builder, _offset(builder, scales, 4 * row), F32S)
                        of_keys = _load(builder, _offset(builder, key_scales, (ends[i], 4)), F32S)
                        total = builder.fmul(builder.fmul(total, scale), of_keys)
                    place = _offset(builder, scores, (ends[i], 4), 4 * SCORES * row)
                    builder.store(total, pointer(builder, place, F32S), align=4)

            _in_blocks(builder, vectors, WIDTHS[rows], emit)
            return context.get_dummy_value()

        return types.void(cache, *[types.int64] * 9), codegen

    return score_keys


def weigh(rows: int) -> Any:
    """Makes an intrinsic that adds weighted values to `totals`:

        (cache, values, vectors, weights, steps, scales, totals, row_size) -> None

    `cache` is any array of the cache's dtype. The other arguments are addresses and numbers:

        values    int64 [steps], addresses of [vectors] vectors of words
        weights   [rows], WEIGHTS bytes apart, of factors [steps, ...]. For int8, the lower bytes
                  follow CHUNK bytes after the upper bytes
        totals    float32 [rows, row_size]
        scales    float32 [rows], only for int8
    """

    @intrinsic
    def weigh_values(
        _context: Any,
        cache: Any,
        values: Any,
        vectors: Any,
        weights: Any,
        steps: Any,
        scales: Any,
        totals: Any,
        row_size: Any,
    ) -> Any:
        def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            _, values, vectors, weights, steps, scales, totals, row_size = args
            kind = KINDS[signature.args[0].dtype.name]
            # Factors with separate sums are in separate rows. Other factors are side by side.
            step_bytes, factor_bytes = (4, CHUNK) if kind.sums > 1 else (4 * len(kind.parts), 4)

            def factor_at(step: Any, row: int, factor: int) -> Any:
                within = WEIGHTS * row + factor_bytes * factor
                return _offset(builder, weights, (step, step_bytes), within)

            def emit(first: Any, width: int) -> None:
                offset = builder.mul(first, I64(4 * LANES))

                def vector_at(step: Any, i: int) -> Any:
                    base = _load(builder, _offset(builder, values, (step, 8)), I64)
                    return _offset(builder, builder.add(base, offset), 4 * LANES * i)

                places = []
                for row in range(rows):
                    start = _offset(builder, totals, (row_size, 4 * row))
                    start = builder.add(start, offset)
                    places += [
                        pointer(builder, _offset(builder, start, 4 * LANES * i), F32S)
                        for i in range(width)
                    ]
                before = [builder.load(place, align=4) for place in places]
                nothing = ir.Constant(kind.sum_type, [0] * LANES)
                sums = _to_floats(
                    builder,
                    kind,
                    _products(
                        builder,
                        kind,
                        kind.add_values,
                        rows,
                        width,
                        steps,
                        before if kind.sums == 1 else [nothing] * (len(places) * kind.sums),
                        vector_at,
                        factor_at,
                    ),
                )
                for n, (total, place) in enumerate(zip(sums, places, strict=True)):
                    if kind.sums > 1:
                        scale = _splat(builder, _offset(builder, scales, 4 * (n // width)), F32S)
                        total = fma(builder, total, scale, before[n])
                    builder.store(total, place, align=4)

            _in_blocks(builder, vectors, WIDTHS[rows], emit)
            return context.get_dummy_value()

        return types.void(cache, *[types.int64] * 7), codegen

    return weigh_values
