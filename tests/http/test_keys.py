"""HTTP of a stack whose clients need tokens and TLS."""

from __future__ import annotations

import json
import ssl
from collections.abc import Iterator
from pathlib import Path
from threading import Event, Thread
from typing import Any

import httpx2
import pytest

from tests.certificates import Authority
from tests.http.test_clients import ends_of, names_of
from tests.stack import RealStack, running_stack
from tests.waiting import wait_for

ACME, WEB, ROTATED = "acme-token-0123456789", "web-token-0123456789", "new-token-0123456789"
LINES = [
    f"{ACME} name=acme cache=shared",
    f"{WEB} name=web input_tokens_per_minute=30 output_tokens_per_minute=10",
]


class Secure:
    """A stack with tokens and TLS, and its callers over HTTP."""

    def __init__(self, stack: RealStack, tokens: Path, authority: Authority) -> None:
        self.stack, self.tokens, self.authority = stack, tokens, authority
        self.url = stack.stack.url

    def write_tokens(self, lines: list[str]) -> None:
        unfinished = self.tokens.with_suffix(".new")
        unfinished.write_text("\n".join(lines) + "\n")
        unfinished.replace(self.tokens)

    def asked(self, token: str, **options: Any) -> dict[str, Any]:
        """Arguments of a request for a completion with these options, on a new connection."""
        return {
            "url": f"{self.url}/v1/completions",
            "json": {"model": "demo", "prompt": "Once upon a time", "ignore_eos": True} | options,
            "headers": {"authorization": f"Bearer {token}".rstrip()},
            "verify": ssl.create_default_context(cafile=self.authority.ca),
            "timeout": 100,
        }

    def status(self, token: str) -> int:
        """The status of a request with this token."""
        return httpx2.post(**self.asked(token, max_tokens=4)).status_code


@pytest.fixture(scope="module")
def secure(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Secure]:
    directory = tmp_path_factory.mktemp("keys")
    authority = Authority(directory, "public")
    shown = authority.issue("stack", "IP:127.0.0.1", "DNS:stack.example")
    tokens = directory / "tokens"
    tokens.write_text("\n".join(LINES))
    settings = {"auth_tokens_file": tokens, "tls_cert": shown.cert, "tls_key": shown.key}
    with running_stack(http_port="auto", frontends=2, **settings) as running:
        yield Secure(running, tokens, authority)


@pytest.mark.parametrize("name", names_of("keys_checks"))
def test_others_clients(secure: Secure, name: str) -> None:
    given = {"url": secure.url, "ca": secure.authority.ca, "keys": [ACME]}
    assert not (end := ends_of("keys_checks", json.dumps(given))[name]), end


def test_a_tenant_over_its_budget_is_told_so_and_others_go_on(secure: Secure) -> None:
    statuses = [secure.status(WEB) for _ in range(12)]
    assert statuses[0] == 200
    assert statuses[-1] == 429
    assert secure.status(ACME) == 200


def test_a_caller_is_the_tenant_of_its_token(secure: Secure) -> None:
    """No answer shows what the cache holds."""
    for _ in range(2):
        usage = httpx2.post(**secure.asked(ACME, max_tokens=1)).json()["usage"]
    assert not (usage.get("prompt_tokens_details") or {}).get("cached_tokens")
    frontends = [secure.stack.stack.log(f"frontend-{index}") for index in range(2)]
    lines = [line for log in frontends for line in log.read_text().splitlines()]
    assert any("client=acme " in line or '"client": "acme"' in line for line in lines)


def test_a_new_token_counts_soon_and_an_old_one_not_any_more(secure: Secure) -> None:
    """While a stream is open, which is served to its end."""
    streamed: list[int] = []
    begun = Event()

    def stream() -> None:
        asked = secure.asked(ACME, max_tokens=1500, stream=True)
        with httpx2.stream("POST", **asked) as response:
            for line in response.iter_lines():
                if line.startswith("data: {"):
                    begun.set()
                    streamed.append(len(json.loads(line[6:])["choices"]))

    reader = Thread(target=stream)
    reader.start()
    begun.wait(100)
    try:
        secure.write_tokens([LINES[0].replace(ACME, ROTATED), *LINES[1:]])
        wait_for(lambda: secure.status(ROTATED) == 200, "the new token to count")
        assert secure.status(ACME) == 401
    finally:
        reader.join()
    assert len(streamed) > 300
    secure.write_tokens(LINES)
    wait_for(lambda: secure.status(ACME) == 200, "the old token to count again")
    assert secure.status(ROTATED) == 401


def test_without_tokens_in_the_file_nobody_gets_in(secure: Secure) -> None:
    secure.write_tokens(["# nobody"])
    wait_for(lambda: secure.status(ACME) == 401, "the token to be gone")
    assert secure.status("") == 401
    secure.write_tokens(LINES)
    wait_for(lambda: secure.status(ACME) == 200, "the token to count again")
