"""Launchers, run as users would in an empty directory, with stand-ins for the services."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest

from deploy.native.processes import stack_members
from deploy.ports import free_port
from deploy.stack import run_directory
from tests.stack import kill_all
from tests.waiting import WAIT_S

ROOT = Path(__file__).parents[2]
STANDINS = Path(__file__).parent / "standins"


class Launcher:
    """Runs `python -m cli` in a directory of its own; anything left running is killed.

    By default, services are stand-ins that speak gRPC health and obey signals, without a model.
    """

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.started: list[subprocess.Popen[str]] = []
        self.environment = {k: v for k, v in os.environ.items() if not k.startswith("NANO_")} | {
            "PYTHONPATH": f"{STANDINS}:{ROOT}",
            "NANO_MODEL": str(ROOT / "models" / "demo"),
            "NANO_HTTP_PORT": "0",  # stand-ins do not speak to a gateway
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
        self.environment["PYTHONPATH"] = str(ROOT)

    @staticmethod
    def command(*args: object) -> list[str]:
        return [sys.executable, "-P", "-m", "cli", *map(str, args)]

    def members(self, port: int) -> list[psutil.Process]:
        """The living processes of the stack on `port`."""
        return stack_members(self.directory / run_directory(port))


@contextmanager
def launching(directory: Path) -> Iterator[Launcher]:
    made = Launcher(directory)
    try:
        yield made
    finally:
        for started in made.started:
            started.kill()
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


@pytest.fixture
def gone() -> Callable[[list[psutil.Process]], bool]:
    """Checks whether all the given processes end, given some time."""

    def check(processes: list[psutil.Process]) -> bool:
        return not psutil.wait_procs(processes, timeout=WAIT_S)[1]

    return check
