"""The gated activation between the two products of a feed-forward layer.

Source: Shazeer, "GLU Variants Improve Transformer" (2020).
"""

from __future__ import annotations

import torch
import triton.language as tl

from worker_svc.kernels.ops import Activation
from worker_svc.kernels.triton.launch import kernel

# 8 columns of half precision per thread are a 16-byte load of gate and one of up. A token's columns
# are divided among programs, so that a single token is spread over several multiprocessors.
NUM_WARPS = 4
BLOCK = NUM_WARPS * 32 * 8


def activate_and_multiply(gate_up: torch.Tensor, activation: Activation) -> torch.Tensor:
    """gate_up [T, 2 · size], gate before up -> activation(gate) · up [T, size]; rows may be
    strided."""
    tokens, size = len(gate_up), gate_up.shape[1] // 2
    out = gate_up.new_empty(tokens, size)
    _activate_and_multiply_kernel[(tokens, -(-size // BLOCK))](
        gate_up,
        gate_up.stride(0),
        out,
        SIZE=size,
        BLOCK=BLOCK,
        ACTIVATION=activation,
        num_warps=NUM_WARPS,
    )
    return out


@kernel()
def _activate_and_multiply_kernel(
    gate_up: tl.tensor,
    gate_up_stride: tl.tensor,
    out: tl.tensor,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    ACTIVATION: tl.constexpr,
) -> None:
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = columns < SIZE
    gates = gate_up + row * gate_up_stride + columns
    gate = tl.load(gates, mask=mask, other=0).to(tl.float32)
    up = tl.load(gates + SIZE, mask=mask, other=0).to(tl.float32)
    if ACTIVATION == "gelu_tanh":  # 0.5 · (1 + tanh(x)) is sigmoid(2x)
        share = tl.sigmoid(2 * 0.7978845608028654 * (gate + 0.044715 * gate * gate * gate))
    else:
        share = tl.sigmoid(gate)
    tl.store(out + row * SIZE + columns, gate * share * up, mask=mask)
