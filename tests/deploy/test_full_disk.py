"""Commands that change a stack when no file can be written any more, as on a full disk."""

from __future__ import annotations

import re
import resource
import subprocess
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from deploy.errors import LaunchError
from deploy.stack import make_directory, replace_file, run_directory
from tests.stack import kill_all

from .conftest import Launcher, plan
from .test_commands import named


def refused(launcher: Launcher, *command: object) -> str:
    """The error of a command that cannot write to any file and ends with status 1."""

    def limit() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (0, resource.RLIM_INFINITY))

    done = subprocess.run(
        launcher.command(*command),
        cwd=launcher.directory,
        env=launcher.environment,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        preexec_fn=limit,
    )
    assert done.returncode == 1, done.stdout
    return done.stderr


@pytest.mark.system
def test_commands_say_in_one_line_that_they_cannot_write(launcher: Launcher, port: int) -> None:
    directory = run_directory(port)
    up = refused(launcher, "up", "--port", port)
    assert up == f"up: {directory / 'stack.json'}: File too large\n"
    assert refused(launcher, "run", "--port", 0).startswith("run: there is no temporary directory")

    launcher.succeed("up", "--port", port)
    before = launcher.pids(port)
    for command in ("restart",), ("scale", "--engines", 2):
        said = refused(launcher, *command, "--port", port)
        assert said == f"{command[0]}: {directory / 'stack.json'}: File too large\n"
    assert launcher.pids(port) == before

    launcher.succeed("scale", "--port", port, "--engines", 2)
    before = launcher.pids(port)
    for command in ("restart",), ("scale", "--engines", 1):
        said = refused(launcher, *command, "--port", port)
        assert re.fullmatch(f"{command[0]}: {directory}/[a-z.]+: File too large\n", said)
    assert launcher.pids(port) == before
    assert launcher.listed(port) == ["scheduler.sock", "scheduler-1.sock"]


@pytest.fixture
def small_disk(launcher: Launcher) -> Iterator[Path]:
    """A disk of 1 MiB for the state of stacks."""
    mounted = launcher.directory / ".run"
    mounted.mkdir()
    try:
        options = ["-t", "tmpfs", "-o", "size=1m,mode=700", "tmpfs"]
        subprocess.run(["mount", *options, mounted], check=True, capture_output=True)
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("only root may mount a small disk, where containers allow it")
    yield mounted
    for run in mounted.glob("*"):
        kill_all(run)
    subprocess.run(["umount", "--lazy", mounted], check=True)


def fill(path: Path) -> None:
    """Writes to a file until the disk is full."""
    with suppress(OSError), path.open("wb", buffering=0) as file:
        while True:
            file.write(bytes(4096))


@pytest.mark.system
def test_a_full_disk_keeps_no_supervisor_from_being_replaced(
    launcher: Launcher, port: int, small_disk: Path
) -> None:
    launcher.succeed("up", "--port", port, "--services", "frontend")
    before = launcher.pids(port)
    fill(small_disk / "filler")
    assert launcher.fail("restart", "--port", port) == (
        f"restart: {run_directory(port)}/stack.json: No space left on device\n"
    )
    supervisor = named(launcher.members(port), "deploy.native.supervisor")
    supervisor.kill()
    psutil.wait_procs([supervisor])
    assert "has a supervisor again" in launcher.succeed("up", "--port", port)
    assert launcher.pids(port) == before
    assert "stopped" in launcher.succeed("down", "--port", port)


def test_a_file_keeps_its_text_if_the_new_one_cannot_be_written(tmp_path: Path) -> None:
    directory = tmp_path / "50051"
    make_directory(directory)
    stack, _ = plan(directory=directory)
    stack.save()
    before = (directory / "stack.json").read_text()
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100, hard))
    try:
        with pytest.raises(LaunchError, match=r"stack\.json: File too large"):
            stack.save()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert (directory / "stack.json").read_text() == before
    replace_file(directory / "stack.json", "shorter")
    assert [each.name for each in directory.iterdir()] == ["stack.json"]
