"""Logs that cannot be written: full pipes, pipes without a reader, full disks, no stderr at all."""

from __future__ import annotations

import fcntl
import json
import os
import select
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from shared.telemetry.log_output import LogOutput

PIPE_BYTES = 4 * select.PIPE_BUF
LOGGING_PROGRAM = """
import os, sys, warnings
import structlog
from frontend.settings import FrontendSettings
from shared.config import load_settings
from shared.telemetry.logging import configure_logging
configure_logging(load_settings(FrontendSettings, []), "test")
for number in range(1000):
    structlog.get_logger().info("event", number=number)
warnings.warn("heed")
print(os.readlink("/proc/self/fd/2"), flush=True)
"""


def notice(count: int) -> str:
    return f"{count} dropped"


def line(number: int) -> bytes:
    return b"%d\n" % number


@pytest.fixture
def pipe() -> Iterator[tuple[int, int]]:
    """A pipe's reading end, which does not block, and its writing end, which does."""
    reading, writing = os.pipe()
    os.set_blocking(reading, False)
    fcntl.fcntl(writing, fcntl.F_SETPIPE_SZ, PIPE_BYTES)
    yield reading, writing
    os.close(reading)
    os.close(writing)


def read_all(reading: int) -> list[bytes]:
    data = b""
    while select.select([reading], [], [], 0)[0]:
        data += os.read(reading, 1 << 16)
    return data.splitlines()


def test_a_pipe_that_nobody_reads_costs_lines_that_are_counted(pipe: tuple[int, int]) -> None:
    reading, writing = pipe
    output = LogOutput(writing, notice)
    total = 20_000
    for number in range(total):
        output.write(line(number))
    first = read_all(reading)
    assert first == [b"%d" % number for number in range(len(first))]
    assert 0 < len(first) < total
    output.write(line(total))
    assert read_all(reading) == [b"%d dropped" % (total - len(first)), b"%d" % total]
    output.write(line(total + 1))
    assert read_all(reading) == [b"%d" % (total + 1)]


def test_a_line_longer_than_a_pipe_is_cut(pipe: tuple[int, int]) -> None:
    reading, writing = pipe
    output = LogOutput(writing, notice)
    output.write(b"x" * 10 * PIPE_BYTES + b"\n")
    assert read_all(reading) == [b"x" * PIPE_BYTES]
    output.write(b"next\n")
    assert read_all(reading) == [b"", b"1 dropped", b"next"]


def test_a_full_disk_costs_lines_that_are_counted(tmp_path: Path) -> None:
    fd = os.open("/dev/full", os.O_WRONLY)
    output = LogOutput(fd, notice)
    for number in range(5):
        output.write(line(number))
    log = tmp_path / "log"
    with log.open("wb") as file:
        os.dup2(file.fileno(), fd)  # there is space again
    output.write(line(5))
    assert log.read_bytes() == b"5 dropped\n5\n"
    os.close(fd)


def test_a_pipe_whose_reader_is_gone_is_no_error() -> None:
    reading, writing = os.pipe()
    os.close(reading)
    output = LogOutput(writing, notice)
    assert output.write(b"a\n") == 2
    os.close(writing)
    assert output.write(b"b\n") == 2


@pytest.mark.parametrize("stderr", ["2>&-", "2>/dev/full", "2>&1 >/dev/null | exit"])
def test_a_service_runs_without_a_usable_stderr(stderr: str) -> None:
    """Warnings go there, too, and no other file ever gets standard error's number."""
    result = subprocess.run(
        ["sh", "-c", f'"$0" -c "$1" {stderr}', sys.executable, LOGGING_PROGRAM],
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    if "|" not in stderr:
        assert result.stdout.strip() in ("/dev/null", "/dev/full")


def test_the_notice_is_a_log_line_like_others() -> None:
    """A late reader finds it, with the service's name."""
    with subprocess.Popen(
        [sys.executable, "-c", LOGGING_PROGRAM + "input(); structlog.get_logger().info('late')"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        pipesize=PIPE_BYTES,
    ) as process:
        assert process.stdout
        assert process.stderr
        process.stdout.readline()
        # Part of the pipe is read before the program goes on, or it would still be full.
        first = os.read(process.stderr.fileno(), 1 << 16).decode().splitlines()
        _, rest = process.communicate("\n")
    events = [json.loads(text) for text in rest.splitlines()]
    assert [event["event"] for event in events] == ["log lines were dropped", "late"]
    numbers = [text for text in first if '"event": "event"' in text]
    assert events[0]["count"] >= 1000 - len(numbers)
    assert (events[0]["service"], events[0]["level"]) == ("test", "warning")
