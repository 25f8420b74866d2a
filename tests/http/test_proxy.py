"""nginx in front of the gateway, with the configuration in docs/use/http.md."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from tempfile import TemporaryDirectory

import httpx2
import pytest

from deploy.ports import free_port
from tests.http.small import half_sent, small_gateway
from tests.http.stacks import Side
from tests.stack import ROOT
from tests.waiting import wait_for

HOST = "llm.example"
PATIENCE_S = 300  # of the gateway, with bodies: longer than requests wait for a place
ASKED = {"model": "demo", "prompt": "Once", "max_tokens": 1}

pytestmark = pytest.mark.skipif(not shutil.which("nginx"), reason="nginx is not installed")


@pytest.fixture(scope="module")
def gateway() -> Iterator[str]:
    with ExitStack() as processes:
        directory = processes.enter_context(TemporaryDirectory(prefix="nano"))  # a short path
        side = Side(Path(directory), processes)
        side.wait_serving()
        yield processes.enter_context(small_gateway(side.engine_address, PATIENCE_S))


@pytest.fixture(scope="module")
def proxy(gateway: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The address of nginx."""
    directory, address = tmp_path_factory.mktemp("nginx"), f"127.0.0.1:{free_port()}"
    text = (ROOT / "docs" / "use" / "http.md").read_text()
    (configuration,) = re.findall(r"```nginx\n(.*?)```", text, re.S)
    for documented, here in (("listen 8443", f"listen {address}"), ("127.0.0.1:8000", gateway)):
        assert documented in configuration
        configuration = configuration.replace(documented, here)
    # Where a user other than root may write.
    kinds = ("client_body", "proxy", "fastcgi", "uwsgi", "scgi")
    paths = "".join(f"{kind}_temp_path {directory / kind}; " for kind in kinds)
    file = directory / "nginx.conf"
    file.write_text(configuration.replace("http {", f"http {{ access_log off; {paths}", 1))
    own = f"daemon off; pid {directory / 'pid'}; {'user root;' if os.getuid() == 0 else ''}"
    command = ["nginx", "-e", "stderr", "-c", str(file), "-g", own]
    process = subprocess.Popen(command)
    try:
        wait_for(Path(directory / "pid").exists, "nginx")
        yield address
    finally:
        process.terminate()
        process.wait()


def status(address: str, **headers: str) -> int:
    url = f"http://{address}/v1/completions"
    return httpx2.post(url, json=ASKED, headers=headers, timeout=100).status_code


@pytest.mark.parametrize(
    ("headers", "code"),
    [
        ({"host": HOST}, 200),
        ({"host": HOST, "origin": f"https://{HOST}"}, 200),
        ({"host": HOST, "origin": "https://evil.example"}, 403),
        ({"host": HOST, "origin": "null"}, 403),
        ({"host": "evil.example"}, 421),  # whose name has been pointed here
        ({"host": "evil.example", "origin": "http://evil.example"}, 421),
        ({}, 421),
    ],
)
def test_only_the_gateways_own_name_is_served(
    proxy: str, headers: dict[str, str], code: int
) -> None:
    assert status(proxy, **headers) == code


def test_half_sent_bodies_take_no_place_of_the_gateway(proxy: str, gateway: str) -> None:
    with ExitStack() as connections:
        for _ in range(64):  # as many as an address may have
            connections.enter_context(half_sent(proxy, HOST))
        wait_for(lambda: status(proxy, host=HOST) == 429, "nginx to count them")
        assert status(gateway) == 200
    wait_for(lambda: status(proxy, host=HOST) == 200, "the places of closed connections")
