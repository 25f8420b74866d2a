"""Forks that take over from one that died."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

_PROGRAM = """
import os, signal, sys, time
from pathlib import Path
from shared.process import serve_with_successors

starts = Path(sys.argv[1])

def serve(ready):
    count = starts.stat().st_size if starts.exists() else 0
    with starts.open("a") as file:
        file.write(".")
    {body}
{prelude}
sys.exit(serve_with_successors(serve))
"""


def program(starts: Path, body: str, prelude: str = "") -> list[str]:
    return [sys.executable, "-c", _PROGRAM.format(body=body, prelude=prelude), str(starts)]


@pytest.mark.parametrize(
    ("body", "status", "forks"),
    [
        ("ready()", 0, 1),
        ("ready(); os.kill(os.getpid(), signal.SIGKILL if count < 3 else 0)", 0, 4),
        ("ready(); os._exit(75 if count == 0 else 2)", 2, 2),
        ("sys.exit(2)", 2, 1),
        ("os.kill(os.getpid(), signal.SIGSEGV)", 128 + 11, 1),
        ("count == 1 and ready(); os._exit(70)", 70, 1),
        ("count in (0, 3) and ready(); os._exit(70)", 70, 7),
    ],
    ids=[
        "it ends",
        "killed",
        "hung, cannot start",
        "cannot start",
        "never ready",
        "not ready at first",
        "ready now and then",
    ],
)
def test_forks_follow_one_that_served(tmp_path: Path, body: str, status: int, forks: int) -> None:
    starts = tmp_path / "starts"
    assert subprocess.run(program(starts, body), timeout=60).returncode == status
    assert len(starts.read_text()) == forks


def ends_on(sign: signal.Signals) -> str:
    return (
        f"signal.pthread_sigmask(signal.SIG_BLOCK, [signal.{sign.name}]); ready()\n"
        f"    print('ready', flush=True); signal.sigwait([signal.{sign.name}]); os._exit(9)"
    )


@pytest.mark.parametrize("sign", [signal.SIGTERM, signal.SIGINT])
def test_signals_are_passed_on(tmp_path: Path, sign: signal.Signals) -> None:
    command = program(tmp_path / "starts", ends_on(sign))
    with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        process.send_signal(sign)
        try:
            assert process.wait(60) == 9
        finally:
            process.kill()


def test_a_signal_that_interrupts_no_system_call_is_passed_on(tmp_path: Path) -> None:
    """A signal interrupts none if it arrives just before the wait, or on another thread."""
    prelude = """
import threading

def signal_yourself():
    sys.stdin.readline()
    signal.pthread_kill(threading.get_ident(), signal.SIGTERM)

threading.Thread(target=signal_yourself, daemon=True).start()
"""
    command = program(tmp_path / "starts", ends_on(signal.SIGTERM), prelude)
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdout.readline()
        process.stdin.write(b"\n")
        process.stdin.flush()
        try:
            assert process.wait(60) == 9
        finally:
            process.kill()


def test_a_fork_ends_with_its_parent(tmp_path: Path) -> None:
    body = "ready(); print(os.getpid(), flush=True); time.sleep(60)"
    with subprocess.Popen(program(tmp_path / "starts", body), stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        fork = psutil.Process(int(process.stdout.readline()))
        process.kill()
        assert not psutil.wait_procs([fork], timeout=30)[1]
