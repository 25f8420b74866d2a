"""Chooses where the tests of the worker's kernels run: in Triton's interpreter on small CPU tensors
or, if TEST_DEVICE is cuda, on a GPU with the sizes of real models."""

from __future__ import annotations

import os
from importlib import import_module
from typing import Any, TypeVar

import pytest
import torch

from bench.gpu.steps import Heads

ON_GPU = os.environ.get("TEST_DEVICE") == "cuda"
DEVICE = torch.device("cuda", 0) if ON_GPU else torch.device("cpu")

T = TypeVar("T")


def by_device(*, cpu: T, gpu: T) -> T:
    return gpu if ON_GPU else cpu


def generator(seed: int) -> torch.Generator:
    """Random numbers on DEVICE: `torch.randn(..., generator=g, device=g.device)`."""
    return torch.Generator(DEVICE).manual_seed(seed)


ODD = Heads(6, 2, 80)
# Sizes on a GPU, first of rows between matrix products; the odd one is not a multiple of 16.
WIDTHS = [1024, 4096, 1003]
TOKENS = [1, 3, 256, 1000, 4096]
VOCAB_SIZES = [151_936, 32_003]
ROWS = [1, 7, 256]

cpu_only = pytest.mark.skipif(ON_GPU, reason="what it checks is the same on a CPU")
gpu_only = pytest.mark.skipif(not ON_GPU, reason="needs a GPU")


def of_cpu(module: str, function: str | None = None) -> list[Any]:
    """Parameters of a kernel's test: the CPU's implementations of the kernel. There are none on a
    GPU."""
    if ON_GPU:
        return []
    found = import_module(f"worker_svc.kernels.{module}")
    return [getattr(found, function) if function else found]


def int32(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32, device=DEVICE)
