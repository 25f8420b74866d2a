"""Emits the inner loops of matrix products as LLVM code for numba. A loop computes some rows by
`PANEL` columns, whose sums stay in registers for the whole loop. Numba's own loops do not achieve
that.

Weights lie in panels of `PANEL` columns, and x lies in tiles of as many rows as a loop takes. So
both are read from one end to the other. The blocking is that of Goto and van de Geijn, "Anatomy of
High-Performance Matrix Multiplication", 2008.

The order in which a row's sums are added does not depend on the other rows. So its result does not
depend on them either.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from llvmlite import ir
from llvmlite.binding import llvm_version_info
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from worker_svc.kernels.cpu.simd import (
    F32S,
    I8,
    I16,
    I32,
    I32S,
    I64,
    LANES,
    constant,
    fma,
    function,
    loop,
    pointer,
    splat,
)
from worker_svc.kernels.cpu_features import has

PANEL = 2 * LANES  # columns that an inner loop computes at once
# Rows of a tile. Its sums and a pair of weight vectors fit into the vector registers.
MAX_ROWS = 12 if has("avx512f") else 2

_LINE = 64  # bytes of a line of the CPU's cache
_BYTES = ir.VectorType(I8, 4 * LANES)
_HALVES = ir.VectorType(ir.HalfType(), LANES)

Vectors = list[Any]
# (builder, pointer to a step of the panel) -> for each element of x that the step takes, the
# weights of each half of the panel
Load = Callable[[Any, Any], list[Vectors]]
# (builder, an element of x, a weight vector, the sum so far) -> the sum
Add = Callable[[Any, Any, Any, Any], Any]


@dataclass(frozen=True)
class Kind:
    """Describes a kind of panel and how it is multiplied.

    Args:
        step_bytes: the bytes of a panel that a step of the loop reads.
        depth: the inputs that a step takes.
        elements: the 32-bit elements of a row of x that a step takes.
        sums: the type of a vector of sums.
        scaled: whether the sums of each group of inputs are scaled.
    """

    step_bytes: int
    depth: int
    elements: int
    load: Load
    add: Add
    sums: Any = F32S
    scaled: bool = False

    @property
    def quantizes(self) -> bool:
        """Whether x has to be quantized to 8 bits."""
        return bool(self.sums == I32S)


def product(rows: int) -> Any:
    """Makes the loop over a panel for a tile of `rows` rows. It is an intrinsic

        (codes, panel, scales, zeros, x, sums_of_x, groups, steps, tile, ahead, pace) -> None

    that sets tile [rows, PANEL] float32 to X Wᵀ without the scale of x.

    `codes` is any array of the dtype that names the kind in `KINDS`. The other arguments are
    addresses (int64) and numbers:

        panel      codes of PANEL columns, in steps
        scales     float32 [groups, PANEL]
        zeros      int32 [groups, PANEL], the code of zero
        x          [groups · steps, elements, rows] of 32 bits
        sums_of_x  int32 [groups, rows]
        groups     1 unless the kind is scaled
        steps      steps per group, at least 1
        tile       the address for the result
        ahead      the address from which the loop fetches `pace` bytes per step into the cache

    Only integers have zeros and sums_of_x.
    """

    @intrinsic
    def tile_product(
        _context: Any,
        codes: Any,
        panel: Any,
        scales: Any,
        zeros: Any,
        x: Any,
        sums_of_x: Any,
        groups: Any,
        steps: Any,
        tile: Any,
        ahead: Any,
        pace: Any,
    ) -> Any:
        def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            _Loop(KINDS[signature.args[0].dtype.name], rows, builder, args[1:]).emit()
            return context.get_dummy_value()

        return types.void(codes, *[types.int64] * 10), codegen

    return tile_product


@intrinsic
def store_scaled(_context: Any, row: Any, scale: Any, out: Any) -> Any:
    """Stores PANEL float32 at address `row`, times `scale`, to address `out`. LLVM does not
    vectorize a numba loop that does this."""

    def codegen(context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        row, out = (pointer(builder, each, F32S) for each in (args[0], args[2]))
        scales = splat(builder, args[1], F32S)
        for half in range(2):
            numbers = builder.load(builder.gep(row, [I64(half)]), align=4)
            place = builder.gep(out, [I64(half)])
            builder.store(builder.fmul(numbers, scales), place, align=4)
        return context.get_dummy_value()

    return types.void(types.int64, types.float32, types.int64), codegen


class _Loop:
    """Emits the code of one `product`."""

    def __init__(self, kind: Kind, rows: int, builder: Any, args: Sequence[Any]) -> None:
        self.kind, self.rows, self.builder = kind, rows, builder
        self.panel, self.scales, self.zeros, self.x, self.sums_of_x = args[:5]
        self.groups, self.steps, self.tile, self.ahead, self.pace = args[5:]

    def emit(self) -> None:
        builder, kind = self.builder, self.kind
        if not kind.scaled:
            self._store(self._group(I64(0), self._nothing()))
            return
        with cgutils.for_range(builder, self.groups, intp=I64) as group:
            start = self._minus_zeros(group.index) if kind.quantizes else self._nothing()
            sums = self._group(group.index, start)
            first = builder.icmp_signed("==", group.index, I64(0))
            with builder.if_else(first) as (then, otherwise):
                with then:
                    self._store(self._scaled(sums, group.index))
                with otherwise:
                    self._store(self._scaled(sums, group.index, self._loaded()))

    def _group(self, group: Any, start: Vectors) -> Vectors:
        """Emits a group's steps, at least one -> the sums, 2 vectors per row, from `start` on."""
        builder, kind = self.builder, self.kind
        first = builder.mul(group, self.steps)
        panel = builder.add(self.panel, builder.mul(first, I64(kind.step_bytes)))
        x_step = 4 * kind.elements * self.rows
        x = builder.add(self.x, builder.mul(first, I64(x_step)))
        panel, x = pointer(builder, panel, I8), pointer(builder, x, I8)
        ahead = pointer(builder, builder.add(self.ahead, builder.mul(first, self.pace)), I8)
        half_pace = builder.lshr(self.pace, I64(1))
        types_of_fetch = [ahead.type, I32, I32, I32]
        fetch = function(builder, "llvm.prefetch.p0", ir.VoidType(), types_of_fetch)
        hints = [I32(0), I32(2), I32(1)]  # to read, into the second level, data

        def step(number: Any, sums: Vectors) -> Vectors:
            line = builder.gep(ahead, [builder.mul(number, self.pace)])
            builder.call(fetch, [line, *hints])
            if kind.step_bytes > _LINE:
                builder.call(fetch, [builder.gep(line, [half_pace]), *hints])
            place = builder.gep(panel, [builder.mul(number, I64(kind.step_bytes))])
            elements = builder.bitcast(
                builder.gep(x, [builder.mul(number, I64(x_step))]), ir.PointerType(I32)
            )
            added = list(sums)
            for element, halves in enumerate(kind.load(builder, place)):
                for row in range(self.rows):
                    factor = builder.load(builder.gep(elements, [I64(element * self.rows + row)]))
                    factors = splat(builder, factor, I32S)
                    for half in range(2):
                        i = 2 * row + half
                        added[i] = kind.add(builder, factors, halves[half], added[i])
            return added

        return loop(builder, self.steps, start, step)

    def _nothing(self) -> Vectors:
        return [ir.Constant(self.kind.sums, [0] * LANES)] * (2 * self.rows)

    def _minus_zeros(self, group: Any) -> Vectors:
        """The initial sums − zero · Σ x."""
        builder = self.builder
        zeros = [builder.neg(each) for each in self._columns(self.zeros, group, I32S)]
        sums_of_x = pointer(builder, self.sums_of_x, I32)
        start = builder.gep(sums_of_x, [builder.mul(group, I64(self.rows))])
        totals = (builder.load(builder.gep(start, [I64(row)])) for row in range(self.rows))
        factors = [splat(builder, total, I32S) for total in totals]
        return [builder.mul(factor, zero) for factor in factors for zero in zeros]

    def _scaled(self, sums: Vectors, group: Any, totals: Vectors | None = None) -> Vectors:
        """scale · sums, plus `totals` if they are given."""
        builder = self.builder
        scales = self._columns(self.scales, group, F32S)
        quantized = self.kind.quantizes
        floats = [builder.sitofp(each, F32S) for each in sums] if quantized else sums
        if totals is None:
            return [builder.fmul(each, scales[i % 2]) for i, each in enumerate(floats)]
        return [fma(builder, each, scales[i % 2], totals[i]) for i, each in enumerate(floats)]

    def _columns(self, address: Any, group: Any, vector: Any) -> Vectors:
        """Loads the two vectors of a group from [groups, PANEL]."""
        builder = self.builder
        start = builder.gep(pointer(builder, address, vector), [builder.mul(group, I64(2))])
        return [builder.load(builder.gep(start, [I64(half)]), align=4) for half in range(2)]

    def _store(self, values: Vectors) -> None:
        for i, value in enumerate(values):
            self.builder.store(value, self._tile_vector(i), align=4)

    def _loaded(self) -> Vectors:
        return [self.builder.load(self._tile_vector(i), align=4) for i in range(2 * self.rows)]

    def _tile_vector(self, i: int) -> Any:
        return self.builder.gep(pointer(self.builder, self.tile, F32S), [I64(i)])


