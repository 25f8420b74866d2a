"""Asks and tells a stack's supervisord, through the socket in its directory."""

from __future__ import annotations

import http.client
import socket
import xmlrpc.client
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from supervisor.xmlrpc import Faults, SupervisorTransport, UnixStreamHTTPConnection

from deploy.errors import SupervisorGoneError, SupervisorSilentError
from deploy.supervisor_config import control_socket

ANSWER_S = 10.0  # supervisord's, which it gives in milliseconds


@contextmanager
def supervisor_rpc(directory: Path, timeout_s: float | None = ANSWER_S) -> Iterator[Any]:
    """Yields supervisord's RPC methods; None: they may take any time.

    Raises:
        SupervisorGoneError: there is no supervisord, or no longer, or it does not answer.
    """
    transport = SupervisorTransport(serverurl=f"unix://{control_socket(directory)}")
    transport._get_connection = lambda: _Connection(control_socket(directory), timeout_s)
    proxy = xmlrpc.client.ServerProxy("http://localhost", transport=transport)
    try:
        yield proxy.supervisor
    except TimeoutError as error:
        raise SupervisorSilentError(f"supervisord in {directory} does not answer") from error
    except (OSError, http.client.HTTPException, xmlrpc.client.Error) as error:
        raise SupervisorGoneError(f"no supervisord answers in {directory}: {error}") from error
    finally:
        transport.close()


def update_groups(directory: Path) -> None:
    """Has supervisord read its configuration again, stop and forget the groups that are no longer
    in it, and start those that are new.

    Raises:
        SupervisorGoneError: there is no supervisord, or no longer.
    """
    with supervisor_rpc(directory, None) as supervisor:
        ((added, _, removed),) = supervisor.reloadConfig()
        for group in reversed(removed):  # in the order in which all of them would stop
            _stop_and_forget(supervisor, group)
        for group in added:
            with already(Faults.ALREADY_ADDED):
                supervisor.addProcessGroup(group)


def replace_groups(directory: Path, groups: Sequence[str]) -> None:
    """Has supervisord stop these groups, first those that it started last, and start them as its
    configuration says by now."""
    with supervisor_rpc(directory, None) as supervisor:
        supervisor.reloadConfig()
        for group in reversed(groups):
            _stop_and_forget(supervisor, group)
        for group in groups:
            with already(Faults.ALREADY_ADDED):
                supervisor.addProcessGroup(group)


def _stop_and_forget(supervisor: Any, group: str) -> None:
    forgotten = False
    with already(Faults.BAD_NAME):  # an interrupted command had it forgotten
        while not forgotten:
            supervisor.stopProcessGroup(group)
            with already(Faults.STILL_RUNNING):  # the watchdog had it started again
                forgotten = supervisor.removeProcessGroup(group)


class _Connection(UnixStreamHTTPConnection):  # type: ignore[misc]  # it has no types
    """A connection to supervisord on which no wait is longer than `timeout_s`."""

    def __init__(self, path: str, timeout_s: float | None) -> None:
        super().__init__("localhost")
        self._path, self._timeout_s = path, timeout_s

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.sock.settimeout(self._timeout_s)
        self.sock.connect(self._path)


@contextmanager
def already(code: int) -> Iterator[None]:
    """Ignores the fault `code`, with which supervisord refuses to do what is already done."""
    try:
        yield
    except xmlrpc.client.Fault as fault:
        if fault.faultCode != code:
            raise
