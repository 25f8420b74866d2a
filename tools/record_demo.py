"""`python -m tools.record_demo`: records docs/pictures/recording.svg.

Two terminals share a stack on a free port. One runs `make up` and `make chat`. The other runs
`kill -9` on the worker while it answers. Then the first asks the question again, undisturbed. The
recording fails unless both answers are equal. It shows exactly what the commands printed.

Only this script needs pyte, a terminal emulator:

    python3 -m venv /tmp/recording && /tmp/recording/bin/pip install pyte
    /tmp/recording/bin/python -m tools.record_demo --out docs/pictures/recording.svg
"""

from __future__ import annotations

import argparse
import fcntl
import importlib
import os
import pty
import re
import select
import signal
import socket
import struct
import sys
import termios
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from tools.animated_svg import Frame, Row, Run, render

COLUMNS, TALL, SHORT = 88, 26, 6
QUESTION = "Tell me a story about a fox"
_KILL_AFTER = 120  # characters of the answer
_SLOW_MOTION = 3.0  # used for answers, because the demo model is too fast to watch
_FAST = 0.35  # used for typing and for a start
_LONGEST_PAUSE = 0.8  # in the recording, while nothing changes on the screens
_FRAME_S = 0.03
_COLOURS = {"green": "#7ee787", "red": "#ff7b72", "blue": "#79c0ff", "brown": "#e3b341"}
_PROMPT = r"\[\e[32;1m\]$\[\e[0m\] "


class Terminal:
    """A shell in a pseudo-terminal, and its screen."""

    def __init__(self, rows: int, port: int) -> None:
        pyte = importlib.import_module("pyte")
        self._screen: Any = pyte.Screen(COLUMNS, rows)
        self._stream = pyte.ByteStream(self._screen)
        self.pid, self.fd = pty.fork()
        if self.pid == 0:
            environment = {k: v for k, v in os.environ.items() if not k.startswith(("MAKE", "MFL"))}
            # `make` reads this as if it were typed after each `make`.
            environment |= {"MAKEFLAGS": f" -- PORT={port}", "PS1": _PROMPT, "PROMPT_COMMAND": ""}
            environment["TERM"] = "xterm-256color"
            os.execvpe("bash", ["bash", "--norc", "--noprofile", "-i"], environment)
        fcntl.ioctl(self.fd, termios.TIOCSWINSZ, struct.pack("HHHH", rows, COLUMNS, 0, 0))
        # Programs ask for the cursor's position and wait for the answer.
        self._screen.write_process_input = lambda answer: os.write(self.fd, answer.encode())

    def read(self) -> None:
        self._stream.feed(os.read(self.fd, 65536))

    @property
    def text(self) -> str:
        return "\n".join(line.rstrip() for line in self._screen.display)

    def rows(self) -> tuple[Row, ...]:
        return tuple(self._row(number) for number in range(self._screen.lines))

    def _row(self, number: int) -> Row:
        runs: list[Run] = []
        line = self._screen.buffer[number]
        for column in range(len(self._screen.display[number].rstrip())):
            char = line[column]
            style = (_COLOURS.get(char.fg, ""), char.bold)
            if runs and runs[-1][1:] == style:
                runs[-1] = Run(runs[-1].text + char.data, *style)
            else:
                runs.append(Run(char.data, *style))
        return tuple(runs)


class Recorder:
    """Drives the terminals, and keeps a frame of each change.

    Attributes:
        caption: text of the line below the terminals, from now on.
        speed: seconds of the recording per second, from now on.
        duration: seconds of the recording.
    """

    def __init__(self, *terminals: Terminal) -> None:
        self.caption = ""
        self.speed = 1.0
        self.frames: list[Frame] = []
        self._terminals = terminals
        self.duration = 0.0
        self._last = time.monotonic()

    def wait(self, until: Callable[[], bool], what: str, timeout_s: float = 120.0) -> None:
        """Records until `until()` is true.

        Raises:
            TimeoutError: that took longer than `timeout_s`; the message names `what`.
        """
        deadline = time.monotonic() + timeout_s
        while not until():
            if time.monotonic() > deadline:
                screens = "\n----\n".join(terminal.text for terminal in self._terminals)
                raise TimeoutError(f"no {what} within {timeout_s:.0f} s:\n{screens}")
            self._read(_FRAME_S)
            self._keep()

    def rest(self, seconds: float) -> None:
        """Keeps the screens unchanged for `seconds` of the recording."""
        end = time.monotonic() + 0.3
        self.wait(lambda: time.monotonic() > end, "quiet")
        self.duration += seconds

    def type(self, terminal: Terminal, line: str, *, enter: bool = True) -> None:
        speed, self.speed = self.speed, _FAST
        for key in line:
            os.write(terminal.fd, key.encode())
            self._read(_FRAME_S)
            self._keep()
        self.speed = speed
        if enter:
            self.enter(terminal)

    def enter(self, terminal: Terminal) -> None:
        os.write(terminal.fd, b"\r")

    def _read(self, seconds: float) -> None:
        end = time.monotonic() + seconds
        while (left := end - time.monotonic()) > 0:
            ready, _, _ = select.select([t.fd for t in self._terminals], [], [], left)
            for terminal in self._terminals:
                if terminal.fd in ready:
                    terminal.read()

    def _keep(self) -> None:
        rows = tuple(row for terminal in self._terminals for row in terminal.rows())
        rows += ((Run(self.caption, "#e3b341"),),)
        if self.frames and self.frames[-1].rows == rows:
            return
        now = time.monotonic()
        passed = (now - self._last) * self.speed
        self.duration += min(passed, _LONGEST_PAUSE * max(self.speed, 1.0))
        self._last = now
        self.frames.append(Frame(self.duration if self.frames else 0.0, rows))


