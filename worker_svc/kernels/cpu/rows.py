"""Memory for the rows of a step, which phases write and read."""

from __future__ import annotations

from collections.abc import Iterable
from ctypes import addressof
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from worker_svc.kernels.cpu.structs import Groups, Packed, PackTo
from worker_svc.kernels.ops import Exchange

_ALIGNMENT = 64


class Panels(Protocol):
    """A weight that the library multiplies; see `weights.PanelWeight`."""

    in_features: int
    out_features: int
    stride: int

    def struct(self, bias: torch.Tensor | None, segment: int) -> Any: ...

    def split(self, exchange: Exchange | None) -> tuple[int, Exchange | None]: ...

    def shared_segment(self, exchange: Exchange, segment: int) -> int: ...


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
    def is_read(self) -> bool:
        return self.last_use > self.first_use

    @property
    def source(self) -> Rows:
        """The rows that have the memory."""
        return self.whole or self

    @property
    def address(self) -> int | None:
        """None if no phase reads the rows."""
        assert self.memory is not None or not self.is_read
        return None if self.memory is None else self.memory.data_ptr()

    def tensor(self, count: int) -> torch.Tensor:
        assert self.memory is not None
        return self.memory[: count * self.row_bytes].view(torch.float32).view(count, self.columns)


@dataclass(eq=False)
class PackedRows:
    """Memory for rows that are packed for a product.

    Args:
        starts: int64 [matrices + 1], the first row of each of the matrices with which rows are
            multiplied, if there are several.
    """

    weight: Panels
    bias: torch.Tensor | None
    segment: int
    words: Rows
    sums: Rows
    scales: Rows
    starts: torch.Tensor | None = None

    @property
    def all(self) -> tuple[Rows, Rows, Rows]:
        return self.words, self.sums, self.scales

    def packed(self) -> Any:
        addresses = (each.address for each in self.all)
        return Packed(*addresses, self.weight.stride)

    def groups(self) -> Any:
        if self.starts is None:
            return Groups()
        return Groups(self.starts.data_ptr(), len(self.starts) - 1)

    @property
    def struct(self) -> int:
        """The address of the weight."""
        return addressof(self.weight.struct(self.bias, self.segment))

    def target(self) -> Any:
        return PackTo(self.struct, self.packed())


def allocate(memory: Iterable[Rows], capacity: int) -> None:
    """Gives rows of `capacity` tokens memory that no other rows need at the same time. Rows that
    are never read get none."""
    free: list[torch.Tensor] = []
    in_use: list[tuple[Rows, torch.Tensor]] = []
    needed = [each for each in memory if each.is_read]
    for rows in sorted(needed, key=lambda each: each.first_use):
        free += [held for each, held in in_use if each.last_use < rows.first_use]
        in_use = [(each, held) for each, held in in_use if each.last_use >= rows.first_use]
        size = -(-rows.row_bytes * capacity // _ALIGNMENT) * _ALIGNMENT
        fitting = [each for each in free if len(each) >= size]
        if fitting:
            rows.memory = min(fitting, key=len)
            free = [each for each in free if each is not rows.memory]
        else:
            rows.memory = torch.empty(size, dtype=torch.uint8)
        in_use.append((rows, rows.memory))
