"""`top` on a terminal: it ends with the terminal, and with the stack."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from .conftest import Launcher

pytestmark = pytest.mark.system


class Terminal:
    """Runs `top` on a terminal and reads its output. `top` is in another session: a terminal
    that hangs up sends it no signal."""

    def __init__(self, launcher: Launcher, port: int) -> None:
        self._side, other = os.openpty()
        self._open = True
        self.shown = b""
        self.top = subprocess.Popen(
            launcher.command("top", "--port", port),
            cwd=launcher.directory,
            env=launcher.environment | {"TERM": "xterm"},
            stdin=other,
            stdout=other,
            stderr=other,
            start_new_session=True,
        )
        os.close(other)

    def wait_for(self, text: bytes, times: int = 1) -> None:
        """Returns once `text` has been shown this often."""
        while self.shown.count(text) < times:
            self.shown += os.read(self._side, 4096)

    def hang_up(self) -> None:
        if self._open:
            self._open = False
            os.close(self._side)


@contextmanager
def shown_on_terminal(launcher: Launcher, port: int) -> Iterator[Terminal]:
    terminal = Terminal(launcher, port)
    try:
        yield terminal
    finally:
        terminal.top.kill()
        terminal.top.wait()
        terminal.hang_up()


def test_top_has_a_line_for_each_engine_and_ends_with_its_terminal(
    launcher: Launcher, port: int
) -> None:
    assert launcher("up", "--port", port, "--engines", 2).returncode == 0
    top = launcher("top", "--port", port)
    assert top.returncode == 0, top.stderr
    lines = [line.split() for line in top.stdout.splitlines()]
    # Engine, frontends, running, as the stand-ins say.
    assert ["0", "1", "3"] in [line[:3] for line in lines]
    assert ["1", "1", "3"] in [line[:3] for line in lines]
    assert ["all", "6"] in [line[:2] for line in lines]
    assert launcher("scale", "--port", port, "--engines", 1).returncode == 0
    assert "all" not in launcher("top", "--port", port).stdout.split()

    # On a terminal, it ends with that.
    with shown_on_terminal(launcher, port) as terminal:
        terminal.wait_for(b"nano-vllm-grpc")
        terminal.hang_up()
        terminal.top.wait()


def test_top_waits_for_a_scheduler_and_ends_with_its_stack(launcher: Launcher, port: int) -> None:
    assert launcher("up", "--port", port, "--services", "worker frontend").returncode == 0
    with shown_on_terminal(launcher, port) as terminal:
        terminal.wait_for(b"the scheduler does not answer", times=3)
        assert launcher("down", "--port", port).returncode == 0
        terminal.wait_for(b"the stack on port %d has stopped" % port)
        assert terminal.top.wait() == 0
