"""Launches Triton's kernels with a fast look-up of the binary.

Triton's `fn[grid](...)` binds and classifies every argument and looks the binary up by a string
made of the classes. That takes 12 to 35 us of Python per launch, which is most of the time of a
step that is not a CUDA graph. Here a tuple of the arguments' classes is the key of the binary that
an earlier launch with these classes used.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
import triton
from triton.runtime.driver import driver

INTERPRETED: bool = triton.knobs.runtime.interpret
# Triton's versions whose binaries `_Binary` can launch. With other versions, Triton launches.
DIRECT = triton.__version__.startswith(("3.6.", "3.7."))


class _Binary(NamedTuple):
    kernel: Any  # triton's CompiledKernel
    function: int
    packed_metadata: Any
    constants: tuple[object, ...]  # compiled in, in the signature's order


class Launcher:
    """A `triton.jit` kernel, launched as Triton's are: `kernel[grid](tensors and numbers...,
    CONSTANT=..., num_warps=...)`.

    Arguments that are compiled in are passed by name and follow the others in the signature.
    """

    compiling = 0  # launches, of any kernel, that may be waiting for the compiler now

    def __init__(self, jit: Any) -> None:
        self._jit = jit
        self._constants = [p.name for p in jit.params if p.is_constexpr]
        self._binaries: dict[tuple[object, ...], _Binary] = {}

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        return partial(self._launch, grid) if DIRECT else self._jit[grid]

    def _launch(self, grid: tuple[int, ...], *args: Any, **options: Any) -> None:
        active = driver.active
        device = active.get_current_device()
        key = (device, *options.values(), *map(_class_of, args))
        binary = self._binaries.get(key)
        if binary is None:
            self._binaries[key] = self._first_launch(grid, args, options)
            return
        kernel, function, packed, constants = binary
        stream = active.get_current_stream(device)
        x, y, z = (*grid, 1, 1)[:3]
        # Without Triton's metadata and hooks, which only its own profiler uses.
        kernel.run(x, y, z, stream, function, packed, None, None, None, *args, *constants)

    def _first_launch(
        self, grid: tuple[int, ...], args: tuple[Any, ...], options: dict[str, Any]
    ) -> _Binary:
        """Launches through Triton, once per tuple of classes."""
        Launcher.compiling += 1
        try:
            kernel = self._jit[grid](*args, **options)
        finally:
            Launcher.compiling -= 1
        constants = tuple(options[name] for name in self._constants)
        return _Binary(kernel, kernel.function, kernel.packed_metadata, constants)


def kernel(**options: Any) -> Callable[[Callable[..., Any]], Any]:
    """Makes a `Launcher` of `triton.jit(**options)`; in the interpreter, only the latter."""

    def decorate(function: Callable[..., Any]) -> Any:
        jit = triton.jit(function, **options)
        return jit if INTERPRETED else Launcher(jit)

    return decorate


def next_power_of_2(n: int) -> int:
    """Rounds up to a power of two. Triton's function also works in kernels, but takes 3 us."""
    return 1 << (n - 1).bit_length()


def _class_of(argument: Any) -> object:
    """The properties on which Triton specializes: a tensor's type and alignment, and whether an
    integer is 1, a multiple of 16 or long."""
    kind = type(argument)
    if kind is torch.Tensor:
        return argument.dtype if argument.data_ptr() & 15 else (argument.dtype,)
    if kind is int:
        return argument == 1, argument & 15 == 0, -(2**31) <= argument < 2**31
    return kind
