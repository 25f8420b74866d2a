"""Checks what a stack needs from this host before any process starts."""

from __future__ import annotations

import os
import resource
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import psutil

from deploy.errors import LaunchError
from deploy.native.processes import is_running, parent_processes, stack_members
from deploy.ports import reserve_ports
from deploy.stack import RUN, run_directory

_MIN_DESCRIPTORS = 4096  # each client's connection takes one
_MIN_FREE_BYTES = 1 << 30
_SHARED_MEMORY = Path("/dev/shm")
_MAX_GPU_S = 60
_NO_GPU = 3
_KEEP = f"""
import torch
if not torch.version.cuda:
    raise SystemExit({_NO_GPU})
from worker_svc.devices.cuda_memory import CudaMemory
CudaMemory(torch.device("cuda", 0))
"""


@dataclass(frozen=True)
class Check:
    """A finding: `wrong` keeps a stack from starting, `warning` does not; `remedy` fixes it."""

    name: str
    state: Literal["ok", "warning", "wrong"]
    found: str
    remedy: str = ""


def check_cores(ranks: int) -> Check:
    """Checks that each of the `ranks` of all engines has a core."""
    cores = len(os.sched_getaffinity(0))
    if cores < ranks:
        found = f"{cores} for {ranks} ranks"
        return Check("cores", "warning", found, "on a CPU, each rank needs a core")
    return Check("cores", "ok", str(cores))


def check_descriptors() -> Check:
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard == resource.RLIM_INFINITY or hard >= _MIN_DESCRIPTORS:
        return Check("open files", "ok", "no limit" if hard < 0 else f"up to {hard}")
    return Check(
        "open files", "warning", f"up to {hard}, which limits clients", "as root, raise ulimit -Hn"
    )


def check_disk() -> Check:
    free = shutil.disk_usage(Path.cwd()).free
    found = f"{free / 2**30:.1f} GiB free for logs"
    if free < _MIN_FREE_BYTES:
        return Check("disk", "warning", found, "free some space: a full disk stops the logs")
    return Check("disk", "ok", found)


def check_shared_memory() -> Check:
    """Checks the memory that NCCL's ranks on a host share; containers often have only 64 MiB."""
    free = shutil.disk_usage(_SHARED_MEMORY).free
    found = f"{free / 2**20:.0f} MiB free in {_SHARED_MEMORY}"
    if free < _MIN_FREE_BYTES:
        return Check("shared memory", "warning", found, "in a container: docker run --shm-size=1g")
    return Check("shared memory", "ok", found)


def check_kept_memory() -> Iterator[Check]:
    """Checks that memory of the first GPU outlives a killed process, if torch can use GPUs."""
    command = [sys.executable, "-c", _KEEP]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_MAX_GPU_S)
        status, said = done.returncode, done.stderr
    except subprocess.TimeoutExpired:
        status, said = 1, f"the GPU does not answer within {_MAX_GPU_S} s"
    if status == _NO_GPU:
        return
    if not status:
        yield Check("kept memory", "ok", "weights and cache outlive a killed worker")
        return
    reason = (said.splitlines() or [f"exit status {status}"])[-1]
    found = f"a killed worker loads its weights again: {reason}"
    yield Check("kept memory", "warning", found, "free memory of the GPU, or update its driver")


def check_port(host: str, port: int) -> Check:
    if has_stack(run_directory(port)):
        return Check("port", "ok", f"{port}: the stack is running")
    try:
        reserve_ports(host, port).close()
    except LaunchError as error:
        return Check("port", "wrong", f"{error}{_listener(port)}", "end it, or use another PORT")
    return Check("port", "ok", f"{host}:{port} is free")


def has_stack(directory: Path) -> bool:
    """Returns whether a stack runs, perhaps without a supervisor."""
    return is_running(directory) or bool(parent_processes(directory))


def check_stacks() -> Iterator[Check]:
    for directory in sorted(RUN.glob("[0-9]*")):
        try:
            running = is_running(directory)
        except LaunchError as error:
            yield Check("stacks", "warning", str(error))
            continue
        if running:
            yield Check("stacks", "ok", f"a stack runs on port {directory.name}")
        elif parent_processes(directory):
            yield Check(
                "stacks",
                "warning",
                f"the stack on port {directory.name} has no supervisor",
                f"make up PORT={directory.name} starts one",
            )
        elif members := stack_members(directory):
            yield Check(
                "stacks",
                "warning",
                f"{len(members)} processes are left of a stack on port {directory.name}",
                f"make down PORT={directory.name}",
            )


def _listener(port: int) -> str:
    """Describes the process that listens on `port`, if this user may see it."""
    try:
        for each in psutil.net_connections("tcp"):
            listens = each.status == psutil.CONN_LISTEN
            if listens and each.pid and getattr(each.laddr, "port", None) == port:
                return f", pid {each.pid}: {' '.join(psutil.Process(each.pid).cmdline())[:60]}"
    except psutil.Error:
        pass
    return ""
