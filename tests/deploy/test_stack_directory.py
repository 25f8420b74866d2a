"""The directory of a stack and the files in it are used only if they are this user's alone."""

from __future__ import annotations

import json
import os
import stat
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from deploy.child import open_log, rotate
from deploy.errors import LaunchError
from deploy.native.environment import (
    ENVIRONMENT_FILE,
    kept_environment,
    load_environment,
    save_environment,
)
from deploy.native.guards import locked
from deploy.native.processes import find_supervisor, stopped_processes, supervisor_lock
from deploy.stack import Stack, make_directory, open_file, replace_file
from shared.process.fork import CANNOT_START
from tests.other_user import OTHER_USER, needs_root

from .conftest import plan


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    """Of a stack."""
    made = tmp_path / ".run" / "50051"
    make_directory(made)
    stack, environment = plan(directory=made)
    stack.save()
    save_environment(made, environment)
    replace_file(made / "stopped", "worker-0")
    os.close(os.open(made / "supervisor.lock", os.O_CREAT | os.O_WRONLY, 0o600))
    return made


def use_all(directory: Path) -> list[str]:
    """The errors of everything that uses a stack's directory."""

    def lock() -> None:
        with locked(directory):
            pass

    uses: list[Callable[[], object]] = [
        lambda: Stack.load(directory),
        lambda: load_environment(directory),
        lambda: stopped_processes(directory),
        lambda: find_supervisor(directory),
        lambda: supervisor_lock(directory),
        lambda: replace_file(directory / "engines", ""),
        lambda: make_directory(directory),
        lock,
    ]
    errors = []
    for use in uses:
        with pytest.raises(LaunchError) as raised:
            use()
        errors.append(str(raised.value))
    return errors


def test_a_directory_of_this_user_is_used(directory: Path) -> None:
    assert Stack.load(directory).port
    assert "NANO_MODEL" in load_environment(directory)
    assert stopped_processes(directory) == {"worker-0"}
    assert find_supervisor(directory) is None
    modes = {each.name: stat.S_IMODE(each.stat().st_mode) for each in directory.iterdir()}
    assert set(modes.values()) == {0o600}
    for mode in (0o700, 0o755):
        directory.chmod(mode)
        make_directory(directory)
        assert stat.S_IMODE(directory.stat().st_mode) == 0o700


def test_a_link_to_a_directory_is_not_used(directory: Path) -> None:
    moved = directory.with_name("moved")
    directory.rename(moved)
    directory.symlink_to(moved)
    assert {*use_all(directory)} == {f"{directory} is not a directory; remove it"}


@pytest.mark.parametrize("mode", [0o720, 0o702, 0o777])
def test_a_directory_that_others_may_write_to_is_not_used(directory: Path, mode: int) -> None:
    directory.chmod(mode)
    refused = f"other users may write to {directory}; chmod go-w allows its use"
    assert {*use_all(directory)} == {refused}


@needs_root
def test_a_directory_of_another_user_is_not_used(directory: Path) -> None:
    os.chown(directory, OTHER_USER, OTHER_USER)
    assert {*use_all(directory)} == {f"{directory} belongs to user {OTHER_USER}"}


def test_files_of_root_are_not_this_users(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 12345)
    assert all("belongs to user" in error for error in use_all(directory))


def test_a_directory_that_others_could_replace_is_not_used(directory: Path) -> None:
    above = directory.parent
    above.chmod(0o777)
    refused = f"other users may write to {above}; chmod o-w allows its use"
    assert {*use_all(directory)} == {refused}
    above.chmod(0o1777)  # as of /tmp: only owners may rename
    assert Stack.load(directory)


@needs_root
def test_a_directory_that_its_folders_owner_could_replace_is_not_used(directory: Path) -> None:
    above = directory.parent
    refused = f"{above} belongs to user {OTHER_USER}"
    os.chown(above, OTHER_USER, OTHER_USER)
    assert {*use_all(directory)} == {refused}
    # In a checkout of another user, that user decides about everything.
    os.chown(above.parent, OTHER_USER, OTHER_USER)
    assert Stack.load(directory)
    os.chown(above.parent, 0, 0)

    os.chown(above, 0, 0)
    moved = above.with_name("moved")
    above.rename(moved)
    above.symlink_to(moved)
    assert Stack.load(directory)
    os.lchown(above, OTHER_USER, OTHER_USER)
    assert {*use_all(directory)} == {refused}


def load(directory: Path, name: str) -> object:
    if name == ENVIRONMENT_FILE:
        return load_environment(directory)
    if name == "stack.json":
        return Stack.load(directory)
    return stopped_processes(directory) if name == "stopped" else find_supervisor(directory)


@pytest.mark.parametrize("name", [ENVIRONMENT_FILE, "stack.json", "stopped", "supervisor.lock"])
def test_a_file_that_others_may_have_written_is_not_used(directory: Path, name: str) -> None:
    file = directory / name
    content = file.read_bytes()
    file.chmod(0o620)
    if name != ENVIRONMENT_FILE:  # nobody else can enter the directory
        load(directory, name)
    directory.chmod(0o755)
    with pytest.raises(LaunchError, match=f"other users may write to {name}"):
        load(directory, name)
    file.unlink()
    elsewhere = directory / "elsewhere"
    elsewhere.write_bytes(content)
    file.symlink_to(elsewhere)
    with pytest.raises(LaunchError, match=f"{name} is a link; remove it"):
        load(directory, name)
    file.unlink()
    os.mkfifo(file)
    with pytest.raises(LaunchError, match="not a regular file"):
        load(directory, name)


