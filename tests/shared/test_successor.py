"""Successors replace parent processes that are told to hand over, or that die."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import psutil
import pytest

from shared.process.parent_process import RESTART
from tests.shared.test_process import LASTS, SIDECAR, RunningParent, running_parent, wait_gone
from tests.waiting import wait_for

SPARE = "settings.spares = 1"
KEEPS = """
kept = KeptDescriptors("number", version=starts.with_name("version").read_text())
"""
# Says what the last fork has kept: its number, or `first`.
COUNTS = """
    ready()
    before = kept.value() or "first"
    kept.write(f"after-{count}", [])
    say_pid(before)
    time.sleep(600)
"""


def test_a_successor_finds_what_the_same_program_kept(tmp_path: Path) -> None:
    """The sidecar ends with the process that is replaced."""
    (version := tmp_path / "version").write_text("1")
    prelude = KEEPS + SIDECAR.format(body=LASTS)
    with running_parent(tmp_path / "starts", COUNTS, prelude) as parent:
        parent.next_pid("first")
        for role in ("after-0", "after-1"):
            sidecar = psutil.Process(parent.next_pid("sidecar"))
            parent.restart(role)
            wait_gone(sidecar.pid)
        version.write_text("2")
        fork = parent.restart("first")
        files = {os.readlink(each) for each in Path(f"/proc/{fork.pid}/fd").iterdir()}
        sockets = [line.split() for line in Path("/proc/net/unix").read_text().splitlines()]
        kept = [words for words in sockets if "@nanovllm-kept-number-" in words[-2]]
        found = [words for words in kept if f"socket:[{words[-3]}]" in files]
        assert len(found) == 2  # others were closed


# Is ready once the test lets it. Says before whether that of a predecessor was.
LOADS = "import shared.process.parent_process as own; own._SIDECAR_S = 600.0\n" + SIDECAR.format(
    body="""
    if heartbeat.was_ready and not heartbeat.restarts:
        say_pid("early")
    while not starts.with_name("load").exists():
        time.sleep(0.01)
    say_pid("loaded")
    heartbeat.ready()
    say_pid("ready")
    time.sleep(600)
"""
)
SERVES = f"ready(); say_pid(); {LASTS}"


def next_ready_parent(parent: RunningParent) -> psutil.Process:
    """Waits until the parent process knows that its sidecar is ready -> its fork."""
    for said in ("loaded", "ready"):
        parent.next_pid(said)
    parent.next_fork().kill()
    return parent.next_fork()


def test_the_sidecar_of_a_successor_is_ready_before_it_serves(tmp_path: Path) -> None:
    """If that of the predecessor was, which serves meanwhile."""
    (load := tmp_path / "load").touch()
    with running_parent(tmp_path / "starts", SERVES, LOADS) as parent:
        fork = next_ready_parent(parent)
        for _ in range(2):
            load.unlink()
            before = parent.process
            before.send_signal(RESTART)
            sidecar = psutil.Process(parent.next_pid("early"))
            assert fork.is_running()
            load.touch()
            assert parent.next_pid("loaded") == sidecar.pid
            assert "service" not in dict(parent._found)
            fork = parent.next_parent()
            before.wait(60)
            assert sidecar.ppid() == parent.process.pid


def test_a_sidecar_that_dies_delays_no_successor(tmp_path: Path) -> None:
    (load := tmp_path / "load").touch()
    with running_parent(tmp_path / "starts", SERVES, LOADS) as parent:
        next_ready_parent(parent)
        load.unlink()
        parent.process.send_signal(RESTART)
        os.kill(parent.next_pid("early"), signal.SIGKILL)
        parent.next_parent()
        load.touch()
        parent.next_pid("ready")


def test_a_spare_whose_sidecar_is_not_ready_is_replaced(tmp_path: Path) -> None:
    """Once the sidecar beside it is."""
    with running_parent(tmp_path / "starts", SERVES, LOADS + SPARE) as parent:
        parent.next_fork()
        spare = successor_of(parent.process)
        (tmp_path / "load").touch()
        wait_gone(spare.pid)
        assert successor_of(parent.process).pid == psutil.Process(parent.next_pid("early")).ppid()
        parent.process.kill()
        parent.next_parent()


def test_a_process_whose_successor_cannot_start_continues(tmp_path: Path) -> None:
    prelude = "starts.with_name('broken').exists() and sys.exit(3)"
    with running_parent(tmp_path / "starts", SERVES, prelude) as parent:
        fork = parent.next_fork()
        (broken := tmp_path / "broken").touch()
        for count in (1, 2):
            parent.process.send_signal(RESTART)
            state = parent.wait_refused(count)
            assert (state.pid, state.remark) == (fork.pid, "exit status 3")
        broken.unlink()
        parent.restart()


# Drains until the test lets it end.
DRAINS = """
    signal.signal(signal.SIGTERM, lambda *_: say_pid("told"))
    ready()
    say_pid()
    while not starts.with_name(f"end-{os.getpid()}").exists():
        time.sleep(0.01)
