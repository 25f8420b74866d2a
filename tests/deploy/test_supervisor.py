"""What supervisord reads, and the end of processes that have lost it."""

from __future__ import annotations

import configparser
import os
import subprocess
import sys
from pathlib import Path

import pytest

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
    worker, scheduler, frontend = (
        config[f"program:{service}"] for service in ("worker", "scheduler", "frontend")
    )
    assert worker["command"].endswith("-m worker_svc --rank %(process_num)d")
    assert (worker["numprocs"], worker["numprocs_start"]) == ("2", "2")
    assert (scheduler["numprocs"], frontend["numprocs"]) == ("1", "2")
    # They stop from the highest number to the lowest.
    assert worker["priority"] < scheduler["priority"] < frontend["priority"]
    assert float(frontend["stopwaitsecs"]) > 30
    assert (frontend["autorestart"], frontend["exitcodes"]) == ("unexpected", "2")
    assert frontend["stdout_logfile"] == "100%%/%(program_name)s-%(process_num)d.log"


def test_no_supervisor(tmp_path: Path) -> None:
    with pytest.raises(SupervisorGoneError):
        supervised_processes(tmp_path)


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
