"""Responses that several processes read and write."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from frontend.http.background.store import ResponseStore
from tests.frontend.http.background.files import CANCELLED, adopt, create, new_id, opened, state
from tests.waiting import WAIT_S

# Another process that holds a response's lock. It says so, and ends when its stdin is closed.
HOLDER = """
import sys
from frontend.http.background.store import ResponseStore
(found,) = ResponseStore(sys.argv[1]).unfinished()
found.append([7])
print(flush=True)
sys.stdin.read()
found.append([8])
"""
# Another process that cancels a response once it has 50 tokens.
CANCELLER = """
import sys
from frontend.http.background.store import ResponseStore
found = ResponseStore(sys.argv[1]).open("", sys.argv[2])
print(flush=True)
while len(found.tokens) < 50:
    found.refresh()
found.finish({"end": "cancelled"})
"""
# Another process whose files must not grow beyond a size. It appends until that fails.
WRITER = """
import resource, sys
from frontend.http.background.store import ResponseStore
(found,) = ResponseStore(sys.argv[1]).unfinished()
limit = found.path.stat().st_size + 40
resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
try:
    for token in range(1000, 2000):
        found.append([token])
except OSError:
    print(len(found.tokens), flush=True)
try:
    ResponseStore(sys.argv[1]).create("", "resp_" + 32 * "1", {"input": 1000 * "x"})
except Exception as error:
    print(type(error).__name__, flush=True)
"""


@contextmanager
def running(script: str, *args: object) -> Iterator[subprocess.Popen[str]]:
    """Runs a script until it has printed a line."""
    command = [sys.executable, "-c", script, *map(str, args)]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        process.stdout.readline()
        yield process
        process.kill()


def test_a_stopped_process_keeps_a_response_and_a_dead_one_does_not(
    store: ResponseStore, directory: Path
) -> None:
    create(store).close()
    with running(HOLDER, directory) as process:
        process.send_signal(signal.SIGSTOP)
        assert [*store.unfinished()] == []
        process.kill()
        process.wait(WAIT_S)
        adopted = adopt(store)
        assert adopted.tokens == [7]


def test_another_process_cancels_while_the_owner_generates(
    store: ResponseStore, directory: Path
) -> None:
    owner = create(store)
    with running(CANCELLER, directory, new_id()) as process:
        while owner.end is None:
            owner.append([len(owner.tokens)])
        process.wait(WAIT_S)
    assert owner.end == CANCELLED
    assert len(owner.tokens) >= 50
    assert owner.tokens == [*range(len(owner.tokens))]
    assert state(opened(store)) == state(owner)


def test_the_kernel_limits_a_file(store: ResponseStore, directory: Path) -> None:
    create(store).close()
    command = [sys.executable, "-c", WRITER, str(directory)]
    written, error = subprocess.run(
        command, capture_output=True, text=True, timeout=WAIT_S, check=True
    ).stdout.split()
    adopted = adopt(store)
    assert adopted.tokens == [*range(1000, 1000 + int(written))]
    adopted.append([1])
    assert state(opened(store))[0] == [*range(1000, 1000 + int(written)), 1]
    assert error == "UnavailableError"
    assert store.open("", "resp_" + 32 * "1") is None
