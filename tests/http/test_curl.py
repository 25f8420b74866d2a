"""curl, as a shell has it, against a real stack."""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.certificates import Authority
from tests.stack import RealStack, running_stack

TOKEN = "acme-token-0123456789"
ASKED = {"model": "demo", "prompt": "Once upon a time", "max_tokens": 8, "temperature": 0}

pytestmark = pytest.mark.skipif(not shutil.which("curl"), reason="curl is not installed")


@pytest.fixture(scope="module")
def stack() -> Iterator[RealStack]:
    with running_stack(http_port="auto") as running:
        yield running


def curl(url: str, *options: str, given: str = "") -> tuple[int, str]:
    """The status and the body of curl's request."""
    command = ["curl", "--silent", "--show-error", "--write-out", "\n%{http_code}", *options, url]
    run = subprocess.run(command, input=given, capture_output=True, text=True, timeout=100)
    assert run.returncode == 0, run.stderr
    body, _, status = run.stdout.rpartition("\n")
    return int(status), body


def test_a_completion_and_its_stream(stack: RealStack) -> None:
    url = f"{stack.stack.url}/v1/completions"
    status, body = curl(url, "--data", json.dumps(ASKED))
    text = json.loads(body)["choices"][0]["text"]
    assert (status, bool(text)) == (200, True)
    status, body = curl(url, "--no-buffer", "--data", json.dumps(ASKED | {"stream": True}))
    *events, done = [line[6:] for line in body.splitlines() if line.startswith("data: ")]
    assert (status, done) == (200, "[DONE]")
    assert "".join(json.loads(event)["choices"][0]["text"] for event in events) == text


def test_errors(stack: RealStack) -> None:
    status, body = curl(f"{stack.stack.url}/v1/completions", "--data", "{")
    assert (status, json.loads(body)["error"]["param"]) == (400, "body")
    status, body = curl(f"{stack.stack.url}/v1/completions")
    assert status == 405
    assert curl(f"{stack.stack.url}/v2")[0] == 404


@pytest.mark.parametrize("options", [("--http2",), ("--http1.0",), ("--http1.1",)])
def test_versions_of_http(stack: RealStack, options: tuple[str, ...]) -> None:
    url = f"{stack.stack.url}/v1/completions"
    assert curl(url, *options, "--data", json.dumps(ASKED))[0] == 200


def test_a_body_that_waits_for_continue(stack: RealStack) -> None:
    body = json.dumps(ASKED | {"user": "x" * (2 << 20)})
    options = ("--header", "Expect: 100-continue", "--data-binary", "@-")
    assert curl(f"{stack.stack.url}/v1/completions", *options, given=body)[0] == 200


def test_tokens_and_https(tmp_path: Path) -> None:
    authority = Authority(tmp_path, "public")
    issued = authority.issue("stack", "IP:127.0.0.1")
    (tmp_path / "tokens").write_text(TOKEN)
    settings = {"NANO_TLS_CERT": issued.cert, "NANO_TLS_KEY": issued.key}
    settings |= {"NANO_AUTH_TOKENS_FILE": str(tmp_path / "tokens")}
    with running_stack(settings, http_port="auto") as secure:
        url = f"{secure.stack.url}/v1/completions"
        trusting = ("--cacert", str(authority.ca), "--data", json.dumps(ASKED))
        assert curl(url, *trusting)[0] == 401
        for header in (f"Authorization: Bearer {TOKEN}", f"x-api-key: {TOKEN}"):
            assert curl(url, *trusting, "--header", header)[0] == 200
