"""up, ps, logs, down and run: the real supervisor with stand-ins for the services."""

from __future__ import annotations

import json
import signal
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

from deploy.health import SERVING, UNREACHABLE, check_health
from deploy.ports import free_port
from deploy.stack import run_directory
from tests.waiting import WAIT_S, wait_for

from .conftest import Launcher

pytestmark = pytest.mark.system

Gone = Callable[[list[psutil.Process]], bool]


def named(processes: list[psutil.Process], module: str) -> psutil.Process:
    return next(process for process in processes if module in process.cmdline())


def supervisor_log(launcher: Launcher, port: int) -> list[dict[str, Any]]:
    log = launcher.directory / run_directory(port) / "supervisor.log"
    return [json.loads(line) for line in log.read_text().splitlines()]


def test_a_stack_from_up_to_down(launcher: Launcher, port: int) -> None:
    up = launcher("up", "--port", port, "--tp", 2, "--frontends", 2)
    assert up.returncode == 0, up.stderr
    assert "Once upon a time, there was a fox" in up.stdout
    assert f"make chat PORT={port}" in up.stdout
    assert "grpcurl" in up.stdout

    ps = launcher("ps", "--port", port)
    assert ps.returncode == 0
    rows = [line.split() for line in ps.stdout.splitlines()[1:]]
    assert [(row[0], row[1], row[4]) for row in rows] == [
        ("supervisor", "0", "RUNNING"),
        ("worker", "0", "RUNNING/SERVING"),
        ("worker", "1", "RUNNING/SERVING"),
        ("scheduler", "0", "RUNNING/SERVING"),
        ("frontend", "0", "RUNNING/SERVING"),
        ("frontend", "1", "RUNNING/SERVING"),
    ]
    assert rows[2][3] == f"unix:.run/{port}/worker-1.sock"
    assert rows[5][3] == f"127.0.0.1:{port}"
    members = launcher.members(port)
    assert {int(row[2]) for row in rows} < {process.pid for process in members}
    assert psutil.Process(int(rows[2][2])).cmdline()[-2:] == ["--rank", "1"]
    found = json.loads(launcher("ps", "--port", port, "--json").stdout)
    assert [(each["service"], str(each["index"]), str(each["pid"])) for each in found] == [
        (row[0], row[1], row[2]) for row in rows
    ]
    assert {(each["state"], each["health"]) for each in found[1:]} == {("RUNNING", "SERVING")}

    again = launcher("up", "--port", port)
    assert again.returncode == 0
    assert "already up" in again.stdout

    logs = launcher.start("logs", "--port", port, "--service", "scheduler")
    assert logs.stdout
    assert '"event": "listening"' in logs.stdout.readline()

    down = launcher("down", "--port", port)
    assert down.returncode == 0
    assert f"stopped {len(members)} processes" in down.stdout
    assert not launcher.members(port)
    directory = launcher.directory / run_directory(port)
    assert not list(directory.glob("*.sock"))
    assert check_health(f"127.0.0.1:{port}") == UNREACHABLE
    ends = [each for each in supervisor_log(launcher, port) if each["event"] == "process ended"]
    stops = [each["process"].split("-")[0] for each in ends]
    assert stops == ["frontend", "frontend", "scheduler", "worker", "worker"]


def test_nothing_to_stop_or_show(launcher: Launcher, port: int) -> None:
    assert launcher("down", "--port", port).returncode == 0
    ps = launcher("ps", "--port", port)
    assert ps.returncode == 1
    assert f"no stack runs on port {port}" in ps.stdout
    assert launcher("ps", "--port", port, "--json").stdout == "[]\n"
    assert "no stack runs in" in launcher("down", "--all").stdout


