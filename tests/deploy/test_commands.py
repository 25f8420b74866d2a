"""up, ps, logs, down and run: the real supervisor with stand-ins for the services."""

from __future__ import annotations

import json
import signal
from pathlib import Path
from urllib.request import urlopen

import psutil
import pytest

from deploy.health import SERVING, UNREACHABLE, check_health, http_health
from deploy.native.processes import NAME
from deploy.ports import free_port
from deploy.stack import run_directory
from tests.waiting import WAIT_S, wait_for

from .conftest import Launcher, gone

pytestmark = pytest.mark.system


def named(processes: list[psutil.Process], module: str) -> psutil.Process:
    return next(process for process in processes if module in process.cmdline())


def test_a_stack_from_up_to_down(launcher: Launcher, port: int) -> None:
    up = launcher.succeed("up", "--port", port, "--tp", 2, "--frontends", 2)
    assert "Once upon a time, there was a fox" in up
    assert f"make chat PORT={port}" in up
    assert "grpcurl" in up

    rows, pids = launcher.rows(port), launcher.pids(port)
    assert list(pids) == ["worker-0", "worker-1", "scheduler-0", "frontend-0", "frontend-1"]
    assert rows[1][3] == f"unix:.run/{port}/worker-1.sock"
    assert rows[4][3] == f"127.0.0.1:{port}"
    members = launcher.members(port)
    assert {*pids.values()} < {process.pid for process in members}
    assert psutil.Process(pids["worker-1"]).cmdline()[-2:] == ["--rank", "1"]
    supervisor, *found = json.loads(launcher.ps(port, "--json"))
    assert (supervisor["service"], supervisor["state"]) == ("supervisor", "RUNNING")
    assert {f"{each['service']}-{each['index']}": each["pid"] for each in found} == pids
    assert {(each["state"], each["health"]) for each in found} == {("RUNNING", "SERVING")}
    assert "already up" in launcher.succeed("up", "--port", port)

    logs = launcher.start("logs", "--port", port, "--service", "scheduler")
    assert logs.stdout
    assert '"event": "listening"' in logs.stdout.readline()

    down = launcher.succeed("down", "--port", port)
    assert f"stopped {len(members)} processes" in down
    assert not launcher.members(port)
    directory = launcher.directory / run_directory(port)
    assert directory.stat().st_mode & 0o777 == 0o700
    assert not list(directory.glob("*.sock"))
    assert check_health(f"127.0.0.1:{port}", WAIT_S) == UNREACHABLE
    *workers, scheduler, first, second = [launcher.drained(port, name) for name in pids]
    assert max(first, second) < scheduler < min(workers)


def test_the_dashboard_from_up_to_down(launcher: Launcher, port: int) -> None:
    ui_port = free_port()
    url = f"http://127.0.0.1:{ui_port}"
    up = launcher.succeed("up", "--port", port, "--ui-port", ui_port)
    assert f"Its dashboard is {url}." in up
    with urlopen(f"{url}/events") as events:
        state = next(line for line in events if line.startswith(b"data: "))
    assert json.loads(state.removeprefix(b"data: "))["faults"] == []

    row = launcher.rows(port)[-1]
    assert [*row[:2], row[3]] == ["dashboard", "0", url]
    (page,) = [each for each in launcher.members(port) if each.pid == int(row[2])]
    page.kill()
    page.wait(WAIT_S)
    wait_for(lambda: http_health(url) == SERVING, "another")

    # It shows engines that come.
    launcher.succeed("scale", "--port", port, "--engines", 2)
    with urlopen(f"{url}/events") as events:
        assert any(b'"scheduler-1"' in line for line in events)
    launcher.succeed("down", "--port", port)
    assert http_health(url) != SERVING


def test_nothing_to_stop_or_show(launcher: Launcher, port: int) -> None:
    launcher.succeed("down", "--port", port)
    ps = launcher("ps", "--port", port)
    assert ps.returncode == 1
    assert f"no stack runs on port {port}" in ps.stdout
    assert launcher("ps", "--port", port, "--json").stdout == "[]\n"
    assert "no stack runs in" in launcher("down", "--all").stdout


def test_stacks_are_independent_and_dead_processes_are_restarted(
    launcher: Launcher, port: int
) -> None:
    other = free_port()
    for each in (port, other):
        launcher.succeed("up", "--port", each, "--services", "frontend")
    launcher.succeed("down", "--port", other)
    assert check_health(f"127.0.0.1:{port}", WAIT_S) == SERVING

    frontend = named(launcher.members(port), "frontend")
    frontend.kill()
    psutil.wait_procs([frontend])
    wait_for(lambda: check_health(f"127.0.0.1:{port}") == SERVING, "another to serve")
    assert named(launcher.members(port), "frontend").pid != frontend.pid
    launcher.succeed("up", "--port", other, "--services", "frontend")
    named(launcher.members(other), "deploy.native.supervisor").kill()  # down does without
    assert launcher("down", "--all").stdout.count("stopping the stack") == 2
    assert not launcher.members(port) + launcher.members(other)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_a_stack_in_the_foreground_ends_with_its_command(
    launcher: Launcher, port: int, number: signal.Signals
) -> None:
    model = launcher.environment.pop("NANO_MODEL")
    serving = launcher.start("serve", model, "--port", port)
    assert serving.stdout
    assert any("stop it" in line for line in serving.stdout)  # the end of the greeting
    second = launcher.fail("serve", model, "--port", port)
    assert f"PORT: a stack is already running on port {port}" in second
    launcher.succeed("ps", "--port", port)
    members = launcher.members(port)
    serving.send_signal(number)
    assert gone(members)
    assert serving.wait(WAIT_S) == (0 if number == signal.SIGINT else -number)
    assert (launcher.directory / run_directory(port) / "frontend-0.log").exists()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGSTOP])
