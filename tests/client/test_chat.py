"""The chat program as a process of its own, through pipes and on a terminal."""

from __future__ import annotations

import os
import pty
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from shared.errors import InternalError
from tests.client.fake_server import ENDLESS_SEED, FakeServer, FakeService

EDITING = "\x1b[?2004h"  # bracketed paste on: the line editor has the terminal
CHAT = [sys.executable, "-m", "nano_vllm_grpc.chat"]


def chat(server: FakeServer, lines: str, *flags: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*CHAT, "--address", server.address, *flags],
        input=lines,
        capture_output=True,
        text=True,
        timeout=60,
    )


def sent_messages(service: FakeService) -> list[list[tuple[str, str]]]:
    return [[(m.role, m.content) for m in r.chat.messages] for r in service.requests]


def test_turns_are_sent_with_their_history(server: FakeServer, service: FakeService) -> None:
    flags = ["--max-tokens", "3", "--temperature", "0", "--seed", "0", "--stop", "X", "--stop", "Y"]
    done = chat(server, "ab\n\nx\n/exit\nnever\n", *flags, "--system", "s")
    assert (done.returncode, done.stderr) == (0, "")
    assert sent_messages(service) == [
        [("system", "s"), ("user", "ab")],
        [("system", "s"), ("user", "ab"), ("assistant", "tbc"), ("user", "x")],
    ]
    assert done.stdout.splitlines()[1] == "tbc"
    assert "[3 tokens, " in done.stdout
    assert "tokens/s, first token " in done.stdout
    sampling = service.requests[0].sampling
    sent = {field.name: value for field, value in sampling.ListFields()}
    assert sent == {"max_tokens": 3, "temperature": 0, "seed": 0, "stop": ["X", "Y"]}


def test_commands_are_not_sent_and_reset_forgets_the_history(
    server: FakeServer, service: FakeService
) -> None:
    done = chat(server, "a\n/reset\nb\n/help\n/nonsense now\n")
    assert done.returncode == 0  # the end of input ends the program
    assert sent_messages(service) == [[("user", "a")], [("user", "b")]]
    assert "/reset " in done.stdout
    assert "/nonsense: no such command" in done.stdout


def test_a_long_history_loses_its_oldest_turns(server: FakeServer, service: FakeService) -> None:
    service.max_model_len = 40
    done = chat(server, "a" * 10 + "\n" + "b" * 10 + "\n" + "c" * 10 + "\n", "--max-tokens", "5")
    assert "dropped the first 1 exchange(s)" in done.stdout
    assert sent_messages(service)[2] == [
        ("user", "b" * 10),
        ("assistant", "b" * 5),
        ("user", "c" * 10),
    ]


def test_a_failed_question_is_not_in_the_history(server: FakeServer, service: FakeService) -> None:
    service.refusals.append(InternalError("internal error"))
    done = chat(server, "a\nb\n")
    assert done.returncode == 0
    assert "[INTERNAL: internal error]" in done.stdout
    assert sent_messages(service)[1] == [("user", "b")]


def test_the_model_cannot_control_the_terminal(server: FakeServer) -> None:
    done = chat(server, "\x1aZ1l\n", "--max-tokens", "4")  # answered with ESC, "[2m"
    assert done.stdout.splitlines()[1] == "[2m"


def test_an_absent_server_gives_a_plain_message() -> None:
    done = subprocess.run(
        [*CHAT, "--address", "127.0.0.1:1"], input="", capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 1
    assert "make up first" in done.stderr
    assert "Traceback" not in done.stderr


class Terminal:
    """A chat on a pseudo-terminal."""

    def __init__(self, fd: int, process: subprocess.Popen[bytes]) -> None:
        self._fd = fd
        self.process = process
        self.seen = ""

    def type(self, keys: str) -> None:
        os.write(self._fd, keys.encode())

    def wait_for(self, text: str) -> None:
        """Reads on until `text` appears."""
        while text not in self.seen:
            read = os.read(self._fd, 4096).decode(errors="replace")
            self.seen += read
            if "\x1b[6n" in read:  # the line editor asks where the cursor is
                self.type("\x1b[1;1R")
        self.seen = self.seen.split(text, 1)[1]


@contextmanager
def on_a_terminal(server: FakeServer, *flags: str) -> Iterator[Terminal]:
    master, slave = pty.openpty()
    process = subprocess.Popen(
        [*CHAT, "--address", server.address, *flags],
        stdin=slave,
        stdout=slave,
        stderr=slave,
        start_new_session=True,
        env={**os.environ, "TERM": "xterm"},
    )
    os.close(slave)
    try:
        yield Terminal(master, process)
    finally:
        process.kill()
        process.wait()
        os.close(master)


def test_ctrl_c_stops_the_answer_but_not_the_program(
    server: FakeServer, service: FakeService
) -> None:
    service.max_model_len = 1_000_000
    with on_a_terminal(server, "--seed", str(ENDLESS_SEED)) as terminal:
        terminal.wait_for(EDITING)
        terminal.type("a\r")
        terminal.wait_for("bbb")
        terminal.process.send_signal(signal.SIGINT)
        terminal.wait_for("tokens/s")
        assert service.cancelled.wait(60)

        terminal.wait_for(EDITING)
        terminal.type("\x03")  # at the prompt it discards the line
        terminal.wait_for(EDITING)
        service.cancelled.clear()
        terminal.type("c\r")
        terminal.wait_for("bccc")  # the history kept the question and the partial answer
        assert sent_messages(service)[1][0] == ("user", "a")
        assert sent_messages(service)[1][1][0] == "assistant"
        assert sent_messages(service)[1][1][1].startswith("bbb")
        terminal.process.send_signal(signal.SIGINT)
        terminal.wait_for(EDITING)
        terminal.type("\x04")  # Ctrl-D
        assert terminal.process.wait(60) == 0
