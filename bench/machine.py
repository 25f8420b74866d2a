"""The machine and the software versions that a benchmark ran on."""

from __future__ import annotations

import os
import platform
import subprocess
from contextlib import suppress
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import psutil

_PACKAGES = ("nano-vllm-grpc", "grpcio", "torch", "transformers")


@dataclass(frozen=True)
class Machine:
    machine: dict[str, str | int]
    versions: dict[str, str]
    commit: str | None  # with "+changes" if files differ from it
    environment: dict[str, str]  # settings, without the client's token


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
        environment={
            name: value
            for name, value in sorted(os.environ.items())
            if name.startswith("NANO_") and name != "NANO_TOKEN"
        },
    )


def cpu_s(pid: int | None = None) -> float:
    """CPU seconds of a process, by default this one, and of its descendants. Those that have ended
    count once a process has waited for them."""
    process, total = psutil.Process(pid), 0.0
    for each in (process, *process.children(recursive=True)):
        with suppress(psutil.Error):  # the process has just ended
            total += sum(each.cpu_times()[:4])  # user, system, and both of children that have ended
    return total


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
