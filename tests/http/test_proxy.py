"""nginx in front of the frontends, with the configuration in docs/use/http.md."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import httpx2
import pytest

from deploy.ports import free_port
from tests.http.test_stack import half_sent
from tests.stack import ROOT, running_stack
from tests.waiting import wait_for

HOST = "llm.example"
ASKED = {"model": "demo", "prompt": "Once", "max_tokens": 1}

pytestmark = pytest.mark.skipif(not shutil.which("nginx"), reason="nginx is not installed")


@pytest.fixture(scope="module")
def frontend() -> Iterator[str]:
    """The address of HTTP of a stack."""
    with running_stack(http_port="auto", http_hosts=HOST) as stack:
        yield stack.stack.url.removeprefix("http://")


@pytest.fixture(scope="module")
def proxy(frontend: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The address of nginx."""
    directory, address = tmp_path_factory.mktemp("nginx"), f"127.0.0.1:{free_port()}"
    text = (ROOT / "docs" / "use" / "http.md").read_text()
    (configuration,) = re.findall(r"```nginx\n(.*?)```", text, re.S)
    for documented, here in (("listen 8443", f"listen {address}"), ("127.0.0.1:8000", frontend)):
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
def test_only_the_servers_own_name_is_served(
    proxy: str, headers: dict[str, str], code: int
) -> None:
    assert status(proxy, **headers) == code


def test_half_sent_bodies_take_no_place_of_the_frontends(proxy: str, frontend: str) -> None:
    with ExitStack() as connections:
        for _ in range(64):  # as many as an address may have
            connections.enter_context(half_sent(proxy, HOST))
        wait_for(lambda: status(proxy, host=HOST) == 429, "nginx to count them")
        assert status(frontend) == 200
    wait_for(lambda: status(proxy, host=HOST) == 200, "the places of closed connections")
