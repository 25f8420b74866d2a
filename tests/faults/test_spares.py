"""Successors in a real stack: spares serve at once when parent processes are killed, and one that
cannot start changes nothing."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from deploy.errors import LaunchError
from deploy.native.processes import find_supervisor, parent_processes, stack_members, stop_stack
from deploy.native.restart import restart
from shared.process.successor import PREDECESSOR
from tests.faults.streams import LONG, REQUESTS, assert_undamaged, open_streams, undisturbed
from tests.faults.test_killed import maps
from tests.faults.transcript import Transcript
from tests.stack import RealStack, running_stack
from tests.waiting import WAIT_S, wait_for

NAMES = LONG[:4]
SERVICES = "worker", "scheduler", "frontend"


@pytest.fixture
def stack() -> Iterator[RealStack]:
    with running_stack(spares=1, speculation="none") as stack:
        yield stack


def spares(stack: RealStack) -> dict[str, psutil.Process]:
    """Waits for the spares of all services, by service."""
    parents = parent_processes(stack.directory)

    def found() -> dict[str, psutil.Process] | None:
        by_service = {
            service: child
            for service in SERVICES
            for child in parents[f"{service}-0"].children()
            if child.environ().get(PREDECESSOR, "").split()[1:2] == [str(child.ppid())]
        }
        return by_service if len(by_service) == len(SERVICES) else None

    return wait_for(found, "the spares")


def kill_amid_streams(
    stack: RealStack, process: psutil.Process, expected: dict[str, Transcript]
) -> None:
    requests = {name: REQUESTS[name] for name in expected}
    with stack.hold.after(20), open_streams(stack.address, requests) as streams:
        streams.wait_for_tokens(8)
        process.kill()
        stack.hold.release()
        assert_undamaged(streams.wait_ended(), expected)
    stack.wait_serving()


def test_killed_parent_processes_lose_no_cache(stack: RealStack) -> None:
    """Again and again. The weights and the cache of the worker are kept, and so is what the
    scheduler knows about it."""
    expected = undisturbed(stack.address, {name: REQUESTS[name] for name in NAMES})
    for service in ("worker", "scheduler") * 2:
        spare = spares(stack)[service]
        parent, before = parent_processes(stack.directory)[f"{service}-0"], stack.load()
        kill_amid_streams(stack, parent, expected)
        assert parent_processes(stack.directory)[f"{service}-0"] == spare
        if service == "worker":
            assert stack.load().lost_tokens == before.lost_tokens


def test_the_grammar_host_of_a_spare_serves_on(stack: RealStack) -> None:
    """It loads before the spare serves, since grammars were used before."""
    names = "greedy", "regex", "schema"
    expected = undisturbed(stack.address, {name: REQUESTS[name] for name in names})

    def found() -> psutil.Process | None:
        with suppress(psutil.NoSuchProcess):  # a spare that is being replaced
            for child in spares(stack)["scheduler"].children():
                if maps(child.pid, "xgrammar"):
                    return child
        return None

    host = wait_for(found, "the grammar host of a spare")
    spare, parent = host.ppid(), parent_processes(stack.directory)["scheduler-0"]
    kill_amid_streams(stack, parent, expected)
    assert stack.pid("scheduler") in [each.pid for each in psutil.Process(spare).children()]
    assert host.is_running()
    assert host.ppid() == spare


def test_a_killed_frontend_is_replaced(stack: RealStack) -> None:
    for _ in range(2):
        spare = spares(stack)["frontend"]
        parent = parent_processes(stack.directory)["frontend-0"]
        parent.kill()
        parent.wait(WAIT_S)
        stack.wait_serving()
        assert parent_processes(stack.directory)["frontend-0"] == spare


def test_a_restart_whose_program_cannot_start_changes_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with running_stack(environment={"PYTHONPATH": str(tmp_path)}) as stack:
        pid, file = stack.pid("scheduler"), tmp_path / "sitecustomize.py"
        file.write_text("import sys\nif 'scheduler_svc' in sys.orig_argv: sys.exit(3)\n")
        said = r"scheduler-0: the new program cannot start \(exit status 1; see .*scheduler-0.log"
        with pytest.raises(LaunchError, match=said):
            restart(stack.directory, "scheduler")
        assert stack.pid("scheduler") == pid
        file.unlink()
        restart(stack.directory, "scheduler")
        assert stack.pid("scheduler") != pid
        assert "scheduler-0: " not in capsys.readouterr().out


def test_no_spare_outlives_its_stack(stack: RealStack) -> None:
    spares(stack)
    assert stop_stack(stack.directory, print, spared=os.getpid()) > 2 * len(SERVICES)
    assert not stack_members(stack.directory)


def test_no_spare_outlives_the_supervisor_to_which_its_stack_is_tied(stack: RealStack) -> None:
    spares(stack)
    supervisor = find_supervisor(stack.directory)
    assert supervisor
    os.kill(supervisor.pid, signal.SIGKILL)
    wait_for(lambda: not stack_members(stack.directory), "all processes to end")
