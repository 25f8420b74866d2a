"""Stores the tokens of sequences, and applies penalties and masks to logits, in C++
(`native/tokens.cpp`). See `kernels.ops.Ops`."""

from __future__ import annotations

from ctypes import byref

import torch

from worker_svc.kernels.cpu.library import library, team
from worker_svc.kernels.cpu.structs import (
    INT,
    POINTER,
    Step,
    float32s,
    int32s,
    rows_of,
    structure,
)

_PenalizeArgs = structure(
    "PenalizeArgs",
    ("logits", POINTER),
    ("row_size start count", INT),
    ("tokens", POINTER),
    ("block_size", INT),
    ("block_table table_offsets", POINTER),
    ("num_rows", INT),
    ("rows context_lens prompt_lens repetition presence frequency", POINTER),
)
_ApplyMasksArgs = structure(
    "ApplyMasksArgs",
    ("logits", POINTER),
    ("row_size start count num_rows", INT),
    ("masked masks", POINTER),
    ("mask_size", INT),
)


def store_tokens(
    cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    input_ids: torch.Tensor,
    last_tokens: torch.Tensor,
) -> None:
    step = Step(
        tokens=len(slot_mapping),
        input_ids=int32s(input_ids),
        last_tokens=int32s(last_tokens),
        slots=int32s(slot_mapping),
    )
    library().nano_store_tokens(*team(), POINTER(int32s(cache)), byref(step))


def penalize(
    logits: torch.Tensor,
    start: int,
    count: int,
    tokens: torch.Tensor,
    block_size: int,
    block_table: torch.Tensor,
    table_offsets: torch.Tensor,
    rows: torch.Tensor,
    context_lens: torch.Tensor,
    prompt_lens: torch.Tensor,
    repetition: torch.Tensor,
    presence: torch.Tensor,
    frequency: torch.Tensor,
) -> None:
    arguments = _PenalizeArgs(
        *rows_of(logits),
        start,
        count,
        int32s(tokens),
        block_size,
        int32s(block_table),
        int32s(table_offsets),
        len(rows),
        int32s(rows),
        int32s(context_lens),
        int32s(prompt_lens),
        float32s(repetition),
        float32s(presence),
        float32s(frequency),
    )
    library().nano_penalize(*team(), byref(arguments))


def apply_masks(
    logits: torch.Tensor, start: int, count: int, masked: torch.Tensor, masks: torch.Tensor
) -> None:
    arguments = _ApplyMasksArgs(
        *rows_of(logits), start, count, len(masked), int32s(masked), int32s(masks), masks.shape[1]
    )
    library().nano_apply_masks(*team(), byref(arguments))
