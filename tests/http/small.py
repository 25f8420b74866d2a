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

_SMALL = """
deploy.gateway._MAX_REQUESTS = 2
deploy.gateway._BODY_S = deploy.gateway._STALL_S = {body_s}
"""


@contextmanager
def small_gateway(engine_address: str, body_s: int) -> Iterator[str]:
    """Runs it in front of the frontend at `engine_address`; yields its address."""
    with changed_gateway(engine_address, _SMALL.format(body_s=body_s)) as (_, address):
        yield address


@contextmanager
def changed_gateway(
    engine_address: str, change: str
) -> Iterator[tuple[subprocess.Popen[bytes], str]]:
    """Runs a gateway in front of the frontend at `engine_address`, after the statements of
    `change`; yields its process and its address."""
    address = f"127.0.0.1:{free_port()}"
    flags = [f"--http-port={address.rpartition(':')[2]}"]
    flags += [f"--gateway-addresses={engine_address}", f"--model={DEMO_MODEL}"]
    flags += ["--drain-timeout-s=100"]  # as long as its callers wait
    program = f"import sys\nimport deploy.gateway\n{change}\nsys.exit(deploy.gateway.main())"
    process = subprocess.Popen([sys.executable, "-c", program, *flags], cwd=ROOT)
    try:
        wait_for(lambda: http_health(f"http://{address}") == SERVING, "the gateway")
        yield process, address
    finally:
        process.kill()
        process.wait()


def half_sent(address: str, host: str = "localhost", length: int = 1000) -> socket.socket:
    """The connection of a request of which only the first byte of the body comes."""
    name, _, port = address.partition(":")
    connection = socket.create_connection((name, int(port)), timeout=100)
    head = f"POST /v1/completions HTTP/1.1\r\nhost: {host}\r\ncontent-length: {length}\r\n"
    connection.sendall(f"{head}content-type: application/json\r\n\r\n{{".encode())
    return connection
