"""Descriptors that stay in the queue of a socket."""

from __future__ import annotations

import os
import resource
import subprocess
import sys
from pathlib import Path

import pytest

from shared.process.kept import KeptDescriptors, close_unclaimed
from tests.waiting import WAIT_S

ROOT = Path(__file__).parents[2]


def file_with(text: str) -> int:
    descriptor = os.memfd_create("of-a-test")
    os.write(descriptor, text.encode())
    return descriptor


def taken_from(kept: KeptDescriptors) -> list[str]:
    """The texts of its files, in order. Their descriptors are closed."""
    texts = []
    for descriptor in kept.read()[1]:
        assert not os.get_inheritable(descriptor)
        texts.append(os.pread(descriptor, 100, 0).decode())
        os.close(descriptor)
    return texts


def write(kept: KeptDescriptors, value: object, *texts: str) -> None:
    files = [file_with(each) for each in texts]
    kept.write(value, files)
    for each in files:
        os.close(each)


def inherit(kept: KeptDescriptors) -> None:
    """Does what a program does before its successor starts."""
    for each in (kept._in, kept._out):
        os.set_inheritable(each.fileno(), True)


def test_each_reader_gets_what_was_written_last() -> None:
    kept = KeptDescriptors("things")
    assert kept.read() == (None, [])
    write(kept, value := {"a": [1, "x" * 300_000]}, "first", "second")
    for _ in range(2):
        assert (kept.value(), taken_from(kept)) == (value, ["first", "second"])
    write(kept, "two", "third")
    assert (kept.value(), taken_from(kept)) == ("two", ["third"])
    write(kept, "none")
    assert kept.read() == ("none", [])
    kept.clear()
    assert kept.read() == (None, [])


def test_too_many_are_rejected_and_none_are_kept() -> None:
    kept, file = KeptDescriptors("things"), file_with("text")
    kept.write("most", [file] * 252)
    assert taken_from(kept) == ["text"] * 252
    with pytest.raises(OSError, match="253 descriptors"):
        kept.write("too many", [file] * 253)
    assert kept.read() == (None, [])
    os.close(file)


def test_without_room_for_all_none_are_found() -> None:
    """Linux would hand over as many as there is room for."""
    kept = KeptDescriptors("things")
    write(kept, "value", "first", "second", "third")
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    highest = max(map(int, os.listdir("/proc/self/fd")))
    filling = [os.dup(kept._in.fileno()) for _ in range(highest)]
    try:
        for room in range(5):
            resource.setrlimit(resource.RLIMIT_NOFILE, (max(filling) + 1 + room, hard))
            before = os.listdir("/proc/self/fd") if room else []
            assert kept.read() == (None, []) if room < 4 else taken_from(kept)
            assert not room or os.listdir("/proc/self/fd") == before
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        for each in filling:
            os.close(each)


def test_the_next_program_finds_them_if_its_version_is_the_same() -> None:
    first = KeptDescriptors("things", "1")
    write(first, "one", "text")
    inherit(first)
    other_version, other_name = KeptDescriptors("things", "2"), KeptDescriptors("others", "1")
    assert other_version.value() is other_name.value() is None
    found = KeptDescriptors("things", "1")
    assert (found.value(), taken_from(found)) == ("one", ["text"])
    for each in (first._in, first._out):  # another object closes them
        each.detach()


def test_another_program_closes_them() -> None:
    reader, writer = os.pipe()
    kept = KeptDescriptors("things", "1")
    kept.write("one", [writer])
    os.close(writer)
    inherit(kept)
    assert close_unclaimed()
    assert os.read(reader, 1) == b""  # the queue is gone, too
    os.close(reader)
    for each in (kept._in, kept._out):
        each.detach()


PARENT = """
import os, sys, time
from shared.process.death_signal import end_with_parent
from shared.process.kept import KeptDescriptors
kept, writer, parent = KeptDescriptors("things"), int(sys.argv[1]), os.getpid()
if not os.fork():
    end_with_parent(parent)
    for _ in range(int(sys.argv[2])):
        kept.write("id", [writer] * 3)
    if len(sys.argv) > 3:
        kept.read()
    print("ready", flush=True)
    time.sleep(600)
os.close(writer)
os.wait()
"""


@pytest.mark.parametrize("arguments", [["0"], ["1"], ["2"], ["1", "read"]])
def test_nothing_is_left_when_the_parent_process_dies(arguments: list[str]) -> None:
    """Whatever its fork has made, sent or received by then."""
    reader, writer = os.pipe()
    command = [sys.executable, "-c", PARENT, str(writer), *arguments]
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, pass_fds=[writer])
    os.close(writer)
    with process, os.fdopen(reader, "rb") as pipe:
        assert process.stdout
        assert process.stdout.readline() == b"ready\n"
        process.kill()
        assert process.wait(WAIT_S) < 0
        assert pipe.read() == b""  # returns once nobody has the other end