def test_two_stacks_side_by_side_and_what_dies_comes_back(launcher: Launcher, port: int) -> None:
    other = free_port()
    for each in (port, other):
        assert launcher("up", "--port", each, "--services", "frontend").returncode == 0
    assert launcher("down", "--port", other).returncode == 0
    assert check_health(f"127.0.0.1:{port}") == SERVING

    frontend = named(launcher.members(port), "frontend")
    frontend.kill()
    psutil.wait_procs([frontend])
    wait_for(lambda: check_health(f"127.0.0.1:{port}") == SERVING, "another to serve")
    assert named(launcher.members(port), "frontend").pid != frontend.pid
    assert launcher("up", "--port", other, "--services", "frontend").returncode == 0
    assert launcher("down", "--all").stdout.count("stopping the stack") == 2
    assert not launcher.members(port) + launcher.members(other)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_a_stack_in_the_foreground_ends_with_its_command(
    launcher: Launcher, port: int, gone: Gone, number: signal.Signals
) -> None:
    model = launcher.environment.pop("NANO_MODEL")
    serving = launcher.start("serve", model, "--port", port)
    assert serving.stdout
    assert any("stop it" in line for line in serving.stdout)  # the end of the greeting
    second = launcher("serve", model, "--port", port)
    assert second.returncode == 1
    assert f"PORT: a stack is already running on port {port}" in second.stderr
    assert launcher("ps", "--port", port).returncode == 0
    members = launcher.members(port)
    serving.send_signal(number)
    assert gone(members)
    assert serving.wait(WAIT_S) == (0 if number == signal.SIGINT else -number)
    assert (launcher.directory / run_directory(port) / "frontend-0.log").exists()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL, signal.SIGSTOP])
def test_nothing_ends_with_the_supervisor_and_up_replaces_it(
    launcher: Launcher, port: int, number: signal.Signals
) -> None:
    behaviour = launcher.directory / "behaviour"
    start = ("up", "--port", port, "--services", "worker frontend")
    assert launcher(*start, STANDIN_FILE=str(behaviour)).returncode == 0
    assert launcher("scale", "--port", port, "--engines", 1).returncode == 1  # it has no scheduler
    before = launcher.members(port)
    supervisor = named(before, "deploy.native.supervisor")
    supervisor.send_signal(number)
    state = "SILENT" if number is signal.SIGSTOP else "GONE"

    def shown() -> str:
        return launcher("ps", "--port", port).stdout

    wait_for(lambda: f"{state} no process is restarted" in shown(), "ps to say so")
    assert shown().count("RUNNING/SERVING") == 2
    if number is not signal.SIGSTOP:
        restart = launcher("restart", "--port", port)
        assert restart.returncode == 1
        assert "make up starts one" in restart.stderr
    worker = named(before, "worker_svc")
    worker.kill()
    wait_for(lambda: shown().count("RUNNING/SERVING") == 1, "the worker to be missed")

    # Another adopts what runs, with what the stack was started with, and starts what is missing.
    again = launcher("up", "--port", port)
    assert again.returncode == 0, again.stderr
    assert "has a supervisor again" in again.stdout
    members = launcher.members(port)
    assert not {supervisor, worker} & {*members}
    assert named(before, "frontend") in members
    assert named(members, "worker_svc").environ()["STANDIN_FILE"] == str(behaviour)
    # What it has adopted it replaces, too.
    named(members, "frontend").kill()
    wait_for(lambda: named(before, "frontend") not in launcher.members(port), "its end")
    wait_for(lambda: shown().count("RUNNING/SERVING") == 2, "another frontend")
    assert "already up" in launcher("up", "--port", port).stdout
    assert launcher("down", "--port", port).returncode == 0
    assert not launcher.members(port)


def test_down_without_a_supervisor(launcher: Launcher, port: int, gone: Gone) -> None:
    assert launcher("up", "--port", port, "--services", "worker frontend").returncode == 0
    members = launcher.members(port)
    named(members, "deploy.native.supervisor").kill()
    assert launcher("down", "--port", port).returncode == 0
    assert gone(members)


