"""Reasons why a worker cannot start, and errors that interrupt its work. The operator reads the
messages of the former.

StartError
├── ModelError     the model directory: unsupported configuration, unknown or missing weight
└── CaptureError   a step cannot be captured in a CUDA graph
"""

from __future__ import annotations

from collections.abc import Iterator


class StartError(Exception):
    """The worker cannot run with these settings. A restart does not help."""


class ModelError(StartError):
    """The model directory cannot be served. The message names the reason."""


class DeviceLostError(RuntimeError):
    """This process cannot compute any more. A new process may succeed."""


class RanksLostError(RuntimeError):
    """A collective failed, because another rank is gone or does not answer."""


class SupersededError(RuntimeError):
    """A newer epoch has ended the wait for the other ranks."""

    def __init__(self) -> None:
        super().__init__("a newer epoch begins")


class CaptureError(StartError):
    """Decodes cannot run from CUDA graphs here; `ENFORCE_EAGER` serves without them."""


# Errors of CUDA calls that leave the context usable.
_PASSING = (
    "out of memory",
    "ALLOC_FAILED",
    "captur",
    "no kernel image",
    "kernel image is invalid",
    "invalid argument",
    "invalid configuration",
    "invalid device function",
    "not found",
    "too many resources",
)


def is_device_lost(error: BaseException) -> bool:
    """Whether `error`, or one of its causes, destroyed the process's CUDA context, so that every
    later call fails too.

    torch raises `AcceleratorError`, Triton a plain `RuntimeError("Triton Error [CUDA]: ...")`,
    cuBLAS "CUDA error: CUBLAS_STATUS_...".
    """
    return any(map(_is_loss, chain(error)))


def chain(error: BaseException) -> Iterator[BaseException]:
    """Yields `error`, then its cause or the error that was being handled, and so on."""
    current: BaseException | None = error
    while current is not None:
        yield current
        current = current.__cause__ or current.__context__


def _is_loss(error: BaseException) -> bool:
    if isinstance(error, DeviceLostError):
        return True
    text = str(error)
    if not isinstance(error, RuntimeError) or any(passing in text for passing in _PASSING):
        return False
    of_cuda = text.startswith(("Triton Error [CUDA]", "CUDA error"))
    return of_cuda or type(error).__name__ == "AcceleratorError"