"""


def test_a_process_whose_successor_dies_before_it_serves_continues(tmp_path: Path) -> None:
    with running_parent(tmp_path / "starts", DRAINS) as parent:
        fork = parent.next_fork()
        parent.process.send_signal(RESTART)
        parent.next_pid("told")
        killed = successor_of(parent.process)
        killed.kill()
        wait_gone(killed.pid)
        (tmp_path / f"end-{fork.pid}").touch()
        assert parent.next_fork().ppid() == parent.process.pid
        parent.wait_refused(1)


def test_a_successor_may_serve_while_the_last_fork_drains(tmp_path: Path) -> None:
    with running_parent(tmp_path / "starts", DRAINS, "overlaps = True") as parent:
        fork = parent.next_fork()
        for _ in range(2):
            before, last = parent.process, fork
            before.send_signal(RESTART)
            fork = parent.next_parent()
            assert before.is_running()
            assert last.is_running()
            (tmp_path / f"end-{last.pid}").touch()
            before.wait(60)


def test_a_signal_to_end_reaches_a_successor_that_serves(tmp_path: Path) -> None:
    """It drains, too, and has no spare yet, which would serve instead."""
    prelude = f"overlaps = True; {SPARE}"
    with running_parent(tmp_path / "starts", DRAINS, prelude) as parent:
        first = parent.next_fork()
        before = parent.process
        before.send_signal(RESTART)
        parent.next_pid("told")
        second = parent.next_parent()
        before.terminate()
        assert {parent.next_pid("told") for _ in range(2)} == {first.pid, second.pid}
        for fork in (first, second):
            (tmp_path / f"end-{fork.pid}").touch()
        for each in (before, parent.process):
            each.wait(60)


def successor_of(parent: psutil.Process) -> psutil.Process:
    """Waits for the successor, the only child in another process group."""

    def found() -> psutil.Process | None:
        children = [each for each in parent.children() if os.getpgid(each.pid) == each.pid]
        return children[0] if children else None

    return wait_for(found, "a successor")


def test_a_spare_serves_when_its_predecessor_is_killed(tmp_path: Path) -> None:
    """It finds what that kept, and gets a spare of its own. One that is killed is replaced."""
    (tmp_path / "version").write_text("1")
    with running_parent(tmp_path / "starts", COUNTS, KEEPS + SPARE) as parent:
        parent.next_pid("first")
        for role in ("after-0", "after-1"):
            killed = successor_of(parent.process)
            killed.kill()
            wait_gone(killed.pid)
            spare = successor_of(parent.process)
            parent.process.kill()
            parent.next_parent(role)
            assert parent.process == spare
        parent.restart("after-2")


def test_a_spare_waits_until_all_forks_of_its_predecessor_have_ended(tmp_path: Path) -> None:
    body = f"ready(); os.fork() or {LASTS}; say_pid(); {LASTS}"
    with running_parent(tmp_path / "starts", body, SPARE) as parent:
        fork = parent.next_fork()
        (last,) = fork.children()
        spare = successor_of(parent.process)
        parent.process.kill()
        wait_gone(fork.pid)
        assert not spare.children()
        last.kill()
        (of_spare,) = parent.next_parent().children()
        of_spare.kill()


def test_a_spare_ends_with_a_process_that_ends_in_order(tmp_path: Path) -> None:
    with running_parent(tmp_path / "starts", SERVES, SPARE) as parent:
        parent.next_fork()
        spare = successor_of(parent.process)
        parent.process.terminate()
        parent.process.wait(60)
        wait_gone(spare.pid)


@pytest.mark.parametrize("restarts", [True, False])
def test_a_signal_that_ends_a_program_counts_more_than_one_that_restarts_it(
    tmp_path: Path, restarts: bool
) -> None:
    body = """
    signal.signal(signal.SIGTERM, lambda *_: say_pid("told"))
    ready()
    say_pid()
    while not starts.with_name("end").exists():
        time.sleep(0.01)
    os._exit(9)
"""
    with running_parent(tmp_path / "starts", body) as parent:
        parent.next_fork()
        if restarts:
            parent.process.send_signal(RESTART)
            parent.next_pid("told")
        parent.process.terminate()
        parent.next_pid("told")
        parent.process.send_signal(RESTART)
        (tmp_path / "end").touch()
        assert parent.process.wait(60) == 9
    assert (tmp_path / "starts").read_text() == "."
