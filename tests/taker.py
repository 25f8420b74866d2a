"""Another user of the host, who tries to take ports: `python -m tests.taker PORT...`.

with refused(50051, 8080):  # fails if the other user gets one of the ports meanwhile
    ...

Tests that are not run as root try as this user, and without SO_REUSEPORT.
"""

from __future__ import annotations

import itertools
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from errno import EADDRINUSE
from pathlib import Path

from shared.process.ports import bound_socket

_NOBODY = 65534


def become_another_user() -> list[int]:
    """Changes this process's user, if it may -> the options with which to try to bind."""
    socket.getaddrinfo("localhost", 0)  # imports modules, which the other user may not read
    if os.getuid() != 0:
        return [socket.SO_REUSEADDR]
    os.setuid(_NOBODY)
    return [socket.SO_REUSEADDR, socket.SO_REUSEPORT]


def is_refused(port: int, options: list[int]) -> bool:
    """Whether a port cannot be bound with any of these options.

    Raises:
        OSError: for another reason than that the port is in use.
    """
    for option in options:
        for host in ("127.0.0.1", "0.0.0.0"):
            try:
                bound_socket(host, port, option).close()
                return False
            except OSError as error:
                if error.errno != EADDRINUSE:
                    raise
    return True


@contextmanager
def refused(*ports: int) -> Iterator[None]:
    """Asserts that another user, who tries all the time, gets none of these ports."""
    command = [sys.executable, "-m", "tests.taker", *map(str, ports)]
    root = Path(__file__).parents[1]
    with subprocess.Popen(command, cwd=root, stdout=subprocess.PIPE, text=True) as taker:
        assert taker.stdout is not None
        try:
            assert taker.stdout.readline() == "refused\n"
            yield
        finally:
            taker.terminate()
        assert taker.wait() == -signal.SIGTERM, f"another user got port {taker.stdout.read()}"


def _main(ports: list[int]) -> None:
    options = become_another_user()
    for tries in itertools.count():
        for port in ports:
            if not is_refused(port, options):
                print(port)
                return
        if not tries:
            print("refused", flush=True)


if __name__ == "__main__":
    _main([int(each) for each in sys.argv[1:]])
