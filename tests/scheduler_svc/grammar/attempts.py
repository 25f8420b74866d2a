"""Attempts that a process which has been taken over would make, and their results."""

from __future__ import annotations

import ctypes
import errno
import json
import os
import resource
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from scheduler_svc.grammar import confinement
from scheduler_svc.grammar.errors import GrammarError

ATTEMPTS = "attempt: "
_PTRACE_SEIZE, _CLONE_NEWUSER = 0x4206, 0x10000000


class Surroundings(NamedTuple):
    """What there is to attempt something with."""

    file: str  # executable, and no program
    directory: str
    unix: str  # listens
    abstract: str
    tcp: int
    process: int


@contextmanager
def surroundings(directory: Path) -> Iterator[Surroundings]:
    file = directory / "file"
    file.write_bytes(b"\0")
    file.chmod(0o700)
    with (
        socket.socket(socket.AF_UNIX) as unix,
        socket.socket(socket.AF_UNIX) as abstract,
        socket.create_server(("127.0.0.1", 0)) as tcp,
        subprocess.Popen(["sleep", "60"]) as process,
    ):
        unix.bind(str(directory / "unix"))
        abstract.bind("")  # the kernel chooses a name
        for each in (unix, abstract):
            each.listen()
        name = abstract.getsockname().decode()
        port = tcp.getsockname()[1]
        try:
            yield Surroundings(
                str(file), str(directory), str(directory / "unix"), name, port, process.pid
            )
        finally:
            process.kill()


def attempt_all(given: Surroundings) -> dict[str, str]:
    """What became of each attempt: `done`, or the error's name."""
    return {name: _outcome(attempt) for name, attempt in _attempts(given).items()}


def attempting(compile_grammar: Callable[..., Any]) -> Callable[..., Any]:
    def compile_or_attempt(compilers: Any, kind: Any, text: str) -> Any:
        if not text.startswith(ATTEMPTS):
            return compile_grammar(compilers, kind, text)
        given = Surroundings(*json.loads(text.removeprefix(ATTEMPTS)))
        raise GrammarError(kind, json.dumps(attempt_all(given)))

    return compile_or_attempt


def _outcome(attempt: Callable[[], object]) -> str:
    try:
        attempt()
    except OSError as error:
        return errno.errorcode[error.errno or 0]
    except (RuntimeError, ValueError) as error:  # of a thread; of a limit
        return str(error)
    return "done"


def _attempts(given: Surroundings) -> dict[str, Callable[[], object]]:
    libc = ctypes.CDLL(None, use_errno=True)

    def call(name: str, *arguments: Any) -> None:
        if libc[name](*arguments) < 0:
            raise OSError(ctypes.get_errno(), name)

    def connect(family: socket.AddressFamily, address: Any) -> None:
        with socket.socket(family) as made:
            made.connect(address)

    def fork() -> None:
        if not (pid := os.fork()):
            os._exit(0)
        os.waitpid(pid, 0)

    def execute() -> None:
        try:
            os.execv(given.file, ["file"])
        except OSError as error:
            if error.errno != errno.ENOEXEC:  # it would, if it were a program
                raise

    process = given.process
    return {
        "read a file": lambda: open(given.file).close(),
        "write a file": lambda: open(given.file, "r+").close(),
        "make a file": lambda: open(given.directory + "/new", "x").close(),
        "remove a file": lambda: os.unlink(given.directory + "/new"),
        "list a directory": lambda: os.listdir(given.directory),
        "read its environment": lambda: open("/proc/self/environ").close(),
        "execute": execute,
        "connect by TCP": lambda: connect(socket.AF_INET, ("127.0.0.1", given.tcp)),
        "listen on TCP": lambda: socket.create_server(("127.0.0.1", 0)).close(),
        "connect to an abstract socket": lambda: connect(socket.AF_UNIX, given.abstract.encode()),
        "signal": lambda: os.kill(process, signal.SIGTERM),
        "ask for a process": lambda: os.kill(process, 0),
        "signal a thread": lambda: call("tgkill", process, process, signal.SIGTERM),
        "trace": lambda: call("ptrace", _PTRACE_SEIZE, process, None, None),
        "connect to a Unix socket": lambda: connect(socket.AF_UNIX, given.unix),
        "open a UDP socket": lambda: socket.socket(socket.AF_INET, socket.SOCK_DGRAM).close(),
        "make a pair of sockets": lambda: [each.close() for each in socket.socketpair()],
        "open a process": lambda: os.close(os.pidfd_open(process)),
        "slow down a process": lambda: os.setpriority(os.PRIO_PROCESS, process, 19),
        "limit a process": lambda: resource.prlimit(process, resource.RLIMIT_CORE, (0, 0)),
        "fork": fork,
        "start a thread": lambda: threading.Thread(target=int).start(),
        "share memory": lambda: call("shmget", 0, 4096, 0o600),
        "make a file in memory": lambda: os.close(os.memfd_create("new")),
        "enter a namespace": lambda: call("unshare", _CLONE_NEWUSER),
    }


def main(args: list[str]) -> None:
    """`... attempts SURROUNDINGS [LAYER ...]` confines itself as on a kernel that lacks the layers,
    and prints what became of each attempt."""
    given, *missing = args
    if "landlock" in missing:
        confinement._LANDLOCK_CREATE_RULESET = 9999
    if "seccomp" in missing:
        confinement._ARCHITECTURES.clear()
    confinement.log_gaps()
    confinement.confine()
    print(json.dumps(attempt_all(Surroundings(*json.loads(given)))))


if __name__ == "__main__":
    main(sys.argv[1:])
