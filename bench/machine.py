"""The machine and the software versions that a benchmark ran on."""

from __future__ import annotations

import os
import platform
import subprocess
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import psutil

_PACKAGES = ("nano-vllm-grpc", "grpcio", "numba", "torch", "transformers")


@dataclass(frozen=True)
class Machine:
    machine: dict[str, str | int]
    versions: dict[str, str]
    commit: str | None  # with "+changes" if files differ from it


def this_machine() -> Machine:
    return Machine(
        machine={
            "platform": platform.platform(),
            "cpu": _cpu_name(),
            "cores": len(os.sched_getaffinity(0)),
            "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        },
        versions={
            "python": platform.python_version(),
            **{name: _version(name) for name in _PACKAGES},
        },
        commit=_commit(),
    )


def cpu_s(process: psutil.Process) -> float:
    """CPU seconds of a service, whose parent process and serving fork are counted."""
    times = [each.cpu_times() for each in (process, *process.children())]
    return float(sum(each.user + each.system for each in times))


def _cpu_name() -> str:
    info = Path("/proc/cpuinfo")
    if info.exists():
        for line in info.read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor()


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"


def _commit() -> str | None:
    try:
        commit = _git("rev-parse", "HEAD")
        return commit + "+changes" if _git("status", "--porcelain") else commit
    except (OSError, subprocess.CalledProcessError):
        return None  # there is no repository, or git is missing


def _git(*args: str) -> str:
    here = Path(__file__).parent
    done = subprocess.run(["git", *args], cwd=here, capture_output=True, text=True, check=True)
    return done.stdout.strip()