def test_interrupting_up_stops_even_what_ignores_signals(
    launcher: Launcher, port: int, gone: Gone
) -> None:
    up = launcher.start(
        *("up", "--port", port, "--services", "worker"), STANDIN="stuck", NANO_DRAIN_TIMEOUT_S="0"
    )
    assert up.stdout
    assert any("RUNNING/NOT_SERVING" in line for line in up.stdout)  # still waiting for the worker
    members = launcher.members(port)
    second = launcher("up", "--port", port, "--services", "worker")
    assert second.returncode == 1
    assert "another make up" in second.stderr
    assert all(process.is_running() for process in members)
    up.send_signal(signal.SIGINT)
    up.communicate()
    assert up.returncode == 130
    assert gone(members)


def test_a_worker_that_cannot_start_ends_up_with_its_reason(launcher: Launcher, port: int) -> None:
    up = launcher("up", "--port", port, "--services", "worker", STANDIN="refuse")
    assert up.returncode == 1
    assert "worker-0 cannot start: no weights in this model" in up.stderr
    log = run_directory(port) / "worker-0.log"
    assert str(log) in up.stderr
    # It was not tried again.
    assert (launcher.directory / log).read_text().count("cannot start") == 1
    assert not launcher.members(port)


def test_a_crash_loop_ends_up_with_the_last_error(launcher: Launcher, port: int) -> None:
    up = launcher("up", "--port", port, "--services", "worker", STANDIN="crash")
    assert up.returncode == 1
    assert "worker-0 crashes repeatedly: RuntimeError: out of memory, say" in up.stderr
    assert not launcher.members(port)


def test_a_taken_port_is_refused(launcher: Launcher) -> None:
    # Held as by another stack's frontends, which let others share it.
    with socket.socket() as taken:
        taken.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        up = launcher("up", "--port", port)
    assert up.returncode == 1
    assert f"PORT: cannot listen on 127.0.0.1:{port}: Address already in use" in up.stderr
    assert not launcher.members(port)


def test_a_bad_value_fails_at_once_in_one_line(launcher: Launcher, port: int) -> None:
    up = launcher("up", "--port", port, "--max-num-seqs", "many")
    assert up.returncode == 1
    assert "max_num_seqs" in up.stderr
    assert len(up.stderr.splitlines()) == 1
    assert not launcher.members(port)


def test_a_host_of_workers_only(launcher: Launcher, port: int) -> None:
    """Ranks 2 and 3 of four; the rest of the stack is elsewhere."""
    addresses = [f"127.0.0.1:{free_port()}" for _ in range(4)]
    up = launcher(
        *("up", "--port", port, "--tp", 4, "--services", "worker", "--ranks", "2-3"),
        NANO_WORKER_ADDRESSES=",".join(addresses),
        NANO_MASTER_PORT=str(free_port()),
    )
    assert up.returncode == 0, up.stderr
    assert [check_health(a) for a in addresses] == [UNREACHABLE, UNREACHABLE, SERVING, SERVING]


def test_run_serves_until_its_input_ends(launcher: Launcher, gone: Gone) -> None:
    run = launcher.start("run", "--port", 0)
    assert run.stdout
    word, address = run.stdout.readline().split()
    assert word == "READY"
    assert check_health(address) == SERVING
    members = psutil.Process(run.pid).children(recursive=True)
    assert len(members) == 4  # the supervisor and the three services
    _, errors = run.communicate()  # closes its input
    assert run.returncode == 0, errors
    assert not errors
    assert gone(members)
    assert not (launcher.directory / ".run").exists()


def test_run_killed_takes_its_stack_along(launcher: Launcher, gone: Gone) -> None:
    run = launcher.start("run", "--port", 0, "--services", "worker frontend")
    assert run.stdout
    assert run.stdout.readline().startswith("READY")
    members = psutil.Process(run.pid).children(recursive=True)
    command = named(members, "deploy.native.supervisor").cmdline()
    directory = Path(command[command.index("deploy.native.supervisor") + 1])
    assert directory.is_dir()
    run.kill()
    assert gone(members)
    assert not directory.exists()


def test_run_that_fails_says_why(launcher: Launcher) -> None:
    run = launcher.start("run", "--port", 0, "--services", "worker", STANDIN="refuse")
    assert run.stderr
    assert run.stderr.read() == "run: worker-0 cannot start: no weights in this model\n"
    assert run.wait() == 1
