"""Queries the version of the GPU's driver."""

from __future__ import annotations

import subprocess


def driver_version() -> str | None:
    """The NVIDIA driver's version, None if nvidia-smi does not say."""
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=30)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.split("\n")[0].strip()
