"""Runs a traced model: gives the rows of its program memory, and runs steps."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from ctypes import addressof
from dataclasses import fields, replace
from itertools import groupby
from typing import Any

import torch

from worker_svc.kernels.cpu.program import (
    SEQUENCES,
    TOKENS,
    HostCall,
    Trace,
    new_trace,
    run,
)
from worker_svc.kernels.cpu.rows import Rows, allocate
from worker_svc.kernels.cpu.structs import Op, fill_step
from worker_svc.kv_cache import CacheLayout
from worker_svc.ranks.distributed import Group
from worker_svc.step.tensors import StepTensors

MAX_TOKENS = 256  # that run through all phases at once, so that their rows stay in the CPU's cache


class Program:
    """A traced model, with memory for the rows of `MAX_TOKENS` tokens at most.

    Args:
        result: the rows that a step computes.
        cache_of: a layer's cache -> the structure that phases take.
    """

    def __init__(self, trace: Trace, result: Rows, cache_of: Callable[[torch.Tensor], Any]) -> None:
        self._trace, self._result, self._cache_of = trace, result, cache_of
        self._capacity = 0  # tokens
        self._first_cache: Callable[[], torch.Tensor | None] = lambda: None
        self._parts: list[Any] = []  # arrays of `Op`, and host calls
        self._arguments: list[Any] = []  # of the phases, kept alive

    def run(
        self, tensors: StepTensors, last_tokens: torch.Tensor, caches: Sequence[torch.Tensor]
    ) -> torch.Tensor:
        """Runs a step -> the result's rows, valid until the next step."""
        tokens = len(tensors.input_ids)
        if tokens <= MAX_TOKENS:
            return self._run_part(tensors, last_tokens, caches)
        per_sequence = self._result.per_sequence
        count = len(tensors.context_lens) if per_sequence else tokens
        out = torch.empty(count, self._result.columns)
        parts = -(-tokens // MAX_TOKENS)
        for number in range(parts):
            begin, end = tokens * number // parts, tokens * (number + 1) // parts
            first_sequence, part = part_of_step(tensors, begin, end)
            rows = self._run_part(part, last_tokens, caches)
            # The row of a sequence that ends later is replaced then.
            first = first_sequence if per_sequence else begin
            out[first : first + len(rows)] = rows
        return out

    def _run_part(
        self, tensors: StepTensors, last_tokens: torch.Tensor, caches: Sequence[torch.Tensor]
    ) -> torch.Tensor:
        step = self._trace.step
        fill_step(step, tensors, last_tokens)
        if step.tokens > self._capacity or self._first_cache() is not caches[0]:
            # A power of two, because making all arguments takes milliseconds.
            self._bind(max(1 << (step.tokens - 1).bit_length(), self._capacity), caches)
        for part in self._parts:
            if isinstance(part, HostCall):
                self._run_host_call(part)
            else:
                run(part, step)
        return self._result.tensor(self._count(self._result))

    def _count(self, rows: Rows) -> int:
        step = self._trace.step
        return int(step.sequences if rows.per_sequence else step.tokens)

    def _run_host_call(self, host_call: HostCall) -> None:
        count = self._count(host_call.reads)
        result = host_call.call(host_call.reads.tensor(count))
        written = host_call.writes.tensor(count)
        if result.data_ptr() != written.data_ptr():
            written.copy_(result)

    def _bind(self, capacity: int, caches: Sequence[torch.Tensor]) -> None:
        """Gives all rows their memory, and phases their arguments."""
        if capacity != self._capacity:
            allocate(self._trace.memory, capacity)
        # Weak, because a runner frees its caches before it allocates others.
        self._capacity, self._first_cache = capacity, weakref.ref(caches[0])
        self._trace.caches = dict(enumerate(map(self._cache_of, caches)))
        self._parts, self._arguments = [], []
        for on_host, parts in groupby(self._trace.parts, lambda part: isinstance(part, HostCall)):
            of_run = list(parts)
            self._parts += of_run if on_host else [self._ops(of_run)]

    def _ops(self, phases: Sequence[Any]) -> Any:
        bound = [(each.phase, each.bind()) for each in phases]
        self._arguments += [arguments for _, arguments in bound]
        return (Op * len(bound))(*(Op(phase, addressof(args)) for phase, args in bound))


def part_of_step(tensors: StepTensors, begin: int, end: int) -> tuple[int, StepTensors]:
    """The first sequence of a step that has a token in [begin, end), and the columns of a step of
    these tokens. It can run once all tokens before `begin` have run."""
    starts = tensors.query_starts
    first = int(torch.searchsorted(starts, begin, right=True)) - 1
    last = int(torch.searchsorted(starts, end))
    sequences = slice(first, last)
    context_lens = tensors.context_lens[sequences].clone()
    context_lens[-1] -= starts[last] - end
    slots = tensors.slot_mapping.view(-1, len(tensors.input_ids))
    offsets = tensors.table_offsets[:-1].view(len(slots), -1)
    return first, replace(
        tensors,
        uniforms=tensors.uniforms[sequences],
        temperatures=tensors.temperatures[sequences],
        input_ids=tensors.input_ids[begin:end],
        positions=tensors.positions[begin:end],
        slot_mapping=slots[:, begin:end].contiguous().view(-1),
        query_starts=starts[first : last + 1].clamp(begin, end) - begin,
        context_lens=context_lens,
        table_offsets=offsets[:, sequences].contiguous().view(-1),
    )


class TracedModel:
    """Does what a decoder's `hidden_states` does, by programs that are traced when they are first
    needed. The result is valid until the next step.

    Args:
        groups: of ranks, with which the decoder exchanges rows.
        cache_of: a layer's cache -> the structure that phases take.
    """

    def __init__(
        self,
        hidden_states: Callable[..., torch.Tensor],
        groups: Sequence[Group],
        layout: CacheLayout,
        cache_of: Callable[[torch.Tensor], Any],
    ) -> None:
        self._hidden_states = hidden_states
        self._groups = [group for group in groups if group.size > 1]
        self._layout = layout
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
        if every_token not in self._programs:
            self._programs[every_token] = self._trace(every_token)
        return self._programs[every_token].run(tensors, last_tokens, caches)

    def _trace(self, every_token: bool) -> Program:
        shapes = {each.name: 0 for each in fields(StepTensors)}
        shapes |= {"input_ids": TOKENS, "context_lens": SEQUENCES, "query_starts": SEQUENCES + 1}
        columns = {name: torch.empty(n, device="meta") for name, n in shapes.items()}
        layers = range(len(self._layout.places))
        step, last_tokens = StepTensors(**columns), torch.empty(0, device="meta")
        with new_trace() as trace:
            for group in self._groups:
                group.defer = trace.in_place
            tables = range(len(self._layout.paging.tables))
            try:
                # With numbers of layers in place of their caches, and of tables in place of plans.
                out = self._hidden_states(
                    step, last_tokens, layers, tables, every_token=every_token
                )
            finally:
                for group in self._groups:
                    group.defer = None
        result = trace.rows(out)
        result.last_use = len(trace.parts)
        return Program(trace, result, self._cache_of)
