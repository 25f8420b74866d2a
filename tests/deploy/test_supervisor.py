"""The configuration of supervisord, and the end of processes that have lost it."""

from __future__ import annotations

import configparser
import os
import shlex
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from deploy.commands import down
from deploy.errors import SupervisorGoneError
from deploy.plan import Layout, plan_stack
from deploy.supervisor import (
    MARKER,
    stack_members,
    stop_stack,
    supervised_processes,
)
from deploy.supervisor_config import render_config

DEMO = str(Path(__file__).parents[2] / "models" / "demo")


def test_config() -> None:
    environment = {
        "NANO_MODEL": DEMO,
        "NANO_TP": "4",
        "NANO_MASTER_PORT": "9",
        "NANO_DRAIN_TIMEOUT_S": "30",
    }
    stack, _ = plan_stack(environment, Layout(frontends=2, ranks="2-3"), Path("100%"), 1)
    config = configparser.RawConfigParser()
    config.read_string(render_config(stack))
    worker, scheduler, frontends = (
        config[f"group:{service}"] for service in ("worker", "scheduler", "frontend")
    )
    assert worker["programs"] == "worker-2,worker-3"
    assert (scheduler["programs"], frontends["programs"]) == (
        "scheduler-0",
        "frontend-0,frontend-1",
    )
    # They stop from the highest number to the lowest.
    assert worker["priority"] < scheduler["priority"] < frontends["priority"]
    assert config["program:worker-3"]["command"].endswith("/models/engine-0 --rank 3")
    frontend = config["program:frontend-1"]
    assert frontend["command"].endswith("/models/stack --index 1")
    assert float(frontend["stopwaitsecs"]) > 30
    assert (frontend["autorestart"], frontend["exitcodes"]) == ("unexpected", "2")
    assert frontend["stdout_logfile"] == "100%%/frontend-1.log"


def test_config_of_several_engines() -> None:
    environment = {"NANO_MODEL": DEMO, "NANO_TP": "2"}
    stack, shared = plan_stack(environment, Layout(engines=3), Path("run"), 1)
    config = configparser.RawConfigParser()
    config.read_string(render_config(stack))

    def settings(name: str) -> dict[str, str]:
        """A process's, which are in its environment or else on its command line."""
        words = shlex.split(config[f"program:{name}"]["command"])[4:]
        pairs = zip(words[::2], words[1::2], strict=True)
        flags = {key[2:].replace("-", "_").upper(): value for key, value in pairs}
        return {key.removeprefix("NANO_"): value for key, value in shared.items()} | flags

    for engine in range(3):
        of_engine = "" if engine == 0 else f"engine-{engine}-"
        first, second = 2 * engine, 2 * engine + 1
        addresses = f"unix:run/worker-{first}.sock,unix:run/worker-{second}.sock"
        group = config[f"group:{of_engine}worker"]
        assert group["programs"] == f"worker-{first},worker-{second}"
        assert group["priority"] < config[f"group:{of_engine}scheduler"]["priority"]
        scheduler = settings(f"scheduler-{engine}")
        assert scheduler["WORKER_ADDRESSES"] == addresses
        assert scheduler["SCHEDULER_ADDRESS"] == stack.scheduler_address_of(engine)
        assert scheduler.get("ENGINE_NAME", "0") == str(engine)
        for rank, index in enumerate((first, second)):
            worker = settings(f"worker-{index}")
            assert (worker["WORKER_ADDRESSES"], worker["RANK"]) == (addresses, str(rank))
            assert worker.get("INDEX", worker["RANK"]) == str(index)
            assert worker["ENGINES_ON_HOST"] == "3"
    meeting = [settings(f"worker-{index}")["MASTER_PORT"] for index in range(6)]
    assert meeting[::2] == meeting[1::2]
    assert len(set(meeting)) == 3


def test_no_supervisor(tmp_path: Path) -> None:
    with pytest.raises(SupervisorGoneError):
        supervised_processes(tmp_path)


def test_a_pid_that_another_process_had_before(tmp_path: Path) -> None:
    with member(tmp_path) as process:
        (earlier,) = stack_members(tmp_path)
        # As psutil remembers a process from which this one has taken the pid over.
        earlier._ident = (process.pid, earlier.create_time() - 1)
        (found,) = stack_members(tmp_path)
        found.terminate()
        assert process.wait() == -signal.SIGTERM


@contextmanager
def member(directory: Path) -> Iterator[subprocess.Popen[bytes]]:
    """Runs a process that belongs to the stack in this directory."""
    environment = os.environ | {MARKER: str(directory)}
    with subprocess.Popen(
        ["cat"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, bufsize=0, env=environment
    ) as process:
        assert process.stdin
        assert process.stdout
        try:
            process.stdin.write(b"\n")
            process.stdout.read(1)  # it runs: in the middle of exec it has no environment yet
            yield process
        finally:
            process.kill()


def test_what_ignores_signals_is_killed_after_the_grace(tmp_path: Path) -> None:
    deaf = "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); print(); signal.pause()"
    with subprocess.Popen(
        [sys.executable, "-c", deaf],
        env=os.environ | {MARKER: str(tmp_path)},
        stdout=subprocess.PIPE,
    ) as process:
        assert process.stdout
        process.stdout.readline()
        assert [member.pid for member in stack_members(tmp_path)] == [process.pid]
        assert not stack_members(tmp_path.parent)
        said: list[str] = []
        assert stop_stack(tmp_path, 0.1, said.append) == 1
        assert process.wait() == -9
    assert "killing 1 processes" in said[0]


def test_down_removes_a_directory_without_files(tmp_path: Path) -> None:
    directory = tmp_path / "6000"
    (directory / "models").mkdir(parents=True)
    (directory / "lock").touch()
    log = directory / "worker-0.log"
    log.touch()
    down(directory)
    assert log.exists()
    log.unlink()
    down(directory)
    assert not directory.exists()
