"""The abilities of a confined process, with both layers or with one, as some kernels have it."""

from __future__ import annotations

import json
import platform
import subprocess
import sys
from pathlib import Path

import pytest

from scheduler_svc.grammar.confinement import landlock_abi
from tests.scheduler_svc.grammar.attempts import surroundings

pytestmark = pytest.mark.skipif(
    platform.machine() not in ("x86_64", "aarch64"), reason="no seccomp on this architecture"
)
WITH_LANDLOCK = pytest.mark.skipif(landlock_abi() < 1, reason="this kernel lacks Landlock")
# What Landlock refuses, by the ABI that first does.
LANDLOCK = {
    1: {"read a file", "write a file", "make a file", "remove a file", "list a directory"}
    | {"read its environment", "execute", "trace"},
    4: {"connect by TCP", "listen on TCP"},
    6: {"connect to an abstract socket", "signal", "ask for a process", "signal a thread"},
    9: {"connect to a Unix socket"},
}


def attempt(directory: Path, *missing: str) -> tuple[set[str], str]:
    """What a process can still do that has confined itself without some layers, and its log."""
    with surroundings(directory) as given:
        module = "tests.scheduler_svc.grammar.attempts"
        done = subprocess.run(
            [sys.executable, "-m", module, json.dumps(given), *missing],
            stdout=subprocess.PIPE,
            text=True,
            check=True,
        )
        *log, found = done.stdout.splitlines()
    return {name for name, outcome in json.loads(found).items() if outcome == "done"}, "".join(log)


@WITH_LANDLOCK
def test_a_confined_process_can_do_nothing(tmp_path: Path) -> None:
    assert attempt(tmp_path) == (set(), "")


def test_seccomp_alone_denies_everything(tmp_path: Path) -> None:
    allowed, log = attempt(tmp_path, "landlock")
    assert allowed == set()
    assert "grammar processes are not fully confined" in log
    assert "missing=landlock" in log


@WITH_LANDLOCK
def test_landlock_alone_denies_files_and_what_its_abi_covers(tmp_path: Path) -> None:
    allowed, log = attempt(tmp_path, "seccomp")
    known = [names for abi, names in LANDLOCK.items() if abi <= landlock_abi()]
    assert not allowed & set().union(*known)
    assert "missing=seccomp" in log


def test_attempts_succeed_without_confinement(tmp_path: Path) -> None:
    """So the tests above see confinement, not attempts that cannot succeed."""
    allowed, log = attempt(tmp_path, "landlock", "seccomp")
    assert allowed >= LANDLOCK[4] | LANDLOCK[9] | {"read a file", "write a file", "signal", "fork"}
    assert "missing='landlock and seccomp'" in log