def test_nothing_ends_with_the_supervisor_and_up_replaces_it(
    launcher: Launcher, port: int, number: signal.Signals
) -> None:
    start = ("up", "--port", port, "--services", "worker frontend")
    launcher.succeed(*start, HF_HOME="/first", OTHER="is not kept")
    before = launcher.members(port)
    supervisor = named(before, "deploy.native.supervisor")
    worker, frontend = named(before, "worker_svc"), named(before, "frontend")
    supervisor.send_signal(number)
    state = "SILENT" if number is signal.SIGSTOP else "GONE"
    said = f"{state} make up starts one"
    wait_for(lambda: said in launcher("ps", "--port", port).stdout, "ps to say so")
    wait_for(lambda: launcher.serving(port) == 2, "both to answer")
    if number is not signal.SIGSTOP:
        assert "make up starts one" in launcher.fail("restart", "--port", port)
    worker.kill()
    wait_for(lambda: launcher.serving(port) == 1, "the worker to be missed")

    # Another one adopts the running processes, and starts the worker with its first environment.
    others = {"HF_HOME": "/second", "OTHER": "is not kept either"}
    assert "has a supervisor again" in launcher.succeed("up", "--port", port, **others)
    members = launcher.members(port)
    assert not {supervisor, worker} & {*members}
    assert frontend in members
    successor = named(members, "worker_svc").environ()
    assert successor == frontend.environ() | {NAME: "worker-0"}
    assert successor["HF_HOME"] == "/first"
    assert "OTHER" not in successor
    # It also restarts processes that it has adopted.
    frontend.kill()
    wait_for(lambda: frontend not in launcher.members(port), "its end")
    wait_for(lambda: launcher.serving(port) == 2, "another frontend")
    assert "already up" in launcher.succeed("up", "--port", port)
    launcher.succeed("down", "--port", port)
    assert not launcher.members(port)


def test_interrupting_up_stops_processes_that_ignore_signals(launcher: Launcher, port: int) -> None:
    launcher.behaviour.write_text("stuck")
    up = launcher.start(*("up", "--port", port, "--services", "worker"), NANO_DRAIN_TIMEOUT_S="0")
    assert up.stdout
    assert any("RUNNING/NOT_SERVING" in line for line in up.stdout)  # still waiting for the worker
    members = launcher.members(port)
    assert "another make up" in launcher.fail("up", "--port", port, "--services", "worker")
    assert all(process.is_running() for process in members)
    up.send_signal(signal.SIGINT)
    up.communicate()
    assert up.returncode == 130
    assert gone(members)


def test_a_worker_that_cannot_start_ends_up_with_its_reason(launcher: Launcher, port: int) -> None:
    launcher.use_real_services()
    flags = "--services", "worker", "--device", "cpu", "--kv-dtype", "fp8"
    refused = launcher.fail("up", "--port", port, *flags)
    reason = "kv_dtype: fp8 is not served on a CPU; use int8"
    log = run_directory(port) / "worker-0.log"
    assert f"worker-0 cannot start: {reason} (log: {log})" in refused
    # It was not tried again.
    kinds = [each["event"] for each in launcher.events(port, "supervisor")]
    assert kinds.count("process started") == 1
    assert not launcher.members(port)


@pytest.mark.parametrize(
    ("options", "standin", "said"),
    [
        ((), "crash", "worker-0 crashes repeatedly: RuntimeError: out of memory, say (log: "),
        (("--max-num-seqs", "many"), "", "max_num_seqs: Input should be a valid integer"),
        (("--host", "192.0.2.1", "--allow-public-plaintext", 1), "", "PORT: cannot listen on 192."),
    ],
)
def test_up_says_in_its_last_line_why_it_fails(
    launcher: Launcher, port: int, options: tuple[object, ...], standin: str, said: str
) -> None:
    launcher.behaviour.write_text(standin)
    refused = launcher.fail("up", "--port", port, *options)
    assert said in refused.splitlines()[-1]
    assert not launcher.members(port)


def test_a_host_of_workers_only(launcher: Launcher, port: int) -> None:
    """Ranks 2 and 3 of four; the rest of the stack is elsewhere."""
    addresses = [f"127.0.0.1:{free_port()}" for _ in range(4)]
    launcher.succeed(
        *("up", "--port", port, "--tp", 4, "--services", "worker", "--ranks", "2-3"),
        NANO_WORKER_ADDRESSES=",".join(addresses),
        NANO_MASTER_PORT=str(free_port()),
    )
    found = [check_health(each, WAIT_S) for each in addresses]
    assert found == [UNREACHABLE, UNREACHABLE, SERVING, SERVING]


def test_run_serves_until_its_input_ends(launcher: Launcher) -> None:
    run = launcher.start("run", "--port", 0)
    assert run.stdout
    word, address = run.stdout.readline().split()
    assert word == "READY"
    assert check_health(address, WAIT_S) == SERVING
    members = psutil.Process(run.pid).children(recursive=True)
    assert len(members) == 4  # the supervisor and the three services
    _, errors = run.communicate()  # closes its input
    assert run.returncode == 0, errors
    assert not errors
    assert gone(members)
    assert not (launcher.directory / ".run").exists()


def test_run_killed_takes_its_stack_along(launcher: Launcher) -> None:
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
    launcher.behaviour.write_text("refuse")
    run = launcher.start("run", "--port", 0, "--services", "worker")
    assert run.stderr
    assert run.stderr.read() == "run: worker-0 cannot start: no weights in this model\n"
    assert run.wait() == 1
