"""The operations of `kernels.cpu.ops`, each run alone on tensors with numbers.

A traced model has to give the bits that its operations give one after the other.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from ctypes import addressof
from dataclasses import fields
from functools import partial
from typing import Any

import numpy as np
import torch

from worker_svc.kernels.cpu import ops, program
from worker_svc.kernels.cpu.program import HostCall, Trace, TracedPhase, run
from worker_svc.kernels.cpu.rows import Rows
from worker_svc.kernels.cpu.structs import Op, fill_step
from worker_svc.ranks.distributed import TensorParallel
from worker_svc.step.tensors import StepTensors

NOTHING = torch.empty(0, dtype=torch.int32)
OF_LAYERS = {
    *("embed", "rms_norm", "sum_squares", "scale_parts"),
    *("activate_and_multiply", "mix_experts"),
}


class EagerTrace(Trace):
    """Runs each phase before the next one is written down."""

    def __init__(self, tensors: StepTensors, last_tokens: torch.Tensor) -> None:
        super().__init__()
        self._columns = tensors, last_tokens  # kept alive
        fill_step(self.step, tensors, last_tokens)

    def run(self) -> None:
        parts, self.parts = self.parts, []
        for part in parts:
            if isinstance(part, HostCall):
                result = part.call(part.reads.tensor(self._number(part.reads)))
                part.writes.tensor(self._number(part.writes)).copy_(result)
            else:
                arguments = part.bind()
                run((Op * 1)(Op(part.phase, addressof(arguments))), self.step)

    def _number(self, rows: Rows) -> int:
        return int(self.step.sequences if rows.per_sequence else self.step.tokens)

    def new_memory(self, row_bytes: int, per_sequence: bool, columns: int = 0) -> Rows:
        rows = super().new_memory(row_bytes, per_sequence, columns)
        rows.memory = torch.empty(row_bytes * self._number(rows), dtype=torch.uint8)
        return rows

    def _tensor(self, rows: Rows) -> torch.Tensor:
        return rows.tensor(self._number(rows))

    def rows(self, tensor: torch.Tensor) -> Rows:
        per_sequence, columns = len(tensor) != self.step.tokens, tensor.shape[1]
        memory = tensor.view(-1).view(torch.uint8)
        return Rows(4 * columns, columns, per_sequence=per_sequence, memory=memory)

    def add(self, *given: Any) -> TracedPhase:
        self.run()
        return super().add(*given)

    def _add_host_call(self, *given: Any) -> None:
        self.run()
        super()._add_host_call(*given)

    def last_rows(self, x: torch.Tensor) -> torch.Tensor:
        self.run()
        starts = self._columns[0].query_starts
        return x if len(starts) - 1 == len(x) else x[starts[1:] - 1]


@contextmanager
def eager(
    tensors: StepTensors,
    last_tokens: torch.Tensor = NOTHING,
    caches: Sequence[Any] = (),
    tp: TensorParallel | None = None,
) -> Iterator[None]:
    """Runs operations in the body of the `with` on the rows of a step. Their results may be read
    after it."""
    program._active.trace = trace = EagerTrace(tensors, last_tokens)
    trace.caches = dict(enumerate(caches))
    tp = tp or TensorParallel()

    def reduce(call: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor) -> torch.Tensor:
        trace.run()
        tp.defer = None
        result = call(x)
        tp.defer = reduce
        return result

    tp.defer = reduce
    try:
        yield
        trace.run()
    finally:
        program._active.trace = tp.defer = None


def step_tensors(**columns: Any) -> StepTensors:
    """Makes int32 columns from numbers. The columns that are not given are empty."""
    return StepTensors(
        **{
            each.name: torch.from_numpy(np.asarray(columns.get(each.name, ()), np.int32))
            for each in fields(StepTensors)
        }
    )


def alone(
    operation: Callable[..., torch.Tensor],
    first: torch.Tensor,
    *others: Any,
    tp: TensorParallel | None = None,
) -> torch.Tensor:
    """Runs an operation, whose first argument has a row per token or is the ids of tokens."""
    is_rows = first.dim() > 1
    tensors = step_tensors(input_ids=np.zeros(len(first)) if is_rows else first)
    with eager(tensors, NOTHING if is_rows else others[0], tp=tp):
        return operation(first, *others)


def __getattr__(name: str) -> Any:
    found = getattr(ops, name)
    return partial(alone, found) if name in OF_LAYERS else found
