"""Processes of another user of the host.

@needs_root
def test(): ...
    with process_of(OTHER, {MARKER: directory}) as process: ...
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

import pytest

from tests.waiting import WAIT_S

OTHER_USER = 65534
needs_root = pytest.mark.skipif(
    os.geteuid() != 0, reason="only root may start processes of another user and give files away"
)
_BEGIN = "import os, sys; os.setresuid({}, {}, {}); {}; print(flush=True); sys.stdin.read()"


@contextmanager
def process_of_another_user(
    environment: Mapping[str, str],
    users: Sequence[int] = (OTHER_USER, OTHER_USER, OTHER_USER),
    code: str = "pass",
    imports: str = "pass",
) -> Iterator[subprocess.Popen[bytes]]:
    """Runs an interpreter until the end of the block; yields once it has run `code`.

    Args:
        environment: besides that of this process.
        users: the real, effective and saved user.
        imports: run before, because another user may not be able to read the files.
    """
    command = [sys.executable, "-c", f"{imports}\n{_BEGIN.format(*users, code)}"]
    with running(command, environment) as process:
        yield process


@contextmanager
def running(
    command: Sequence[str], environment: Mapping[str, str]
) -> Iterator[subprocess.Popen[bytes]]:
    """Runs a command until the end of the block; yields once it has written a line."""
    pipe = subprocess.PIPE
    process = subprocess.Popen(command, stdin=pipe, stdout=pipe, env=os.environ | {**environment})
    assert process.stdout
    try:
        assert process.stdout.readline() == b"\n"
        yield process
    finally:
        process.kill()
        process.communicate(timeout=WAIT_S)
