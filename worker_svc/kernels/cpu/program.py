"""The program of a model's step: phases that the native library runs in one call.

A model is not written twice. `Trace` watches it run once, on tensors that have shapes but no
numbers, and writes down a phase for each operation. `traced_model` then runs steps. What the
library cannot do itself, such as an all-reduce between ranks, cuts the program in two: Python does
it between two native calls.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from ctypes import addressof, byref, c_int, c_int64, c_void_p
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch

from worker_svc.kernels.cpu.library import library, team
from worker_svc.kernels.cpu.rows import PackedRows, Panels, Rows
from worker_svc.kernels.cpu.structs import (
    ACTIVATIONS,
    ActivateArgs,
    AttendArgs,
    EmbedArgs,
    MaximaArgs,
    NormArgs,
    PackArgs,
    PackTo,
    PartsArgs,
    Phase,
    ProductArgs,
    QKNorm,
    RopeStoreArgs,
    Step,
    Times,
    Tops,
    vector,
)
from worker_svc.kernels.ops import Activation, Exchange

# The first dimensions of traced tensors: rows of tokens, and of sequences.
TOKENS, SEQUENCES = 3, 2
_FLOAT32 = 4  # bytes


@cache
def _nano_run() -> Any:
    function = library().nano_run
    function.argtypes = (c_void_p, c_int, c_void_p, c_int64, c_void_p)
    function.restype = None
    return function


def run(ops: Any, step: Any) -> None:
    """Runs phases in order."""
    _nano_run()(*team(), ops, len(ops), addressof(step))


def run_timed(ops: Any, step: Any) -> Any:
    """Runs phases in order -> the `Times` of each on the calling thread."""
    times = (Times * len(ops))()
    library().nano_run_timed(*team(), ops, c_int64(len(ops)), byref(step), times)
    return times


@dataclass(eq=False)
class TracedPhase:
    """A phase. `bind` makes its arguments, once its memory is known."""

    phase: Phase
    bind: Callable[[], Any]
    pack: PackedRows | None = None  # for the product that follows a norm or an activation


@dataclass(eq=False)
class HostCall:
    """Work of Python between phases, on rows of a step."""

    call: Callable[..., torch.Tensor]
    reads: Rows
    writes: Rows


class _Active(threading.local):
    trace: Trace | None = None


_active = _Active()


def tracing() -> Trace | None:
    """The trace that the calling thread writes, if it writes one."""
    return _active.trace


def current_trace() -> Trace:
    """The trace that the calling thread writes. The layers of a model run in no other way."""
    assert _active.trace is not None
    return _active.trace


@contextmanager
def new_trace() -> Iterator[Trace]:
    """Begins a trace, which the calling thread writes until the context ends."""
    _active.trace = trace = Trace()
    try:
        with torch.inference_mode(mode=False):  # in which tensors would not count their changes
            yield trace
    finally:
        _active.trace = None


class Trace:
    """Writes down what a model does, operation by operation."""

    def __init__(self) -> None:
        self.step = Step()
        self.parts: list[TracedPhase | HostCall] = []
        self.memory: list[Rows] = []  # in the order in which they are first written
        self.caches: dict[int, Any] = {}  # by layer
        self.products: list[PackedRows] = []
        self._rows: dict[int, Rows] = {}
        self._tensors: list[torch.Tensor] = []  # which keep the keys of `_rows` unique
        self._producers: dict[Rows, TracedPhase] = {}

    # Rows and tensors.

    def new_memory(self, row_bytes: int, per_sequence: bool, columns: int = 0) -> Rows:
        rows = Rows(row_bytes, columns, per_sequence, first_use=len(self.parts))
        self.memory.append(rows)
        return rows

    def _use(self, *rows: Rows) -> None:
        for each in rows:
            each.last_use = len(self.parts)

    def _shape(self, rows: Rows) -> tuple[int, int]:
        return SEQUENCES if rows.per_sequence else TOKENS, rows.columns

    def _tensor(self, rows: Rows) -> torch.Tensor:
        tensor = torch.empty(self._shape(rows), device="meta")
        self._tensors.append(tensor)
        self._rows[tensor.untyped_storage()._cdata] = rows
        return tensor

    def rows(self, tensor: torch.Tensor) -> Rows:
        """
        Raises:
            TypeError: `tensor` is not as an operation returned it.
        """
        rows = self._rows.get(tensor.untyped_storage()._cdata)
        if not rows or tensor.shape != self._shape(rows) or tensor._version:
            raise TypeError(
                "a layer used torch on traced rows, as + or a slice do; add an operation to Ops"
            )
        return rows

    def new_rows(self, columns: int, per_sequence: bool = False) -> tuple[Rows, torch.Tensor]:
        rows = self.new_memory(_FLOAT32 * columns, per_sequence, columns)
        return rows, self._tensor(rows)

    def count(self, rows: Rows) -> int:
        """The address of the number of rows."""
        field_ = Step.sequences if rows.per_sequence else Step.tokens
        return addressof(self.step) + int(field_.offset)

    def add(self, phase: Phase, bind: Callable[[], Any], *used: Rows) -> TracedPhase:
        self._use(*used)
        traced = TracedPhase(phase, bind)
        self.parts.append(traced)
        return traced

    # The operations.

    def embed(
        self, table: Any, codes: Any, size: int, start: int, count: int, scale: float
    ) -> torch.Tensor:
        out, tensor = self.new_rows(size)

        def bind() -> Any:
            return EmbedArgs(table, codes, size, start, count, scale, out.address)

        self.add(Phase.EMBED, bind, out)
        return tensor

    def last_rows(self, x: torch.Tensor) -> torch.Tensor:
        """The rows of the sequences' last tokens. The phase that reads them picks them."""
        whole = self.rows(x)
        return self._tensor(Rows(whole.row_bytes, whole.columns, per_sequence=True, whole=whole))

    def norm(
        self,
        x: torch.Tensor,
        residual: torch.Tensor | None,
        weight: torch.Tensor | None,
        eps: float,
    ) -> torch.Tensor:
        read = self.rows(x)
        total = None if residual is None else self.rows(residual)
        out, tensor = self.new_rows(read.columns, read.per_sequence)

        def bind() -> Any:
            target = traced.pack.target() if traced.pack else PackTo()
            return NormArgs(
                self.count(out), bool(read.whole), bool(total and total.whole), read.columns,
                read.source.address, total.source.address if total else None,
                vector(weight), eps, out.address, target,
            )  # fmt: skip

        used = [each.source for each in (read, total) if each]
        traced = self.add(Phase.NORM, bind, out, *used)
        self._producers[out] = traced
        return tensor

    def norm_parts(
        self,
        phase: Phase,
        x: torch.Tensor,
        squares: torch.Tensor | None,
        sizes: tuple[int, ...],
        weight: torch.Tensor | None = None,
        eps: float = 0.0,
    ) -> torch.Tensor:
        """Adds one of the phases that take `PartsArgs` -> the squares, new ones if none are given.
        sizes are those of the parts, and then their total sizes."""
        read = self.rows(x)
        if squares is None:
            _, squares = self.new_rows(2, read.per_sequence)
        sums = self.rows(squares)

        def bind() -> Any:
            numbers = self.count(read), read.columns, *sizes
            return PartsArgs(*numbers, read.address, sums.address, vector(weight), eps)

        self.add(phase, bind, read, sums)
        return squares

    def activate(self, gate_up: torch.Tensor, activation: Activation) -> torch.Tensor:
        read = self.rows(gate_up)
        out, tensor = self.new_rows(read.columns // 2, read.per_sequence)

        def bind() -> Any:
            target = traced.pack.target() if traced.pack else PackTo()
            sizes = self.count(read), out.columns, ACTIVATIONS.index(activation)
            return ActivateArgs(*sizes, read.address, out.address, target)

        traced = self.add(Phase.ACTIVATE, bind, out, read)
        self._producers[out] = traced
        return tensor

    def product(
        self,
        weight: Panels,
        x: torch.Tensor,
        bias: torch.Tensor | None,
        exchange: Exchange | None,
    ) -> torch.Tensor:
        read = self.rows(x)
        segment, exchange = weight.split(exchange)
        packed = self.packed_rows(weight, bias, segment, read.per_sequence)
        producer = self._producers.pop(read, None)
        if exchange is not None:
            self.pack(packed, read, exchange)
        elif producer and self.parts[-1] is producer:
            producer.pack = packed
            for each in packed.all:
                each.first_use = len(self.parts) - 1
        else:
            self.pack(packed, read, None)
        out, tensor = self.new_rows(weight.out_features, read.per_sequence)
        self.multiply(packed, self.count(read), out)
        return tensor

    def packed_rows(
        self,
        weight: Panels,
        bias: torch.Tensor | None,
        segment: int,
        per_sequence: bool,
        per_token: int = 1,
        starts: torch.Tensor | None = None,
    ) -> PackedRows:
        segments = -(-weight.in_features // segment)
        sizes = (4 * per_token * each for each in (weight.stride, segments, segments))
        words, sums, scales = (self.new_memory(size, per_sequence) for size in sizes)
        return PackedRows(weight, bias, segment, words, sums, scales, starts)

    def multiply(self, packed: PackedRows, rows: int, out: Rows) -> None:
        """Adds the product of packed rows, whose number is at address `rows`."""
        number = len(self.products)
        self.products.append(packed)

        def bind() -> Any:
            following = self.products[(number + 1) % len(self.products)]
            args = ProductArgs(packed.struct, rows, packed.packed(), out.address, packed.groups())
            if following.starts is None or following.starts is packed.starts:
                args.next, args.next_groups = following.struct, following.groups()
            return args

        self.add(Phase.PRODUCT, bind, out, *packed.all)

    def pack(self, packed: PackedRows, read: Rows, exchange: Exchange | None) -> None:
        magnitudes = tops = None
        if exchange:
            shared = packed.weight.shared_segment(exchange, packed.segment)
            stride = -(-exchange.columns // shared)
            magnitudes = self.new_memory(_FLOAT32 * stride, read.per_sequence, columns=stride)
            tops = Tops(None, stride, exchange.first, shared)
            self._maxima(read, magnitudes, tops)
            self._add_host_call(exchange.maximum, magnitudes, magnitudes)

        def bind() -> Any:
            if tops is not None and magnitudes:
                tops.data = magnitudes.address
            return PackArgs(
                packed.struct, self.count(read), read.address,
                None if tops is None else addressof(tops), packed.packed(),
            )  # fmt: skip

        self.add(Phase.PACK, bind, read, *packed.all, *([magnitudes] if magnitudes else []))

    def _maxima(self, read: Rows, magnitudes: Rows, tops: Any) -> None:
        def bind() -> Any:
            places = tops.stride, tops.first_input, tops.segment
            return MaximaArgs(
                self.count(read), read.columns, read.address, magnitudes.address, *places
            )

        self.add(Phase.MAXIMA, bind, read, magnitudes)

    def rope_store(
        self,
        qkv: torch.Tensor,
        norm: QKNorm | None,
        cos_sin: torch.Tensor,
        layer: int,
        table: int,
        heads: int,
        head_dim: int,
    ) -> torch.Tensor:
        read = self.rows(qkv)
        q, tensor = self.new_rows(heads * head_dim)

        def bind() -> Any:
            memory = self.caches[layer], table, read.address, q.address
            q_weight, k_weight, eps = norm or (None, None, 0.0)
            weights = vector(q_weight), vector(k_weight)
            return RopeStoreArgs(*memory, heads, *weights, eps, cos_sin.data_ptr())

        self.add(Phase.ROPE_STORE, bind, read, q)
        return tensor

    def attend(
        self, q: torch.Tensor, layer: int, table: int, heads: int, scale: float, window: int
    ) -> torch.Tensor:
        read = self.rows(q)
        out, tensor = self.new_rows(read.columns)

        def bind() -> Any:
            memory = self.caches[layer], table, read.address, out.address
            return AttendArgs(*memory, heads, scale, window)

        self.add(Phase.ATTEND, bind, read, out)
        return tensor

    def in_place(
        self, call: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor
    ) -> torch.Tensor:
        """Has Python change rows in place between two native calls."""
        rows = self.rows(x)
        self._add_host_call(call, rows, rows)
        return x

    def call(
        self, call: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor, columns: int
    ) -> torch.Tensor:
        """Has Python compute new rows between two native calls."""
        read = self.rows(x)
        out, tensor = self.new_rows(columns, read.per_sequence)
        self._add_host_call(call, read, out)
        return tensor

    def _add_host_call(self, call: Callable[..., torch.Tensor], read: Rows, written: Rows) -> None:
        self._use(read, written)
        self.parts.append(HostCall(call, read, written))
