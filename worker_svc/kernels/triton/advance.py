"""Takes the columns of a step of decodes to the next step of its run, on the device."""

from __future__ import annotations

import triton
import triton.language as tl

from worker_svc.kernels.triton.launch import kernel
from worker_svc.step.tensors import StepTensors

ROWS = 128  # per program


def advance(tensors: StepTensors, block_size: int) -> None:
    """See `devices.base.Platform.advance`."""
    num_seqs = len(tensors.context_lens)
    _advance_kernel[(triton.cdiv(num_seqs, ROWS),)](
        tensors.input_ids,
        tensors.positions,
        tensors.slot_mapping,
        tensors.context_lens,
        tensors.seeds,
        tensors.uniforms,
        tensors.block_table,
        tensors.table_offsets,
        num_seqs,
        TABLES=len(tensors.slot_mapping) // num_seqs,
        BLOCK_SIZE=block_size,
        ROWS=ROWS,
    )


@triton.jit
def _splitmix64(x: tl.tensor) -> tl.tensor:
    """Computes `step.uniforms._splitmix64`."""
    z = x + 0x9E3779B97F4A7C15
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9
    z = (z ^ (z >> 27)) * 0x94D049BB133111EB
    return z ^ (z >> 31)


@kernel(do_not_specialize=["num_seqs"])
def _advance_kernel(
    input_ids: tl.tensor,
    positions: tl.tensor,
    slot_mapping: tl.tensor,
    context_lens: tl.tensor,
    seeds: tl.tensor,
    uniforms: tl.tensor,
    block_table: tl.tensor,
    table_offsets: tl.tensor,
    num_seqs: tl.tensor,
    TABLES: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    ROWS: tl.constexpr,
) -> None:
    """Advances ROWS sequences."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    inside = row < num_seqs
    position = tl.load(context_lens + row, mask=inside, other=0)  # of the next token
    real = position > 0  # other rows are padding
    for table in tl.static_range(TABLES):
        place = table * num_seqs + row
        first_block = tl.load(table_offsets + place, mask=real, other=0)
        block = tl.load(block_table + first_block + position // BLOCK_SIZE, mask=real, other=0)
        slot = block * BLOCK_SIZE + position % BLOCK_SIZE
        tl.store(slot_mapping + place, slot, mask=real)
    seed = tl.load(seeds + row, mask=real, other=0).to(tl.uint64, bitcast=True)
    mixed = _splitmix64(_splitmix64(seed) + (position + 1).to(tl.uint64))
    tl.store(input_ids + row, -1 - row, mask=real)
    tl.store(positions + row, position, mask=real)
    tl.store(context_lens + row, position + 1, mask=real)
    tl.store(uniforms + row, (mixed >> 11).to(tl.float64) * 2.0**-53, mask=real)