def _vectors_at(builder: Any, place: Any, vector: Any, count: int) -> Vectors:
    start = builder.bitcast(place, ir.PointerType(vector))
    return [builder.load(builder.gep(start, [I64(i)]), align=1) for i in range(count)]


def _load_bfloat16(builder: Any, place: Any) -> list[Vectors]:
    """Loads a vector of pairs. Low bits hold a column of the first half, high bits one of the
    second half."""
    (pairs,) = _vectors_at(builder, place, I32S, 1)
    return [
        [builder.shl(pairs, constant(16, I32S)), builder.and_(pairs, constant(0xFFFF0000, I32S))]
    ]


def _load_pairs(builder: Any, place: Any) -> list[Vectors]:
    return [_vectors_at(builder, place, I32S, 2)]


def _load_int4(builder: Any, place: Any) -> list[Vectors]:
    """Loads 8 inputs. Low halves of the bytes are the first four, high halves the next four."""
    both = _vectors_at(builder, place, I32S, 2)
    mask = constant(0x0F0F0F0F, I32S)
    low = [builder.and_(each, mask) for each in both]
    return [low, [builder.and_(builder.lshr(each, constant(4, I32S)), mask) for each in both]]


def _load_fp8(builder: Any, place: Any) -> list[Vectors]:
    """Loads e4m3 codes as float16 of 2⁻⁸ times the value. e4m3 has 4 of the 5 bits of float16's
    exponent, and a bias that is smaller by 8."""
    codes = ir.VectorType(I8, LANES)
    shorts = ir.VectorType(I16, LANES)
    vectors = []
    for code in _vectors_at(builder, place, codes, 2):
        wide = builder.sext(code, shorts)
        sign = builder.and_(wide, constant(0x8000, shorts))
        rest = builder.and_(builder.shl(wide, constant(7, shorts)), constant(0x3F80, shorts))
        half = builder.bitcast(builder.or_(sign, rest), _HALVES)
        vectors.append(builder.bitcast(builder.fpext(half, F32S), I32S))
    return [vectors]


