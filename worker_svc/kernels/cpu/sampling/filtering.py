"""The kernels of the searches of `sampling.filters`, in C++ (`native/filtering.cpp`). See
`kernels.ops.Ops`."""

from __future__ import annotations

from ctypes import byref

import torch

from worker_svc.kernels.cpu.library import library, team
from worker_svc.kernels.cpu.structs import (
    INT,
    POINTER,
    float32s,
    int32s,
    int64s,
    rows_of,
    structure,
)

_HistogramArgs = structure(
    "HistogramArgs",
    ("logits", POINTER),
    ("row_size num_tokens num_rows", INT),
    ("rows maxima scales low shifts bins", POINTER),
)
_PickBinsArgs = structure(
    "PickBinsArgs", ("num_rows", INT), ("bins targets low shifts above", POINTER)
)


def weigh_by_key(
    logits: torch.Tensor,
    rows: torch.Tensor,
    num_tokens: int,
    maxima: torch.Tensor | None,
    scales: torch.Tensor | None,
    low: torch.Tensor,
    shifts: torch.Tensor,
    bins: torch.Tensor,
) -> None:
    arguments = _HistogramArgs(
        *rows_of(logits),
        num_tokens,
        len(rows),
        int32s(rows),
        None if maxima is None else float32s(maxima),
        None if scales is None else float32s(scales),
        *map(int64s, (low, shifts, bins)),
    )
    library().nano_weigh_by_key(*team(), byref(arguments))


def pick_bins(
    bins: torch.Tensor,
    targets: torch.Tensor,
    low: torch.Tensor,
    shifts: torch.Tensor,
    above: torch.Tensor,
) -> None:
    arguments = _PickBinsArgs(len(bins), *map(int64s, (bins, targets, low, shifts, above)))
    library().nano_pick_bins(*team(), byref(arguments))
