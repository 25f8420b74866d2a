"""Asks and tells a stack's supervisord, through the socket in its directory."""

from __future__ import annotations

import http.client
import socket
import xmlrpc.client
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from supervisor.xmlrpc import SupervisorTransport, UnixStreamHTTPConnection

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
