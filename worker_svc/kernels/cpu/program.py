"""The program of a model's step: phases that the native library runs in one call.

A model is not written twice. `Trace` watches it run once, on tensors that have shapes but no
numbers, and writes down a phase for each operation. A step then fills in its own columns and
addresses and runs the phases. What the library cannot do itself, such as an all-reduce between
ranks, cuts the program in two: Python does it between two native calls.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from ctypes import addressof, c_int, c_int64, c_void_p
from dataclasses import dataclass, field, fields
from functools import cache
from typing import TYPE_CHECKING, Any

import torch

from worker_svc.kernels.cpu.library import library, team
from worker_svc.kernels.cpu.structs import (
    AttendArgs,
    EmbedArgs,
    MaximaArgs,
    NormArgs,
    Op,
    PackArgs,
    Packed,
    PackTo,
    Phase,
    ProductArgs,
    RopeStoreArgs,
    SiluArgs,
    Step,
    Tops,
    Vector,
)
from worker_svc.step.tensors import StepTensors

if TYPE_CHECKING:
    from worker_svc.attention.base import QKNorm
    from worker_svc.distributed import TensorParallel
    from worker_svc.kernels.cpu.weights import PanelWeight
    from worker_svc.kernels.ops import Exchange
    from worker_svc.models.decoder import Decoder

# The first dimensions of traced tensors: rows of tokens, and of sequences.
_TOKENS, _SEQUENCES = 3, 2
_ALIGNMENT = 64
_FLOAT32 = 4  # bytes


def vector(tensor: torch.Tensor) -> Any:
    return Vector(tensor.data_ptr(), tensor.dtype == torch.bfloat16)


@cache
def _nano_run() -> Any:
    function = library().nano_run
    function.argtypes = (c_void_p, c_int, c_void_p, c_int64, c_void_p)
    function.restype = None
    return function


def run(ops: Any, step: Any) -> None:
    """Runs phases in order."""
    _nano_run()(*team(), ops, len(ops), addressof(step))


def run_phase(phase: Phase, args: Any, step: Any) -> None:
    """Runs one phase alone."""
    run((Op * 1)(Op(phase, addressof(args))), step)


def step_of(tensors: StepTensors, last_tokens: torch.Tensor | None = None) -> Any:
    """The columns of a step, which the caller keeps alive."""
    step = Step()
    fill_step(step, tensors, last_tokens)
    return step


def fill_step(step: Any, tensors: StepTensors, last_tokens: torch.Tensor | None) -> None:
    step.tokens, step.sequences = len(tensors.input_ids), len(tensors.context_lens)
    step.input_ids = tensors.input_ids.data_ptr()
    step.last_tokens = last_tokens.data_ptr() if last_tokens is not None else None
    step.positions = tensors.positions.data_ptr()
    step.slots = tensors.slot_mapping.data_ptr()
    step.query_starts = tensors.query_starts.data_ptr()
    step.context_lens = tensors.context_lens.data_ptr()
    step.block_table = tensors.block_table.data_ptr()
    step.table_offsets = tensors.table_offsets.data_ptr()


@dataclass(eq=False)
class Rows:
    """Memory for rows of a step, from the phase that writes them to the last that reads them."""

    row_bytes: int
    columns: int  # of float32; 0 for packed rows
    per_sequence: bool  # whether there is a row per sequence, not per token
    whole: Rows | None = None  # the rows of all tokens, of which these are each sequence's last
    first_use: int = 0  # the number of a phase
    last_use: int = 0
    memory: torch.Tensor | None = None

    @property
    def address(self) -> int:
        assert self.memory is not None
        return self.memory.data_ptr()

    def tensor(self, count: int) -> torch.Tensor:
        assert self.memory is not None
        return self.memory[: count * self.row_bytes].view(torch.float32).view(count, self.columns)


@dataclass(eq=False)
class PackedRows:
    """Memory for rows that are packed for a product."""

    weight: PanelWeight
    bias: torch.Tensor | None
    piece: int
    words: Rows
    sums: Rows
    scales: Rows

    @property
    def all(self) -> tuple[Rows, Rows, Rows]:
        return self.words, self.sums, self.scales

    def packed(self) -> Any:
        addresses = (each.address for each in self.all)
        return Packed(*addresses, self.words.row_bytes // 4)

    @property
    def struct(self) -> int:
        """The address of the weight."""
        return addressof(self.weight.struct(self.bias, self.piece))

    def target(self) -> Any:
        return PackTo(self.struct, self.packed())


@dataclass(eq=False)
class _Traced:
    """A phase. `bind` makes its arguments, once its memory is known."""

    phase: Phase
    bind: Callable[[], Any]
    pack: PackedRows | None = None  # for the product that follows a norm or SiLU


@dataclass(eq=False)
class _Cut:
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


class Trace:
    """Writes down what a model does, operation by operation."""

    def __init__(self) -> None:
        self.step = Step()
        self.parts: list[_Traced | _Cut] = []
        self.memory: list[Rows] = []  # in the order in which they are first written
        self.caches: dict[int, Any] = {}  # by layer
        self.products: list[PackedRows] = []
        self._rows: dict[int, Rows] = {}
        self._tensors: list[torch.Tensor] = []  # which keep the keys of `_rows` unique
        self._producers: dict[Rows, _Traced] = {}

    # Rows and tensors.

    def _memory(self, row_bytes: int, per_sequence: bool, columns: int = 0) -> Rows:
        rows = Rows(row_bytes, columns, per_sequence, first_use=len(self.parts))
        self.memory.append(rows)
        return rows

    def _use(self, *rows: Rows) -> None:
        for each in rows:
            each.last_use = len(self.parts)

    def _tensor(self, rows: Rows) -> torch.Tensor:
        count = _SEQUENCES if rows.per_sequence else _TOKENS
        tensor = torch.empty(count, rows.columns, device="meta")
        self._tensors.append(tensor)
        self._rows[tensor.untyped_storage()._cdata] = rows
        return tensor

    def rows(self, tensor: torch.Tensor) -> Rows:
        return self._rows[tensor.untyped_storage()._cdata]

    def _new(self, columns: int, per_sequence: bool = False) -> tuple[Rows, torch.Tensor]:
        rows = self._memory(_FLOAT32 * columns, per_sequence, columns)
        return rows, self._tensor(rows)

    def _count(self, rows: Rows) -> int:
        """The address of the number of rows."""
        field_ = Step.sequences if rows.per_sequence else Step.tokens
        return addressof(self.step) + int(field_.offset)

    def _add(self, phase: Phase, bind: Callable[[], Any], *used: Rows) -> _Traced:
        self._use(*used)
        traced = _Traced(phase, bind)
        self.parts.append(traced)
        return traced

    # The operations.

    def embed(self, table: Any, codes: Any, size: int, start: int, count: int) -> torch.Tensor:
        out, tensor = self._new(size)

        def bind() -> Any:
            return EmbedArgs(table, codes, size, start, count, out.address)

        self._add(Phase.EMBED, bind, out)
        return tensor

    def last_rows(self, x: torch.Tensor) -> torch.Tensor:
        """The rows of the sequences' last tokens. The phase that reads them picks them."""
        whole = self.rows(x)
        return self._tensor(Rows(whole.row_bytes, whole.columns, per_sequence=True, whole=whole))

    def norm(
        self, x: torch.Tensor, residual: torch.Tensor | None, weight: torch.Tensor, eps: float
    ) -> torch.Tensor:
        given = self.rows(x)
        read = given.whole or given
        total = None if residual is None else self.rows(residual)
        total = total and (total.whole or total)
        out, tensor = self._new(given.columns, given.per_sequence)

        def bind() -> Any:
            target = traced.pack.target() if traced.pack else PackTo()
            return NormArgs(
                self._count(out), given.whole is not None, given.columns, read.address,
                total.address if total else None, vector(weight), eps, out.address, target,
            )  # fmt: skip

        traced = self._add(Phase.NORM, bind, out, read, *([total] if total else []))
        self._producers[out] = traced
        return tensor

    def silu(self, gate_up: torch.Tensor) -> torch.Tensor:
        read = self.rows(gate_up)
        out, tensor = self._new(read.columns // 2)

        def bind() -> Any:
            target = traced.pack.target() if traced.pack else PackTo()
            return SiluArgs(self._count(read), out.columns, read.address, out.address, target)

        traced = self._add(Phase.SILU, bind, out, read)
        self._producers[out] = traced
        return tensor

    def product(
        self,
        weight: PanelWeight,
        x: torch.Tensor,
        bias: torch.Tensor | None,
        exchange: Exchange | None,
    ) -> torch.Tensor:
        read = self.rows(x)
        piece, exchange = weight.split(exchange)
        pieces = -(-weight.in_features // piece)
        packed = PackedRows(
            weight, bias, piece,
            self._memory(4 * weight.stride, read.per_sequence),
            self._memory(4 * pieces, read.per_sequence),
            self._memory(4 * pieces, read.per_sequence),
        )  # fmt: skip
        producer = self._producers.pop(read, None)
        if exchange is not None:
            self._pack(packed, read, exchange)
        elif producer and self.parts[-1] is producer:
            producer.pack = packed
            for each in packed.all:
                each.first_use = len(self.parts) - 1
        else:
            self._pack(packed, read, None)
        out, tensor = self._new(weight.out_features, read.per_sequence)
        number = len(self.products)
        self.products.append(packed)

        def bind() -> Any:
            following = self.products[(number + 1) % len(self.products)]
            return ProductArgs(
                packed.struct, self._count(read), packed.packed(), out.address, following.struct
            )

        self._add(Phase.PRODUCT, bind, out, *packed.all)
        return tensor

    def _pack(self, packed: PackedRows, read: Rows, exchange: Exchange | None) -> None:
        magnitudes = tops = None
        if exchange:
            shared = packed.weight.shared_piece(exchange, packed.piece)
            stride = -(-exchange.columns // shared)
            magnitudes = self._memory(_FLOAT32 * stride, read.per_sequence, columns=stride)
            tops = Tops(None, stride, exchange.first, shared)
            self._maxima(read, magnitudes, tops)
            self._cut(exchange.maximum, magnitudes, magnitudes)

        def bind() -> Any:
            if tops is not None and magnitudes:
                tops.data = magnitudes.address
            return PackArgs(
                packed.struct, self._count(read), read.address,
                None if tops is None else addressof(tops), packed.packed(),
            )  # fmt: skip

        self._add(Phase.PACK, bind, read, *packed.all, *([magnitudes] if magnitudes else []))

    def _maxima(self, read: Rows, magnitudes: Rows, tops: Any) -> None:
        def bind() -> Any:
            places = tops.stride, tops.first_input, tops.piece
            return MaximaArgs(
                self._count(read), read.columns, read.address, magnitudes.address, *places
            )

        self._add(Phase.MAXIMA, bind, read, magnitudes)

    def rope_store(
        self,
        qkv: torch.Tensor,
        norm: QKNorm | None,
        cos_sin: torch.Tensor,
        layer: int,
        heads: int,
        head_dim: int,
    ) -> torch.Tensor:
        read = self.rows(qkv)
        q, tensor = self._new(heads * head_dim)

        def bind() -> Any:
            return rope_store_args(
                self.caches[layer], read.address, q.address, heads, norm, cos_sin.data_ptr()
            )

        self._add(Phase.ROPE_STORE, bind, read, q)
        return tensor

    def attend(self, q: torch.Tensor, layer: int, heads: int, scale: float) -> torch.Tensor:
        read = self.rows(q)
        out, tensor = self._new(read.columns)

        def bind() -> Any:
            return AttendArgs(self.caches[layer], read.address, out.address, heads, scale)

        self._add(Phase.ATTEND, bind, read, out)
        return tensor

    def in_place(
        self, call: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor
    ) -> torch.Tensor:
        """Has Python change rows in place between two native calls."""
        rows = self.rows(x)
        self._cut(call, rows, rows)
        return x

    def call(
        self, call: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor, columns: int
    ) -> torch.Tensor:
        """Has Python compute new rows between two native calls."""
        read = self.rows(x)
        out, tensor = self._new(columns, read.per_sequence)
        self._cut(call, read, out)
        return tensor

    def _cut(self, call: Callable[..., torch.Tensor], read: Rows, written: Rows) -> None:
        self._use(read, written)
        self.parts.append(_Cut(call, read, written))


def rope_store_args(
    cache: Any, qkv: int, q: int, heads: int, norm: QKNorm | None, cos_sin: int
) -> Any:
    args = RopeStoreArgs(cache, qkv, q, heads, None, None, 0, 0.0, cos_sin)
    if norm:
        args.q_weight, args.k_weight = norm.q_weight.data_ptr(), norm.k_weight.data_ptr()
        args.weight_type = norm.q_weight.dtype == torch.bfloat16
        args.eps = norm.eps
    return args


@dataclass(eq=False)
class Program:
    """A traced model, with memory for steps of up to `capacity` tokens.

    Args:
        result: the rows that a step computes.
        cache_of: a layer's cache -> the structure that phases take.
    """

    trace: Trace
    result: Rows
    cache_of: Callable[[torch.Tensor], Any]
    capacity: int = 0
    _caches: int = 0  # the address of the first
    _segments: list[Any] = field(default_factory=list)
    _bound: list[Any] = field(default_factory=list)  # arguments, kept alive

    def run(
        self, tensors: StepTensors, last_tokens: torch.Tensor, caches: Sequence[torch.Tensor]
    ) -> torch.Tensor:
        """Runs a step -> the result's rows, valid until the next step."""
        step = self.trace.step
        fill_step(step, tensors, last_tokens)
        if step.tokens > self.capacity or caches[0].data_ptr() != self._caches:
            self._bind(max(step.tokens, self.capacity), caches)
        for segment in self._segments:
            if isinstance(segment, _Cut):
                self._run_cut(segment)
            else:
                run(segment, step)
        return self.result.tensor(self._count(self.result))

    def _count(self, rows: Rows) -> int:
        step = self.trace.step
        return int(step.sequences if rows.per_sequence else step.tokens)

    def _run_cut(self, cut: _Cut) -> None:
        count = self._count(cut.reads)
        result = cut.call(cut.reads.tensor(count))
        written = cut.writes.tensor(count)
        if result.data_ptr() != written.data_ptr():
            written.copy_(result)

    def _bind(self, capacity: int, caches: Sequence[torch.Tensor]) -> None:
        """Gives all rows their memory, and phases their arguments."""
        trace = self.trace
        if capacity != self.capacity:
            self._allocate(capacity)
        self.capacity, self._caches = capacity, caches[0].data_ptr()
        trace.caches = dict(enumerate(map(self.cache_of, caches)))
        self._segments, self._bound = [], []
        for is_cut, parts in _runs(trace.parts):
            if is_cut:
                self._segments += parts
                continue
            args = [part.bind() for part in parts]
            self._bound += args
            ops = [Op(part.phase, addressof(a)) for part, a in zip(parts, args, strict=True)]
            self._segments.append((Op * len(ops))(*ops))

    def _allocate(self, capacity: int) -> None:
        """Gives rows memory that no other rows need at the same time."""
        free: list[torch.Tensor] = []
        in_use: list[Rows] = []
        for rows in sorted(self.trace.memory, key=lambda each: each.first_use):
            for each in [each for each in in_use if each.last_use < rows.first_use]:
                in_use.remove(each)
                free.append(each.memory)  # type: ignore[arg-type]
            size = -(-rows.row_bytes * capacity // _ALIGNMENT) * _ALIGNMENT
            fitting = [each for each in free if len(each) >= size]
            if fitting:
                memory = min(fitting, key=len)
                free = [each for each in free if each is not memory]
            else:
                memory = torch.empty(size, dtype=torch.uint8)
            rows.memory = memory
            in_use.append(rows)


def _runs(parts: Sequence[_Traced | _Cut]) -> Iterator[tuple[bool, list[Any]]]:
    """Splits parts into runs of phases and single cuts."""
    run_: list[Any] = []
    for part in parts:
        if isinstance(part, _Cut):
            if run_:
                yield False, run_
            yield True, [part]
            run_ = []
        else:
            run_.append(part)
    if run_:
        yield False, run_


class Programs:
    """Does what a decoder's `hidden_states` does, by programs that are traced when they are first
    needed.

    Args:
        cache_of: a layer's cache -> the structure that phases take.
    """

    def __init__(
        self,
        model: Decoder,
        tp: TensorParallel,
        num_layers: int,
        cache_of: Callable[[torch.Tensor], Any],
    ) -> None:
        self._tp = tp
        self._model = model
        self._num_layers = num_layers
        self._cache_of = cache_of
        self._programs: dict[bool, Program] = {}  # by `every_token`

    def __call__(
        self,
        tensors: StepTensors,
        last_tokens: torch.Tensor,
        caches: Sequence[torch.Tensor],
        metadata: Any,
        *,
        every_token: bool = False,
    ) -> torch.Tensor:
        """The result is valid until the next step."""
        if every_token not in self._programs:
            self._programs[every_token] = self._trace(every_token)
        return self._programs[every_token].run(tensors, last_tokens, caches)

    def _trace(self, every_token: bool) -> Program:
        shapes = {each.name: 0 for each in fields(StepTensors)}
        shapes |= {"input_ids": _TOKENS, "context_lens": _SEQUENCES, "query_starts": _SEQUENCES + 1}
        columns = {name: torch.empty(n, device="meta") for name, n in shapes.items()}
        _active.trace = trace = Trace()
        if self._tp.size > 1:
            self._tp.defer = trace.in_place
        try:
            out = self._model.hidden_states(
                StepTensors(**columns),
                torch.empty(0, device="meta"),
                range(self._num_layers),  # in place of the caches
                None,
                every_token=every_token,
            )
        finally:
            _active.trace = self._tp.defer = None
        result = trace.rows(out)
        result.last_use = len(trace.parts)
        return Program(trace, result, self._cache_of)
