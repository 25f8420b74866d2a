"""`top` on a terminal: it ends with the terminal, and with the stack."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from typing import BinaryIO

import pytest

from .conftest import Launcher

pytestmark = pytest.mark.system


@contextmanager
def top_on_terminal(
    launcher: Launcher, port: int
) -> Iterator[tuple[subprocess.Popen[bytes], BinaryIO]]:
    """Yields `top` on a terminal, and that terminal. `top` is in another session: a terminal that
    hangs up sends it no signal."""
    ours, theirs = os.openpty()
    with (
        open(ours, "rb", buffering=0) as terminal,
        subprocess.Popen(
            launcher.command("top", "--port", port),
            cwd=launcher.directory,
            env=launcher.environment | {"TERM": "xterm"},
            stdin=theirs,
            stdout=theirs,
            stderr=theirs,
            start_new_session=True,
        ) as top,
    ):
        os.close(theirs)
        try:
            yield top, terminal
        finally:
            top.kill()


def read_until(terminal: BinaryIO, text: bytes, times: int = 1) -> None:
    """Returns once `text` has been shown this often."""
    shown = b""
    while shown.count(text) < times:
        shown += terminal.read(4096)


def test_top_has_a_line_for_each_engine_and_ends_with_its_terminal(
    launcher: Launcher, port: int
) -> None:
    launcher.succeed("up", "--port", port, "--engines", 2)
    shown = launcher.succeed("top", "--port", port)
    assert "2 pipeline stages" in shown
    lines = [line.split() for line in shown.splitlines()]
    # Engine, frontends, running, as the stand-ins say.
    assert [line[:3] for line in lines[3:5]] == [["0", "1", "3"], ["1", "1", "3"]]
    assert lines[5][:2] == ["all", "6"]
    assert lines[3][8:10] == ["of", "64"]
    launcher.succeed("scale", "--port", port, "--engines", 1)
    assert len(launcher.succeed("top", "--port", port).splitlines()) == 4

    # On a terminal, it ends with that.
    with top_on_terminal(launcher, port) as (top, terminal):
        read_until(terminal, b"nano-vllm-grpc")
        terminal.close()
        top.wait()


def test_top_waits_for_a_scheduler_and_ends_with_its_stack(launcher: Launcher, port: int) -> None:
    launcher.succeed("up", "--port", port, "--services", "worker frontend")
    with top_on_terminal(launcher, port) as (top, terminal):
        read_until(terminal, b"the scheduler does not answer", times=3)
        launcher.succeed("down", "--port", port)
        read_until(terminal, b"the stack on port %d has stopped" % port)
        assert top.wait() == 0
