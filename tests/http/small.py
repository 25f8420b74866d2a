"""A gateway that has places for two requests, and requests that take them."""

from __future__ import annotations

import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from deploy.health import SERVING, http_health
from deploy.ports import free_port
from tests.stack import DEMO_MODEL, ROOT
from tests.waiting import wait_for

_PROGRAM = """
import sys
import deploy.gateway
deploy.gateway._MAX_REQUESTS = 2
deploy.gateway._BODY_S = deploy.gateway._STALL_S = {body_s}
sys.exit(deploy.gateway.main())
"""


@contextmanager
def small_gateway(door: str, body_s: int) -> Iterator[str]:
    """Runs it in front of the frontend at `door`; yields its address."""
    address = f"127.0.0.1:{free_port()}"
    flags = [f"--http-port={address.rpartition(':')[2]}"]
    flags += [f"--engine-addresses={door}", f"--model={DEMO_MODEL}"]
    program = _PROGRAM.format(body_s=body_s)
    process = subprocess.Popen([sys.executable, "-c", program, *flags], cwd=ROOT)
    try:
        wait_for(lambda: http_health(f"http://{address}") == SERVING, "the gateway")
        yield address
    finally:
        process.kill()
        process.wait()


def half_sent(address: str, host: str = "localhost") -> socket.socket:
    """The connection of a request whose body never comes."""
    name, _, port = address.partition(":")
    connection = socket.create_connection((name, int(port)), timeout=100)
    head = f"POST /v1/completions HTTP/1.1\r\nhost: {host}\r\ncontent-length: 1000\r\n"
    connection.sendall(f"{head}content-type: application/json\r\n\r\n{{".encode())
    return connection
