"""Reasons for which a worker cannot start, of which the message is what the operator reads, and
which errors of a GPU leave nothing that could go on.

StartError
├── ModelError     the model directory: unsupported configuration, unknown or missing weight
└── CaptureError   a step cannot be captured in a CUDA graph
"""

from __future__ import annotations


class StartError(Exception):
    """The worker cannot run with these settings, however often it is restarted."""


class ModelError(StartError):
    """The model directory cannot be served; the message names what is wrong in it."""


class CaptureError(StartError):
    """Decodes cannot run from CUDA graphs here; `ENFORCE_EAGER` serves without them."""


def is_device_lost(error: BaseException) -> bool:
    """Whether `error`, of a CUDA call, took the process's context with it, so that every later
    call fails, too. Running out of memory and what a capture forbids do not.

    torch raises `AcceleratorError`, Triton a plain `RuntimeError("Triton Error [CUDA]: ...")`,
    cuBLAS "CUDA error: CUBLAS_STATUS_...".
    """
    text = str(error)
    if not isinstance(error, RuntimeError) or "out of memory" in text or "captur" in text:
        return False
    if type(error).__name__ == "AcceleratorError":
        return True
    return text.startswith(("Triton Error [CUDA]", "CUDA error")) and "ALLOC_FAILED" not in text
