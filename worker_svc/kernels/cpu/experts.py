"""`Ops.mix_experts` on a CPU."""

from __future__ import annotations

from typing import Any

import torch

from worker_svc.kernels.cpu.program import current_trace
from worker_svc.kernels.cpu.structs import (
    ACTIVATIONS,
    ActivateArgs,
    ChooseArgs,
    CombineArgs,
    GatherArgs,
    Phase,
    SortArgs,
)
from worker_svc.kernels.cpu.weights import PanelWeight
from worker_svc.kernels.ops import Experts, PackedWeight


def mix_experts(
    x: torch.Tensor,
    logits: torch.Tensor,
    gate_up: PackedWeight,
    down: PackedWeight,
    experts: Experts,
) -> torch.Tensor:
    """Writes down the phases of `Ops.mix_experts`. Rows of all experts of a token lie in the memory
    of one row."""
    assert isinstance(gate_up, PanelWeight)  # `pack_experts` makes no others
    assert isinstance(down, PanelWeight)
    trace = current_trace()
    read, scores, k, own = trace.rows(x), trace.rows(logits), experts.per_token, experts.of_rank
    rows, by_sequence = trace.count(read), read.per_sequence
    starts = torch.zeros(len(own) + 1, dtype=torch.int64)
    num_rows = starts[-1:].data_ptr()  # of this rank's experts
    chosen, factors, places = (trace.new_memory(4 * k, by_sequence) for _ in range(3))
    packed = trace.packed_rows(gate_up, None, gate_up.segment, by_sequence)
    trace.pack(packed, read, None)

    def bind_choice() -> Any:
        sizes = experts.count, k, experts.normalized
        return ChooseArgs(rows, *sizes, scores.address, chosen.address, factors.address)

    def bind_sort() -> Any:
        sizes = k, own.start, len(own)
        return SortArgs(rows, *sizes, chosen.address, places.address, starts.data_ptr())

    trace.add(Phase.CHOOSE, bind_choice, scores, chosen, factors)
    trace.add(Phase.SORT, bind_sort, chosen, places)
    gathered = trace.packed_rows(gate_up, None, gate_up.segment, by_sequence, k, starts)

    def bind_gather() -> Any:
        return GatherArgs(
            rows, k, packed.struct, places.address, packed.packed(), gathered.packed()
        )

    trace.add(Phase.GATHER, bind_gather, places, *packed.all, *gathered.all)
    hidden = trace.new_memory(4 * k * gate_up.out_features, by_sequence)
    trace.multiply(gathered, num_rows, hidden)
    inner = trace.packed_rows(down, None, down.segment, by_sequence, k, starts)

    def bind_activation() -> Any:
        sizes = num_rows, down.in_features, ACTIVATIONS.index(experts.activation)
        return ActivateArgs(*sizes, hidden.address, None, inner.target())

    trace.add(Phase.ACTIVATE, bind_activation, hidden, *inner.all)
    outputs = trace.new_memory(4 * k * down.out_features, by_sequence)
    trace.multiply(inner, num_rows, outputs)
    out, tensor = trace.new_rows(down.out_features, by_sequence)

    def bind_combination() -> Any:
        sources = places.address, factors.address, outputs.address
        return CombineArgs(rows, k, down.out_features, *sources, out.address)

    trace.add(Phase.COMBINE, bind_combination, places, factors, outputs, out)
    return tensor
