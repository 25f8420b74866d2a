"""Launchers, run as users would in an empty directory, with stand-ins for the services."""

from __future__ import annotations

import json
import os
import subprocess
import sysconfig
import venv
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path
from typing import Any

import psutil
import pytest

from deploy.native.processes import stack_members
from deploy.plan import Layout, plan_stack
from deploy.ports import free_port
from deploy.stack import ENGINE_SERVICES, Stack, run_directory
from tests.stack import DEMO_MODEL, HANG_TIMEOUT_S, ROOT, kill_all
from tests.waiting import WAIT_S, wait_for

STANDINS = Path(__file__).parent / "standins"
DEMO = str(DEMO_MODEL)
DIRECTORY = Path(".run/50051")


def plan(
    layout: Layout | None = None, port: int = 50051, directory: Path = DIRECTORY, **variables: str
) -> tuple[Stack, dict[str, str]]:
    """The plan of a stack with these variables of `make up`, by default of an engine alone."""
    environment = {"NANO_MODEL": DEMO} | {f"NANO_{k}": v for k, v in variables.items()}
    return plan_stack(environment, layout or Layout(services=ENGINE_SERVICES), directory, port)


class Launcher:
    """Runs `python -m cli` in a directory of its own; anything left running is killed.

    By default, services are stand-ins that speak gRPC health and obey signals, without a model.
    """

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.started: list[subprocess.Popen[str]] = []
        self._python = directory / "python"
        venv.create(self._python)
        self._find_packages(STANDINS, ROOT)
        self.environment = {k: v for k, v in os.environ.items() if not k.startswith("NANO_")} | {
            "NANO_MODEL": DEMO,
            "NANO_HTTP_PORT": "0",  # stand-ins serve no HTTP
            "NANO_UI_PORT": "0",
        }

    def __call__(self, *args: object, **environment: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            self.command(*args),
            cwd=self.directory,
            env=self.environment | environment,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=200,
        )

    def succeed(self, *args: object, **environment: str) -> str:
        """Runs a command that must succeed; returns its output."""
        done = self(*args, **environment)
        assert done.returncode == 0, done.stderr
        return done.stdout

    def fail(self, *args: object, **environment: str) -> str:
        """Runs a command that must fail with status 1; returns what it wrote to stderr."""
        done = self(*args, **environment)
        assert done.returncode == 1, done.stdout
        return done.stderr

    def start(self, *args: object, **environment: str) -> subprocess.Popen[str]:
        """Starts the launcher in the background, with pipes to and from it."""
        started = subprocess.Popen(
            self.command(*args),
            cwd=self.directory,
            env=self.environment | environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        self.started.append(started)
        return started

    def use_real_services(self) -> None:
        """Replaces the stand-ins with the real services."""
        self._find_packages(ROOT)
        self.environment |= {"NANO_HANG_TIMEOUT_S": HANG_TIMEOUT_S}

    def _find_packages(self, *folders: Path) -> None:
        """Makes the interpreter find packages here, then those of this process's interpreter. The
        variable PYTHONPATH would not reach the processes of a stack."""
        (own,) = self._python.glob("lib/python3*/site-packages")
        others = f"import site; site.addsitedir({sysconfig.get_path('purelib')!r})"
        (own / "packages.pth").write_text("\n".join([*map(str, folders), others]))

    def command(self, *args: object) -> list[str]:
        return [str(self._python / "bin" / "python"), "-P", "-m", "cli", *map(str, args)]

    @property
    def behaviour(self) -> Path:
        """A file that says how stand-ins for workers misbehave (`standins/standin.py`)."""
        return self.directory / "behaviour"

    def members(self, port: int) -> list[psutil.Process]:
        """The living processes of the stack on `port`."""
        return stack_members(self.directory / run_directory(port))

    def ps(self, port: int, *options: object) -> str:
        """Runs `ps` until every process has answered it (until then it is SILENT)."""

        def ask() -> str:
            said = self("ps", "--port", port, *options).stdout
            return "" if "SILENT" in said else said

        return wait_for(ask, "all processes to answer")

    def rows(self, port: int) -> list[list[str]]:
        """The table of `ps` without the supervisor; all processes must be serving."""
        supervisor, *table = [line.split() for line in self.ps(port).splitlines()[1:]]
        assert (supervisor[0], supervisor[4]) == ("supervisor", "RUNNING")
        assert all(row[4] == "RUNNING/SERVING" for row in table), table
        return table

    def pids(self, port: int) -> dict[str, int]:
        """The pids by name and index; all processes must be serving."""
        return {f"{row[0]}-{row[1]}": int(row[2]) for row in self.rows(port)}

    def serving(self, port: int) -> int:
        """The number of processes that serve."""
        return self("ps", "--port", port).stdout.count("RUNNING/SERVING")

    def listed(self, port: int) -> list[str]:
        """The sockets of the engines that frontends are to use."""
        lines = (self.directory / run_directory(port) / "engines").read_text().splitlines()
        return [Path(line.removeprefix("unix:")).name for line in lines]

    def events(self, port: int, process: str) -> list[dict[str, Any]]:
        """Returns the events in the log of a process."""
        log = self.directory / run_directory(port) / f"{process}.log"
        return [json.loads(line) for line in log.read_text().splitlines()]

    def drained(self, port: int, process: str) -> datetime:
        """When the process began to drain, which it did once."""
        (event,) = [each for each in self.events(port, process) if each["event"] == "draining"]
        return datetime.fromisoformat(event["timestamp"])


@contextmanager
def launching(directory: Path) -> Iterator[Launcher]:
    made = Launcher(directory)
    try:
        yield made
    finally:
        for started in made.started:
            started.kill()
            started.wait(WAIT_S)  # or `serve`'s tail would hold its output open
            started.communicate()
        for run in (directory / ".run").glob("*"):
            kill_all(run)


@pytest.fixture
def launcher(tmp_path: Path) -> Iterator[Launcher]:
    # Too long for a Unix socket, with characters that configuration files might trip over.
    directory = tmp_path / ("long " * 12 + "%(here)s ;#") / ("deep-" * 12)
    directory.mkdir(parents=True)
    with launching(directory) as made:
        yield made


@pytest.fixture
def port() -> int:
    return free_port()


def gone(processes: list[psutil.Process]) -> bool:
    """Whether all these processes end, given some time."""
    return not psutil.wait_procs(processes, timeout=WAIT_S)[1]
