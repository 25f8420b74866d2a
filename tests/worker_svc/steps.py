"""Columns of steps for single operations."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

import numpy as np
import torch

from worker_svc.step.tensors import StepTensors


def step_tensors(**columns: Any) -> StepTensors:
    """Makes int32 columns from numbers. The columns that are not given are empty."""
    given = {name: np.asarray(numbers, np.int32) for name, numbers in columns.items()}
    empty = np.empty(0, np.int32)
    return StepTensors(
        **{each.name: torch.from_numpy(given.get(each.name, empty)) for each in fields(StepTensors)}
    )