def add_floats(builder: Any, factor: Any, weights: Any, total: Any) -> Any:
    return fma(builder, builder.bitcast(factor, F32S), builder.bitcast(weights, F32S), total)


def add_pairs(builder: Any, factor: Any, weights: Any, total: Any) -> Any:
    pairs = ir.VectorType(_BFLOAT, 2 * LANES)
    add = function(builder, "llvm.x86.avx512bf16.dpbf16ps.512", F32S, [F32S, pairs, pairs])
    return builder.call(add, [total, *(builder.bitcast(v, pairs) for v in (factor, weights))])


def add_codes(builder: Any, factor: Any, weights: Any, total: Any) -> Any:
    """Adds products of four unsigned bytes of `weights` and four signed bytes of `factor`."""
    if has("avx512vnni"):
        return _vpdpbusd(builder, factor, weights, total, 512)
    if has("avxvnni"):
        return _by_halves(builder, factor, weights, total, _vpdpbusd)
    if has("avx512bw"):
        return _pmaddwd(builder, factor, weights, total, 512)
    if has("avx2"):
        return _by_halves(builder, factor, weights, total, _pmaddwd)
    shorts, wide = ir.VectorType(I16, 4 * LANES), ir.VectorType(I32, 4 * LANES)
    unsigned = builder.zext(builder.bitcast(weights, _BYTES), shorts)
    signed = builder.sext(builder.bitcast(factor, _BYTES), shorts)
    products = builder.mul(builder.sext(signed, wide), builder.zext(unsigned, wide))
    for offset in range(4):
        places = ir.Constant(I32S, [4 * lane + offset for lane in range(LANES)])
        total = builder.add(total, builder.shuffle_vector(products, products, places))
    return total


