"""The real stack when no file can be written any more, and on a clock that jumps."""

from __future__ import annotations

import asyncio
import json
import resource
import shutil
import struct
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest

from deploy.ports import free_port
from tests.deploy.conftest import Launcher, launching
from tests.deploy.test_commands import named
from tests.faults.steady_load import make_requests, steady_load, stream_all
from tests.waiting import wait_for

HOUR_S = 3600


@dataclass
class StackInTime:
    """A stack whose clock can be set."""

    launcher: Launcher
    port: int
    offset_file: Path

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"

    def set_clock(self, offset_s: int) -> None:
        """Sets the clock of all processes of the stack at once, including future ones."""
        with self.offset_file.open("r+b") as file:
            file.write(struct.pack("l", offset_s))

    def kill(self, module: str) -> None:
        """Kills the process that serves `module`; returns once it has a successor."""
        killed = self.processes(module)[-1]
        killed.kill()

        def replaced() -> bool:
            running = self.processes(module)
            return bool(running) and killed not in running

        wait_for(replaced, f"a successor in {module}")

    def processes(self, module: str) -> list[psutil.Process]:
        """The processes of `module`, oldest first: that is the one that the supervisor started."""
        running = [p for p in self.launcher.members(self.port) if module in _command(p)]
        return sorted(running, key=lambda process: process.create_time())


def _command(process: psutil.Process) -> list[str]:
    try:
        return list(process.cmdline())
    except psutil.Error:
        return []


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[StackInTime]:
    compiler = shutil.which("cc")
    if compiler is None:
        pytest.skip("moving a process's clock needs a C compiler")
    directory = tmp_path_factory.mktemp("stack")
    library, offset_file = directory / "clock.so", directory / "offset"
    source = Path(__file__).with_name("clock.c")
    subprocess.run([compiler, "-shared", "-fPIC", "-O1", "-o", library, source], check=True)
    offset_file.write_bytes(struct.pack("l", 0))
    with launching(directory) as launcher:
        launcher.use_real_services()
        stack = StackInTime(launcher, free_port(), offset_file)
        clock = {"LD_PRELOAD": str(library), "CLOCK_OFFSET_FILE": str(offset_file)}
        # In the foreground, because in the background a stack does not get these variables.
        serving = launcher.start("serve", "--port", stack.port, "--dtype", "float32", **clock)
        assert serving.stdout
        assert any("stop it" in line for line in serving.stdout)
        yield stack


async def test_serving_goes_on_while_the_clock_jumps(stack: StackInTime) -> None:
    async with steady_load(stack.address, count=8):
        for offset_s in (HOUR_S, -HOUR_S, 0):
            stack.set_clock(offset_s)
            await stream_all(stack.address, make_requests(2))
            await asyncio.to_thread(stack.kill, "scheduler_svc")
            await stream_all(stack.address, make_requests(2))
    log = stack.launcher.directory / ".run" / str(stack.port) / "scheduler-0.log"
    hours = {json.loads(line)["timestamp"][:13] for line in log.read_text().splitlines()}
    assert len(hours) > 2  # the clock did jump


async def test_serving_goes_on_when_no_file_can_be_written(stack: StackInTime) -> None:
    """Every write to a file fails, as on a full disk, for services and supervisor alike."""
    members = stack.launcher.members(stack.port)
    async with steady_load(stack.address, count=8):
        for process in members:
            _, hard = process.rlimit(resource.RLIMIT_FSIZE)
            process.rlimit(resource.RLIMIT_FSIZE, (0, hard))
        for module in ("scheduler_svc", "worker_svc", "frontend"):
            await asyncio.to_thread(stack.kill, module)
            await stream_all(stack.address, make_requests(2))
        supervisor = named(stack.launcher.members(stack.port), "deploy.native.supervisor")
        assert supervisor in members

    # Logging resumes too. The parent process of a frontend takes seconds to start again: longer,
    # on a busy machine, than a new client waits for a server that it has never reached.
    log = stack.launcher.directory / ".run" / str(stack.port) / "supervisor.log"
    unchanged = log.read_text()
    for process in stack.launcher.members(stack.port):
        process.rlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, hard))
    stack.processes("frontend")[0].kill()
    await asyncio.to_thread(wait_for, lambda: log.read_text() != unchanged, "a line in the log")