@needs_root
@pytest.mark.parametrize("name", [ENVIRONMENT_FILE, "stack.json", "stopped", "supervisor.lock"])
def test_a_file_of_another_user_is_not_used(
    directory: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    os.chown(directory / name, OTHER_USER, OTHER_USER)
    with pytest.raises(LaunchError, match=f"{name} belongs to user {OTHER_USER}"):
        load(directory, name)
    # Not even one of root is.
    os.chown(directory, OTHER_USER, OTHER_USER)
    os.chown(directory / name, 0, 0)
    monkeypatch.setattr(os, "geteuid", lambda: OTHER_USER)
    with pytest.raises(LaunchError, match=f"{name} belongs to user 0"):
        load(directory, name)


def test_an_environment_that_others_may_read_is_not_used(directory: Path) -> None:
    file = directory / ENVIRONMENT_FILE
    for mode in (0o640, 0o604):
        file.chmod(mode)
        with pytest.raises(LaunchError, match="is open to other users; chmod 600 allows its use"):
            load_environment(directory)
    for text in ("", "[]", '{"PATH": 1}'):
        replace_file(file, text)
        with pytest.raises(LaunchError, match="missing or damaged"):
            load_environment(directory)
    file.unlink()
    with pytest.raises(LaunchError, match="missing or damaged"):
        load_environment(directory)


def test_the_environment_has_what_services_need_and_nothing_that_changes_programs(
    directory: Path,
) -> None:
    kept = dict.fromkeys(
        (
            *("PATH", "HOME", "LANG", "LD_LIBRARY_PATH", "CUDA_VISIBLE_DEVICES", "HF_TOKEN"),
            *("http_proxy", "HTTPS_PROXY", "no_proxy", "NO_PROXY", "all_proxy", "NANO_TOKEN"),
            *("XDG_CACHE_HOME", "TRITON_CACHE_DIR", "CXX", "NCCL_SOCKET_IFNAME"),
        ),
        "kept",
    )
    others = dict.fromkeys(
        (
            *("LD_PRELOAD", "LD_AUDIT", "PYTHONPATH", "PYTHONSTARTUP", "PYTHONHOME", "BASH_ENV"),
            *("NANOVLLM_PROCESS", "NANOVLLM_STACK", "AWS_SECRET_ACCESS_KEY", "path", "PATHS"),
        ),
        "other",
    )
    assert kept_environment(others | kept) == kept
    save_environment(directory, others | kept)
    assert load_environment(directory) == kept
    # Also of a file that was changed.
    replace_file(directory / ENVIRONMENT_FILE, '{"PATH": "/bin", "LD_PRELOAD": "other"}')
    assert load_environment(directory) == {"PATH": "/bin"}


def test_a_file_is_replaced_but_nothing_is_written_through_links(directory: Path) -> None:
    elsewhere = directory.parent / "elsewhere"
    elsewhere.write_text("kept")
    for name in ("engines", "engines.new", "supervisor.log", "supervisor.log.1", "lock"):
        (directory / name).symlink_to(elsewhere)
    replace_file(directory / "engines", "new")
    assert not (directory / "engines").is_symlink()
    assert (directory / "engines").read_text() == "new"
    with open_log(directory / "supervisor.log") as log:
        log.write(b"line\n")
    rotate(directory / "supervisor.log", max_bytes=2)
    with pytest.raises(LaunchError, match="lock is a link"), locked(directory):
        pass
    (directory / "supervisor.log").unlink()
    with open_log(directory / "supervisor.log") as log:
        log.write(b"line\n")
    rotate(directory / "supervisor.log", max_bytes=2)
    assert (directory / "supervisor.log.1").read_text() == "line\n"
    assert elsewhere.read_text() == "kept"


def test_a_file_is_made_for_this_user_only(directory: Path) -> None:
    os.close(open_file(directory / "made", os.O_WRONLY | os.O_CREAT))
    assert stat.S_IMODE((directory / "made").stat().st_mode) == 0o600
    with pytest.raises(FileNotFoundError):
        open_file(directory / "missing")
    with pytest.raises(FileNotFoundError):
        open_file(directory / "missing" / "file")
    with pytest.raises(LaunchError, match="its directory is gone"):
        replace_file(directory / "missing" / "file", "")


def test_a_supervisor_says_why_it_does_not_use_a_directory(directory: Path, tmp_path: Path) -> None:
    link = tmp_path / "link"
    link.symlink_to(directory)
    for used, reason in (
        (link, f"{link} is not a directory; remove it"),
        (tmp_path / "missing", "No such file or directory"),
    ):
        command = [sys.executable, "-P", "-m", "deploy.native.supervisor", str(used)]
        done = subprocess.run(command, capture_output=True, text=True)
        assert done.returncode == CANNOT_START
        assert reason in json.loads(done.stdout + done.stderr)["reason"]
