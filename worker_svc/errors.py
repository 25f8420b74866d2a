"""Reasons for which a worker cannot start, of which the message is what the operator reads, and
errors after which its process cannot go on.

StartError
├── ModelError     the model directory: unsupported configuration, unknown or missing weight
└── CaptureError   a step cannot be captured in a CUDA graph
"""

from __future__ import annotations

from collections.abc import Iterator


class StartError(Exception):
    """The worker cannot run with these settings, however often it is restarted."""


class ModelError(StartError):
    """The model directory cannot be served; the message names what is wrong in it."""


class DeviceLostError(RuntimeError):
    """Nothing can be computed in this process any more; another one may."""


class SupersededError(RuntimeError):
    """The other ranks are waited for no longer, since there is a newer epoch."""

    def __init__(self) -> None:
        super().__init__("a newer epoch begins")


class CaptureError(StartError):
    """Decodes cannot run from CUDA graphs here; `ENFORCE_EAGER` serves without them."""


# Of CUDA calls that fail by themselves: the context stays usable.
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
    """Whether `error`, or what it came of, took the process's CUDA context with it, so that every
    later call fails, too.

    torch raises `AcceleratorError`, Triton a plain `RuntimeError("Triton Error [CUDA]: ...")`,
    cuBLAS "CUDA error: CUBLAS_STATUS_...".
    """
    return any(map(_is_loss, chain(error)))


def chain(error: BaseException) -> Iterator[BaseException]:
    """`error`, what it was raised from or while handling, and so on."""
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
