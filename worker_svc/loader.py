"""Loads each layer's weights from the checkpoint in the layout that the device multiplies."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from worker_svc.errors import ModelError
from worker_svc.kept_memory.weights import State, WeightMemory
from worker_svc.kernels.ops import Ops, PackedWeight, PlainWeight
from worker_svc.weights.files import WeightReader
from worker_svc.weights.packed_cache import PackedCache
from worker_svc.weights.quantization.choice import Choice
from worker_svc.weights.quantization.formats import Format, QuantizedWeight
from worker_svc.weights.quantization.pieces import cut_columns, join_rows

# How many numbers of a matrix are quantized or repacked at a time, by device. They are enough to be
# quick, and take little memory compared with the model.
_PIECES = {"cpu": 1 << 20, "cuda": 1 << 22}


@dataclass(frozen=True)
class Rows:
    """Rows [start, start + count) of the checkpoint's matrix and bias `name`."""

    name: str
    start: int
    count: int


class WeightLoader:
    """Loads a rank's part of a model. It never holds more than one matrix that is not packed.

    A layer does not see where its matrix comes from. The checkpoint may hold it plain or quantized.
    The loader may also quantize a plain matrix, or map a matrix that an earlier start has packed.

    Args:
        memory: where weights are kept. None: where they are made.
    """

    def __init__(
        self,
        reader: WeightReader,
        ops: Ops,
        quantization: Choice | None = None,
        cache: PackedCache | None = None,
        memory: WeightMemory | None = None,
    ) -> None:
        self.dtype = reader.dtype
        self.device = reader.device
        self._reader = reader
        self._ops = ops
        self._choice = quantization or Choice()
        self._cache = cache
        self._memory = memory
        if memory and cache and (sizes := cache.sizes):
            memory.reserve(sizes)

    def matrix(
        self, parts: Sequence[Rows], in_features: int, columns: range | None = None
    ) -> PackedWeight:
        """Loads one matrix that stacks the rows of `parts`, each [count, in_features], or only
        `columns` of these rows.

        Raises:
            ModelError: a tensor is missing or of another shape, or its format is not served.
        """
        return self._matrices([parts], in_features, columns, self._layer_format)

    def experts(self, experts: Sequence[Sequence[Rows]], in_features: int) -> PackedWeight:
        """Loads a matrix as `matrix` does for each of several experts, for `Ops.mix_experts`.

        Raises:
            ModelError: as `matrix`.
        """
        return self._matrices(experts, in_features, None, self._layer_format, stacked=True)

    def router(self, name: str, experts: int, in_features: int) -> PackedWeight:
        """Loads matrix `name` [experts, in_features], whose products are computed in float32.

        Raises:
            ModelError: as `matrix`.
        """
        weight = self._read_plain([Rows(name, 0, experts)], experts, in_features)
        return self._keep(self._ops.pack(weight.float(), torch.float32))

    def table(self, rows: Rows, num_rows: int, columns: int) -> PackedWeight:
        """Loads a matrix [num_rows, columns] whose rows are looked up. Rows after `rows` are zero.

        Raises:
            ModelError: as `matrix`.
        """
        if self._table_format is None and not self._is_quantized(rows.name):
            return self._keep(PlainWeight(self._read_plain([rows], num_rows, columns)))
        return self._matrices([[rows]], columns, None, self._table_format, num_rows)

    def head(self, rows: Rows, num_rows: int, columns: int) -> PackedWeight:
        """Loads a matrix [num_rows, columns] for products. Rows after `rows` are zero.

        Raises:
            ModelError: as `matrix`.
        """
        return self._matrices([[rows]], columns, None, self._table_format, num_rows)

    def differs(self, rows: Rows, table: str) -> bool:
        """Whether the checkpoint has rows for a head that are not those of matrix `table`."""
        return bool(self.computed(lambda: torch.tensor(self._differs(rows, table))))

    def _differs(self, rows: Rows, table: str) -> bool:
        weight, other = f"{rows.name}.weight", f"{table}.weight"
        if not self._reader.has(weight):
            return self._is_quantized(rows.name)
        span = range(rows.start, rows.start + rows.count)
        return not self._reader.has(other) or not self._reader.same_rows(weight, other, span)

    def tied_head(self, table: PackedWeight) -> PackedWeight:
        """Packs `table` for products. A quantized table is returned unchanged."""
        if not isinstance(table, PlainWeight):
            return table
        return self._keep(self._ops.pack(table.weight, self.dtype))

    def vector(self, name: str, size: int, start: int | None = None) -> torch.Tensor:
        """Loads tensor `name` [size], or `size` of its elements from `start` on.

        Raises:
            ModelError: it is missing or of another shape.
        """
        out = torch.empty(size, dtype=self.dtype, device=self.device)
        self._reader.read_into(out, name, start=start)
        return self.computed(lambda: out)

    def computed(self, compute: Callable[[], torch.Tensor]) -> torch.Tensor:
        """Keeps the result of `compute` with the weights, and returns it."""
        tensor = compute()
        return self._memory.add({"": tensor})[""] if self._memory else tensor

    def skip(self, *names: str) -> None:
        """Allows these tensors, or all tensors of layers with these names, to stay unread."""
        self._reader.skip(*names)

    def skip_under(self, *prefixes: str) -> None:
        """Allows all tensors whose names begin so to stay unread."""
        self._reader.skip_under(*prefixes)

    def finish(self) -> None:
        """Checks that every tensor has been read or skipped.

        Raises:
            ModelError: the checkpoint has tensors that the model does not have.
        """
        self._reader.check_all_read()

    def _keep(self, weight: PackedWeight) -> PackedWeight:
        """Moves a weight into the kept memory, if there is one and the weight can be kept."""
        if self._memory is None:
            return weight
        if (state := weight.state()) is None:
            self._memory.give_up()
            return weight
        return self._ops.unpack(self._memory.add(state))

    def _new(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """A tensor on the host, in the kept memory if there is one."""
        return self._memory.new(shape, dtype) if self._memory else torch.empty(shape, dtype=dtype)

    @property
    def _layer_format(self) -> Format | None:
        """The format to which to quantize layers."""
        return None if self._choice.checkpoint else self._choice.quantize_to

    @property
    def _table_format(self) -> Format | None:
        """The format to which to quantize embedding and head."""
        found = self._choice.quantize_to
        return self._ops.table_format(found) if found else None

    def _is_quantized(self, name: str) -> bool:
        """Whether the checkpoint holds the matrix quantized."""
        checkpoint = self._choice.checkpoint
        return checkpoint is not None and checkpoint.holds(self._reader, name)

    def _matrices(
        self,
        matrices: Sequence[Sequence[Rows]],
        in_features: int,
        columns: range | None,
        quantize_to: Format | None,
        num_rows: int = 0,
        *,
        stacked: bool = False,
    ) -> PackedWeight:
        num_rows = num_rows or sum(part.count for part in matrices[0])

        def pack(weights: Iterable[torch.Tensor | QuantizedWeight]) -> PackedWeight:
            if stacked:
                return self._ops.pack_experts(weights, len(matrices), self.dtype, self._new)
            return self._ops.pack(next(iter(weights)), self.dtype)

        names = [part.name for parts in matrices for part in parts]
        quantized = [self._is_quantized(name) for name in names]
        if any(quantized) and not all(quantized):
            raise ModelError(
                f"quantization_config: {names[quantized.index(False)]} is not quantized, but "
                f"{names[quantized.index(True)]} is, and they are multiplied together"
            )
        quantize_to = None if quantized[0] else quantize_to
        is_plain = quantize_to is None and not quantized[0]
        width, cache = columns or range(in_features), None if is_plain else self._cache
        key = f"{names[0]} {quantize_to} {num_rows}x{len(width)}x{len(matrices)}"

        def read(parts: Sequence[Rows]) -> torch.Tensor | QuantizedWeight:
            if is_plain:
                return self._read_plain(parts, num_rows, in_features, columns)
            pieces = (
                (part.name, self._piece(part.name, rows, width, in_features, quantize_to))
                for part in parts
                for rows in _pieces(part, _PIECES[self.device.type] // in_features)
            )
            return join_rows(pieces, num_rows)

        if state := cache.get(key, self._new) if cache else None:
            self._reader.skip(*names)
            weight = self._ops.unpack({k: self._reader.on_device(v) for k, v in state.items()})
        else:
            weight = pack(map(read, matrices))
        packed = self._keep(weight)
        if cache and (found := packed.state()):
            cache.add(key, found)
        return packed

    def _read_plain(
        self, parts: Sequence[Rows], num_rows: int, in_features: int, columns: range | None = None
    ) -> torch.Tensor:
        width = in_features if columns is None else len(columns)
        weight = torch.empty(num_rows, width, dtype=self.dtype, device=self.device)
        end = 0
        for part in parts:
            piece, end = weight[end : end + part.count], end + part.count
            name = f"{part.name}.weight"
            if columns is None:
                self._reader.read_into(piece, name, start=part.start)
            else:
                self._reader.read_into(piece, name, dim=1, start=columns.start)
        weight[end:] = 0
        return weight

    def _piece(
        self,
        name: str,
        rows: range,
        columns: range,
        in_features: int,
        quantize_to: Format | None,
    ) -> QuantizedWeight:
        if quantize_to is None:
            assert self._choice.checkpoint  # holds it
            return self._choice.checkpoint.read(self._reader, name, rows, columns, in_features)
        weight = torch.empty(len(rows), in_features, device=self.device)
        self._reader.read_into(weight, f"{name}.weight", start=rows.start)
        # Quantizes whole rows, even if other ranks keep the rest, so that the codes do not depend
        # on the number of ranks.
        return cut_columns(self._ops.quantize(weight, quantize_to), columns)


class KeptLoader(WeightLoader):
    """Makes the weights of a model from those that the last fork has kept, in the same order.

    Args:
        states: of `WeightMemory`.
    """

    def __init__(
        self, states: Iterator[State], ops: Ops, dtype: torch.dtype, device: torch.device
    ) -> None:
        self.dtype = dtype
        self.device = device
        self._states = states
        self._ops = ops

    def _next(self, *args: Any, **named: Any) -> PackedWeight:
        return self._ops.unpack(next(self._states))

    matrix = experts = router = table = head = _next

    def tied_head(self, table: PackedWeight) -> PackedWeight:
        return self._next() if isinstance(table, PlainWeight) else table

    def vector(self, name: str, size: int, start: int | None = None) -> torch.Tensor:
        return next(self._states)[""]

    def computed(self, compute: Callable[[], torch.Tensor]) -> torch.Tensor:
        return next(self._states)[""]

    def skip(self, *names: str) -> None:
        pass

    def skip_under(self, *prefixes: str) -> None:
        pass

    def finish(self) -> None:
        pass


def _pieces(part: Rows, num_rows: int) -> Iterator[range]:
    """Yields the rows of `part` in pieces. A part without rows yields one empty piece."""
    step, stop = max(num_rows, 1), part.start + part.count
    for start in range(part.start, max(stop, part.start + 1), step):
        yield range(start, min(start + step, stop))
