"""Checks that this machine has what the check needs, and reports all that is missing at once.

Until all packages are known to be there, only the standard library is imported; then another
process asks torch about the GPU.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bench.gpu.requirements import EXTRAS, installed_version, numbers, satisfies

OPTIONAL = {"flash_attn": "FlashAttention 2", "flash_attn_interface": "FlashAttention 3"}
CAPABILITY = (8, 0)
FREE_BYTES = 6 << 30  # for the model and compiled kernels
TORCH_LIMIT_S = 90.0

_ASK_TORCH = """
import importlib, json, torch
found = {"cuda": torch.version.cuda, "gpus": torch.cuda.device_count(), "modules": []}
if torch.cuda.is_available():
    found["gpu"] = torch.cuda.get_device_name(0)
    found["capability"] = torch.cuda.get_device_capability(0)
    found["memory_bytes"] = torch.cuda.get_device_properties(0).total_memory
for name in ("triton", "flash_attn", "flash_attn_interface"):
    try:
        importlib.import_module(name)
    except Exception:
        continue
    found["modules"].append(name)
print(json.dumps(found))
"""


@dataclass(frozen=True)
class Facts:
    """The facts about this machine that the check depends on."""

    python: str
    packages: Mapping[str, str | None]  # versions of those that are needed
    interpret: str | None  # TRITON_INTERPRET
    compiler: str | None
    python_header: bool  # needed along with a C compiler
    obstacles: Sequence[str]  # to writing results, and compiled kernels
    free_bytes: int
    torch: Mapping[str, Any] = field(default_factory=dict)  # as `_ASK_TORCH` prints them
    driver: str | None = None


def facts(needed: Mapping[str, Sequence[str]], directory: Path, *, ask_torch: bool = True) -> Facts:
    """
    Args:
        directory: the one for the results.
        ask_torch: whether to ask torch, if it is installed.
    """
    packages = {name: installed_version(name) for name in needed}
    compilers = filter(None, (os.environ.get("CC"), "gcc", "clang"))
    cache = Path(os.environ.get("TRITON_CACHE_DIR") or "~/.triton").expanduser()
    torch = _torch() if ask_torch and packages.get("torch") else {}
    include = sysconfig.get_paths()["include"]
    return Facts(
        python=".".join(map(str, sys.version_info[:3])),
        packages=packages,
        interpret=os.environ.get("TRITON_INTERPRET"),
        compiler=next(
            (found for name in compilers if name and (found := shutil.which(name))), None
        ),
        python_header=Path(include, "Python.h").exists(),
        obstacles=[*_obstacles(directory, "--out"), *_obstacles(cache, "TRITON_CACHE_DIR")],
        free_bytes=shutil.disk_usage(tempfile.gettempdir()).free,
        torch=torch,
        driver=driver_version() if torch else None,
    )


def problems(found: Facts, needed: Mapping[str, Sequence[str]], *, gpu: bool = True) -> list[str]:
    """Everything that stands in the way, each with a remedy.

    Args:
        gpu: whether a GPU is needed, and a compiler for it.
    """
    return [*_packages(found, needed), *_machine(found), *(_gpu(found) if gpu else ())]


def machine(found: Facts) -> dict[str, Any]:
    """The GPU and its software, for the results."""
    torch = found.torch
    there = torch.get("modules", ())
    return {
        "name": torch.get("gpu", "none"),
        "gpus": torch.get("gpus", 0),
        "memory_bytes": torch.get("memory_bytes"),
        "capability": torch.get("capability"),
        "driver": found.driver,
        "cuda": torch.get("cuda"),
        "python": found.python,
        "compiler": found.compiler,
        **{title: name in there for name, title in OPTIONAL.items()},
        "packages": {**found.packages, "triton": installed_version("triton")},
    }


def in_words(found: Mapping[str, Any]) -> str:
    """Sums up `machine` in a line."""
    there = [title for title in OPTIONAL.values() if found[title]]
    software = [f"{name} {found['packages'][name]}" for name in ("torch", "triton")]
    return ", ".join(
        [
            f"{found['name']}, driver {found['driver']}, CUDA {found['cuda']}",
            *software,
            " and ".join(there) or "no FlashAttention",
        ]
    )


def _packages(found: Facts, needed: Mapping[str, Sequence[str]]) -> Iterator[str]:
    wrong = []
    for name, specifiers in needed.items():
        installed = found.packages[name]
        line = f"{name}{','.join(specifiers)}"
        if installed is None:
            yield f"{line} is not installed"
            wrong.append(line)
        elif not all(satisfies(installed, each) for each in specifiers):
            yield f"{line} is needed, {installed} is installed"
            wrong.append(line)
    if wrong:
        packages = " ".join(f"'{line}'" for line in wrong)
        yield f"    all of them: {sys.executable} -m pip install {packages}"
        yield f"    or, in a checkout: pip install -e '.[{EXTRAS[-1]}]' pytest"


def _machine(found: Facts) -> Iterator[str]:
    if numbers(found.python) < (3, 11):
        yield f"Python 3.11 or newer is needed, this is {found.python}: set GPU_PYTHON to another"
    yield from found.obstacles
    if found.free_bytes < FREE_BYTES:
        yield (
            f"{tempfile.gettempdir()} has {found.free_bytes / 2**30:.1f} GiB left, "
            f"{FREE_BYTES >> 30} are needed: set TMPDIR to a directory with more"
        )


def _gpu(found: Facts) -> Iterator[str]:
    if found.interpret:
        yield f"TRITON_INTERPRET is {found.interpret}, kernels would run on the CPU: unset it"
    if found.compiler is None:
        yield "there is no C compiler, which Triton needs: install gcc or clang, or set CC"
    elif not found.python_header:
        yield "Python.h is missing, which Triton needs: install python3-dev (python3-devel)"
    torch = found.torch
    if not torch:
        if found.packages.get("torch"):
            yield "torch cannot be imported: python -c 'import torch' says why"
        return
    if "slow" in torch:
        yield f"importing torch took over {TORCH_LIMIT_S:.0f} s: try again, now that it is cached"
        return
    if "triton" not in torch["modules"]:
        yield "triton cannot be imported: pip install triton, in the version that torch asks for"
    if torch["cuda"] is None:
        yield "torch is built without CUDA: install the build for it, see pytorch.org"
    elif "gpu" not in torch:
        yield "torch finds no CUDA device: nvidia-smi says whether there is one, and its driver"
    elif tuple(torch["capability"]) < CAPABILITY:
        capability = ".".join(map(str, torch["capability"]))
        yield f"{torch['gpu']} has compute capability {capability}: at least 8.0 is needed"


def _obstacles(directory: Path, name: str) -> Iterator[str]:
    """Yields the reason why `directory` could not be written to; does not create it."""
    existing = next(path for path in (directory, *directory.absolute().parents) if path.exists())
    try:
        with tempfile.TemporaryFile(dir=existing):
            pass
    except OSError as error:
        yield f"{directory} cannot be written to: {error.strerror}: give another with {name}"


def _torch() -> dict[str, Any]:
    """Asks torch about the GPU; {} if torch cannot be imported."""
    command = [sys.executable, "-c", _ASK_TORCH]
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=TORCH_LIMIT_S, env=environment
        )
        found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    except subprocess.TimeoutExpired:
        return {"slow": True}
    except (ValueError, IndexError):
        return {}
    return found


def driver_version() -> str | None:
    """The NVIDIA driver's version, None if nvidia-smi does not say."""
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=30)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.split("\n")[0].strip()
