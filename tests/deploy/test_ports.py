"""Reserving a port, and refusing one that is taken."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from itertools import count

import pytest

from deploy.errors import LaunchError
from deploy.ports import free_port, reserve_ports
from shared.process.ports import bound_socket, held_ports
from tests.stack import ROOT


def test_only_this_stack_shares_a_reserved_port() -> None:
    port = free_port()
    with reserve_ports("127.0.0.1", port):
        with pytest.raises(LaunchError, match=f"PORT: cannot listen on 127.0.0.1:{port}"):
            reserve_ports("127.0.0.1", port)
        with socket.socket() as frontend:
            frontend.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
            frontend.bind(("127.0.0.1", port))
            frontend.listen()
    reserve_ports("127.0.0.1", port).close()


def test_lingering_connections_of_a_stopped_stack_do_not_keep_its_port() -> None:
    with socket.socket() as server:  # with the options that gRPC sets
        server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        server.bind(("127.0.0.1", 0))
        server.listen()
        port = server.getsockname()[1]
        with socket.create_connection(("127.0.0.1", port)) as client:
            accepted, _ = server.accept()
            accepted.close()  # closed first, so that TIME_WAIT is on our side
            assert client.recv(1) == b""
    reserve_ports("127.0.0.1", port).close()


def test_no_port_is_returned_twice() -> None:
    ports = [free_port() for _ in range(1000)]
    assert len(set(ports)) == len(ports)


def test_no_port_is_given_to_two_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("deploy.ports._numbers", count())
    ports = [free_port() for _ in range(3)]
    same = f"import os; os.getpid = lambda: {os.getpid()}"  # so that it tries the same ports
    command = [sys.executable, "-c", f"{same}; from deploy.ports import *; print(free_port())"]
    assert int(subprocess.check_output(command, cwd=ROOT)) not in ports


def test_a_free_port_has_no_closed_connections(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("deploy.ports._numbers", count())
    address = "127.0.0.1", free_port()
    with bound_socket(*address, socket.SO_REUSEADDR) as server:
        server.listen()
        with socket.create_connection(address) as client:
            server.accept()[0].close()
            assert not client.recv(1)
    monkeypatch.setattr("deploy.ports._numbers", count())  # it tries the same port first
    port = free_port()
    assert port != address[1]
    with held_ports([f"127.0.0.1:{port}"]):
        pass
