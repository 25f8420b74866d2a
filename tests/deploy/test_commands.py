"""up, ps, logs, down and run, with real processes: supervisord and stand-ins for the services."""

from __future__ import annotations

import json
import signal
import socket
from collections.abc import Callable
from pathlib import Path

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


def complete(find: Callable[[], list[psutil.Process]], count: int) -> list[psutil.Process]:
    """Waits for so many processes: the watchdog, for whom nobody waits, may be the last."""
    wait_for(lambda: len(find()) == count, f"{count} processes")
    return find()


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
        ("worker", "0", "RUNNING/SERVING"),
        ("worker", "1", "RUNNING/SERVING"),
        ("scheduler", "0", "RUNNING/SERVING"),
        ("frontend", "0", "RUNNING/SERVING"),
        ("frontend", "1", "RUNNING/SERVING"),
    ]
    assert rows[1][3] == f"unix:.run/{port}/worker-1.sock"
    assert rows[4][3] == f"127.0.0.1:{port}"
    members = launcher.members(port)
    assert {int(row[2]) for row in rows} < {process.pid for process in members}
    assert psutil.Process(int(rows[1][2])).cmdline()[-2:] == ["--rank", "1"]
    found = json.loads(launcher("ps", "--port", port, "--json").stdout)
    assert [(each["service"], str(each["index"]), str(each["pid"])) for each in found] == [
        (row[0], row[1], row[2]) for row in rows
    ]
    assert {(each["state"], each["health"]) for each in found} == {("RUNNING", "SERVING")}

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
    stops = [
        line.split("stopped: ")[1].split("-")[0]
        for line in (directory / "supervisord.log").read_text().splitlines()
        if "stopped: " in line
    ]
    assert stops == ["watchdog", "frontend", "frontend", "scheduler", "worker", "worker"]


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
    assert f"PORT: a stack runs on port {port} already" in second.stderr
    assert launcher("ps", "--port", port).returncode == 0
    members = launcher.members(port)
    serving.send_signal(number)
    assert gone(members)
    assert serving.wait(WAIT_S) == (0 if number == signal.SIGINT else -number)
    assert (launcher.directory / run_directory(port) / "frontend-0.log").exists()


def test_a_stack_in_the_background_comes_back_when_its_supervisor_dies(
    launcher: Launcher, port: int, gone: Gone
) -> None:
    start = ("up", "--port", port, "--services", "worker frontend")
    assert launcher(*start).returncode == 0
    members = complete(lambda: launcher.members(port), 5)
    named(members, "deploy.supervise").kill()
    assert gone(members)

    def serves() -> bool:
        return launcher("ps", "--port", port).stdout.count("RUNNING/SERVING") == 2

    wait_for(serves, "the stack to serve again")
    # down does not wait for the services to notice, and comes to an end with the watchdog.
    members = complete(lambda: launcher.members(port), 5)
    named(members, "deploy.supervise").kill()
    assert launcher("down", "--port", port).returncode == 0
    assert gone(members)
    assert not launcher.members(port)


def test_interrupting_up_stops_even_what_ignores_signals(
    launcher: Launcher, port: int, gone: Gone
) -> None:
    up = launcher.start(
        *("up", "--port", port, "--services", "worker"), STANDIN="stuck", NANO_DRAIN_TIMEOUT_S="0"
    )
    assert up.stdout
    assert any("RUNNING/NOT_SERVING" in line for line in up.stdout)  # still waiting for the worker
    members = complete(lambda: launcher.members(port), 4)
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
    assert "worker-0 crashes again and again: RuntimeError: out of memory, say" in up.stderr
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
    # The supervisor, the watchdog and its keeper, the three services.
    members = complete(lambda: psutil.Process(run.pid).children(recursive=True), 6)
    _, errors = run.communicate()  # closes its input
    assert run.returncode == 0, errors
    assert not errors
    assert gone(members)
    assert not (launcher.directory / ".run").exists()


def test_run_killed_takes_its_stack_along(launcher: Launcher, gone: Gone) -> None:
    run = launcher.start("run", "--port", 0, "--services", "worker frontend")
    assert run.stdout
    assert run.stdout.readline().startswith("READY")
    members = complete(lambda: psutil.Process(run.pid).children(recursive=True), 5)
    supervise = named(members, "deploy.supervise").cmdline()
    directory = Path(next(part for part in supervise if part.endswith(".conf"))).parent
    assert directory.is_dir()
    run.kill()
    assert gone(members)
    assert not directory.exists()


def test_run_that_fails_says_why(launcher: Launcher) -> None:
    run = launcher.start("run", "--port", 0, "--services", "worker", STANDIN="refuse")
    assert run.stderr
    assert run.stderr.read() == "run: worker-0 cannot start: no weights in this model\n"
    assert run.wait() == 1