def _by_halves(builder: Any, factor: Any, weights: Any, total: Any, add: Any) -> Any:
    """Applies `add`, which takes 256 bits, to both halves."""
    results = []
    for start in (0, LANES // 2):
        places = ir.VectorType(I32, LANES // 2)
        places = ir.Constant(places, list(range(start, start + LANES // 2)))
        halves = (builder.shuffle_vector(v, v, places) for v in (factor, weights, total))
        results.append(add(builder, *halves, 256))
    return builder.shuffle_vector(*results, ir.Constant(I32S, list(range(LANES))))


def _vpdpbusd(builder: Any, factor: Any, weights: Any, total: Any, bits: int) -> Any:
    # Since LLVM 22 the operands are vectors of bytes.
    operand = ir.VectorType(I8, bits // 8) if llvm_version_info >= (22,) else total.type
    operands = (builder.bitcast(v, operand) for v in (weights, factor))
    name = f"llvm.x86.avx512.vpdpbusd.{bits}"
    add = function(builder, name, total.type, [total.type, operand, operand])
    return builder.call(add, [total, *operands])


def _pmaddwd(builder: Any, factor: Any, weights: Any, total: Any, bits: int) -> Any:
    """Adds products of bytes exactly, unlike `pmaddubsw`, which saturates."""
    shorts = ir.VectorType(I16, bits // 16)
    eight = constant(8, shorts)
    w, x = (builder.bitcast(v, shorts) for v in (weights, factor))
    even = builder.and_(w, constant(0xFF, shorts)), builder.ashr(builder.shl(x, eight), eight)
    odd = builder.lshr(w, eight), builder.ashr(x, eight)
    name = "llvm.x86.avx512.pmaddw.d.512" if bits == 512 else "llvm.x86.avx2.pmadd.wd"
    multiply = function(builder, name, total.type, [shorts, shorts])
    for pair in (even, odd):
        total = builder.add(total, builder.call(multiply, list(pair)))
    return total


class _BFloat(ir.HalfType):  # type: ignore[misc]
    """LLVM's type bfloat, for which llvmlite has no class."""

    null = "0.0"
    intrinsic_name = "bf16"

    def __str__(self) -> str:
        return "bfloat"


_BFLOAT = _BFloat()

# Kinds by the dtype of an array of codes, each with its shape. K is the number of inputs. In each
# group it is padded to a multiple of the step's depth.
KINDS = {
    "float32": Kind(8 * LANES, 1, 1, _load_pairs, add_floats),  # [panels, K, PANEL]
    # bfloat16 of a column in the low half, and of the column LANES to its right in the high half
    "uint32": Kind(4 * LANES, 1, 1, _load_bfloat16, add_floats),  # [panels, K, LANES]
    # bfloat16, for CPUs that multiply pairs of bfloat16 and add the products
    "uint16": Kind(8 * LANES, 2, 1, _load_pairs, add_pairs),  # [panels, K / 2, PANEL, 2]
    "uint8": Kind(2 * LANES, 1, 1, _load_fp8, add_floats, scaled=True),  # [panels, K, PANEL]
    # signed codes plus 128, as unsigned bytes
    "int8": Kind(8 * LANES, 4, 1, _load_pairs, add_codes, I32S, scaled=True),  # [.., K/4, .., 4]
    # inputs 8k to 8k + 3 of a column in the low halves of four bytes, the next 4 in the high halves
    "int32": Kind(8 * LANES, 8, 2, _load_int4, add_codes, I32S, scaled=True),  # [.., K/8, PANEL]
}
