"""Which GPU, and with what software."""

from __future__ import annotations

import subprocess
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch

PACKAGES = ("triton", "flash-attn", "flash-attn-3", "numpy")
QUERY = ("name", "driver_version", "memory.total", "clocks.max.sm", "clocks.max.memory")


def has_gpu() -> bool:
    return torch.cuda.is_available()


def gpu_info() -> dict[str, Any]:
    """As nvidia-smi says, so that this process needs no memory of the GPU."""
    command = ["nvidia-smi", f"--query-gpu={','.join(QUERY)}", "--format=csv,noheader"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=30)
    except (OSError, subprocess.SubprocessError):
        return {"name": "unknown: there is no nvidia-smi"}
    gpus = done.stdout.strip().splitlines()
    info: dict[str, Any] = dict(zip(QUERY, gpus[0].split(", "), strict=True))
    return info | {"gpus": len(gpus)}


def versions() -> dict[str, str]:
    found = {"cuda": str(torch.version.cuda)}
    for package in PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            found[package] = "not installed"
    return found
