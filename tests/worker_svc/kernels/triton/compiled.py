"""Compiles the kernels that a launcher launches, without the GPU they are for.

The launcher itself runs, on CPU tensors, with a stand-in for Triton's CUDA driver and with launches
that end where the binary would be handed to it. Types, alignments, constants and options are thus
those of a real launch. Needs a process without TRITON_INTERPRET.
"""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.backends.driver import GPUDriver
from triton.compiler import CompiledKernel
from triton.runtime.driver import driver
from triton.runtime.jit import JITFunction

CUOBJDUMP = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"


@dataclass(frozen=True)
class Case:
    """`launch` calls a launcher with CPU tensors of the dtypes, strides and alignment of a real
    call; sizes that no kernel is specialized on may be small. Contents do not matter."""

    name: str
    launch: Callable[[], object]
    uses_wgmma: bool = False  # in those kernels that multiply tiles
    first_target: int = 80


@dataclass(frozen=True)
class Binary:
    """One compiled kernel: bytes of shared memory per program, registers per thread, and bytes of
    local memory per thread, which spilled registers take."""

    kernel: str
    case: str
    target: int
    registers: int
    spills: int
    shared: int
    wgmma: bool
    needs_wgmma: bool


class _Driver(GPUDriver):  # type: ignore[misc]
    """Acts as if a GPU of compute capability `target` (90 is 9.0) were device number `target`:
    Triton keeps its compiled kernels per device."""

    def __init__(self, target: int) -> None:
        self.target = target
        self.get_current_device = lambda: target
        self.get_current_stream = lambda device: 0

    @classmethod
    def is_active(cls) -> bool:
        return True

    def map_python_to_cpp_type(self, ty: str) -> str:
        raise NotImplementedError

    def get_active_torch_device(self) -> torch.device:
        return torch.device("cpu")

    def get_benchmarker(self) -> Any:
        raise NotImplementedError

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", self.target, 32)


@dataclass(frozen=True)
class Launch:
    """Everything that the driver is given; for tensors, their type and shape."""

    kernel: Any
    arguments: tuple[object, ...]


@contextmanager
def idle_driver(target: int, launcher: Callable[[Any], Callable[..., object]]) -> Iterator[None]:
    """Has kernels compiled for `target` and, instead of launched, given to `launcher`'s result."""
    driver.set_active(_Driver(target))
    with (
        patch.object(CompiledKernel, "_init_handles", lambda kernel: None),
        patch.object(CompiledKernel, "launch_metadata", lambda kernel, *_: None),
        patch.object(CompiledKernel, "run", property(launcher)),
        patch("triton.knobs.runtime.launch_enter_hook", None),
        patch("triton.knobs.runtime.launch_exit_hook", None),
    ):
        yield


def compile_case(case: Case, target: int) -> list[Binary]:
    """Compiles all kernels of a case, in order of launch; one of two identical launches counts.

    Raises:
        AssertionError: launched again, without Triton's own look at the arguments
            (`worker_svc.kernels.triton.launch`), a kernel had another binary, grid or argument.
    """
    launches: list[Launch] = []

    def launcher(kernel: Any) -> Callable[..., None]:
        def launch(*arguments: Any) -> None:
            launches.append(Launch(kernel, tuple(map(_described, arguments))))

        return launch

    with idle_driver(target, launcher):
        case.launch()
        first = launches.copy()
        launches.clear()
        again = AssertionError("a class of arguments that was launched before")
        with patch.object(JITFunction, "run", side_effect=again):
            case.launch()
    assert launches == first, case.name
    binaries: dict[str, Binary] = {}
    for kernel in {launch.kernel.hash: launch.kernel for launch in first}.values():
        registers, spills = _resources(kernel.asm["cubin"])
        binaries[kernel.hash] = Binary(
            kernel=kernel.name,
            case=case.name,
            target=target,
            registers=registers,
            spills=spills,
            shared=kernel.metadata.shared,
            wgmma="wgmma.mma_async" in kernel.asm["ptx"],
            needs_wgmma=case.uses_wgmma and target == 90 and "tt.dot" in kernel.asm["ttir"],
        )
    return list(binaries.values())


def _described(argument: Any) -> object:
    if isinstance(argument, torch.Tensor):
        return argument.dtype, argument.shape
    return argument


def _resources(cubin: bytes) -> tuple[int, int]:
    """Registers per thread, and bytes of stack and local memory per thread."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [str(CUOBJDUMP), "--dump-resource-usage", file.name]
        text = subprocess.run(command, capture_output=True, check=True, text=True).stdout
    usage = {name: int(value) for name, value in re.findall(r"(\w+):(\d+)", text)}
    return usage["REG"], usage["STACK"] + usage["LOCAL"]
