"""Tensors as the arrays that numba's kernels take, sharing memory."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray


def bits(tensor: torch.Tensor) -> NDArray[Any]:
    """A float32 tensor as float32; a bfloat16 one as uint16, see `simd`."""
    if tensor.dtype == torch.bfloat16:
        return tensor.view(torch.int16).numpy().view(np.uint16)
    return tensor.numpy()