def record(port: int) -> str:
    """Plays the scene and returns its SVG.

    Raises:
        TimeoutError: a step of the scene did not happen in time.
        ValueError: the interrupted answer differs from the undisturbed one.
    """
    chat, shell = Terminal(TALL, port), Terminal(SHORT, port)
    recorder = Recorder(chat, shell)
    try:
        _play(recorder, chat, shell)
    finally:
        os.write(chat.fd, b"\x03\x04")
        os.system(f"make down PORT={port} >/dev/null")
        for terminal in (chat, shell):
            os.kill(terminal.pid, signal.SIGKILL)
            os.waitpid(terminal.pid, 0)
    return render(recorder.frames, [TALL, SHORT, 1], COLUMNS, recorder.duration)


def _play(recorder: Recorder, chat: Terminal, shell: Terminal) -> None:
    recorder.wait(lambda: "$" in chat.text and "$" in shell.text, "prompts")
    recorder.caption = "three services and the demo model on a CPU (the start is sped up)"
    recorder.type(chat, "make up")
    recorder.speed = _FAST
    recorder.wait(lambda: "show it and stop it" in chat.text, "stack", timeout_s=300)
    recorder.rest(1.5)
    recorder.type(chat, "clear; make chat ARGS='--seed 7'")
    recorder.wait(lambda: chat.text.rstrip().endswith("\n>"), "chat")
    recorder.type(shell, "make ps")
    recorder.wait(lambda: "frontend" in shell.text, "processes")
    recorder.rest(1.0)
    worker = _worker(shell)
    recorder.type(shell, f"kill -9 {worker}", enter=False)
    recorder.type(chat, QUESTION, enter=False)
    slower = f"({_SLOW_MOTION:.0f} times slower than it was)"
    recorder.caption = f"the worker answers {slower}"
    recorder.speed = _SLOW_MOTION
    recorder.enter(chat)
    recorder.wait(lambda: len(_answers(chat)[0]) > _KILL_AFTER, "answer")
    recorder.caption = f"kill -9 of the worker, and the stream goes on {slower}"
    recorder.enter(shell)
    pause = _longest_pause(recorder, chat)
    interrupted = _answers(chat)[-1]
    recorder.speed = 1.0
    recorder.caption = f"a pause of {pause:.1f} s, no error; another worker has taken over"
    recorder.type(shell, "clear; make ps")
    recorder.wait(lambda: _worker(shell) not in ("", worker), "successor")
    recorder.rest(2.0)
    recorder.caption = "the same question, undisturbed: the same answer, to the letter"
    recorder.type(chat, "/reset")
    recorder.type(chat, QUESTION)
    recorder.wait(lambda: chat.text.count("tokens/s") == 2, "second answer")
    recorder.rest(5.0)
    if interrupted != (undisturbed := _answers(chat)[-1]):
        raise ValueError(f"the answers differ:\n{interrupted}\n\n{undisturbed}")


def _longest_pause(recorder: Recorder, chat: Terminal) -> float:
    """Records until the answer ends -> the longest time, in seconds, in which it did not grow."""
    grown, heard, pause = time.monotonic(), "", 0.0
    while "tokens/s" not in chat.text:
        recorder.wait(partial(_has_grown, chat, heard), "answer")
        pause = max(pause, time.monotonic() - grown)
        grown, heard = time.monotonic(), _answers(chat)[-1]
    return pause


def _has_grown(chat: Terminal, heard: str) -> bool:
    return _answers(chat)[-1] != heard or "tokens/s" in chat.text


def _worker(shell: Terminal) -> str:
    """The worker's process id if `make ps` shows it serving, else empty."""
    found = re.search(r"^worker +0 +(\d+) .*RUNNING/SERVING", shell.text, re.MULTILINE)
    return found[1] if found else ""


def _answers(chat: Terminal) -> list[str]:
    """The texts that follow the question on the screen, one for each time it was asked."""
    parts = chat.text.split(f"> {QUESTION}\n")[1:]
    return [part.partition("\n[")[0].strip() for part in parts] or [""]


def main(args: list[str]) -> int:
    parser = argparse.ArgumentParser(description="Records a killed worker.")
    parser.add_argument("--out", type=Path, default=Path("docs/pictures/recording.svg"))
    options = parser.parse_args(args)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    svg = record(port)
    options.out.write_text(svg, encoding="utf-8")
    print(f"{options.out}: {len(svg.encode()) / 1000:.0f} kB")
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
