"""The dashboard over HTTP: rejected callers, limits of answers, a chat that streams and stops."""

from __future__ import annotations

import asyncio
import json
import re
import socket
from contextlib import ExitStack
from pathlib import Path

import pytest
from starlette.exceptions import HTTPException
from starlette.requests import Request

from deploy.dashboard import app
from tests.waiting import wait_for

from .conftest import Dashboard, running_dashboard

JSON = {"content-type": "application/json"}
HELLO = json.dumps({"messages": [{"role": "user", "content": "abc"}]}).encode()


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({"host": "evil.example"}, 400),  # whose name has been pointed here
        ({"host": "127.0.0.1.evil.example:8080"}, 400),
        ({"host": ""}, 400),
        ({"origin": "http://evil.example"}, 403),
        ({"origin": "null"}, 403),
        ({"origin": "http://127.0.0.1:3000"}, 403),  # another program's page on this host
        ({"origin": "https://localhost:9", "host": "localhost:9"}, 403),
        ({"sec-fetch-site": "cross-site", "sec-fetch-mode": "no-cors"}, 403),
        ({"sec-fetch-site": "same-site", "sec-fetch-mode": "cors"}, 403),
        ({"sec-fetch-site": "cross-site", "sec-fetch-mode": "navigate"}, 200),  # a link
        ({"origin": "http://localhost:9", "host": "localhost:9"}, 200),  # through a tunnel
        ({"origin": "http://[::1]:9", "host": "[::1]:9"}, 200),
    ],
)
def test_only_the_dashboard_itself_may_send_requests(
    dashboard: Dashboard, headers: dict[str, str], status: int
) -> None:
    for path, body in (("/", None), ("/static/dashboard.js", None), ("/chat", HELLO)):
        with dashboard.ask(path, JSON | headers, body) as answer:
            assert answer.status_code == status
            answer.read()
    assert len(dashboard.frontend.service.requests) == (status == 200)


@pytest.mark.parametrize(
    ("path", "headers"),
    [
        ("/", {}),
        ("/static/dashboard.js", {}),
        ("/nothing", {}),
        ("/", {"host": "evil.example"}),
        ("/", {"origin": "http://evil.example"}),
    ],
)
def test_every_response_restricts_the_dashboard(
    dashboard: Dashboard, path: str, headers: dict[str, str]
) -> None:
    with dashboard.ask(path, headers) as answer:
        said = answer.headers
    policy = said["content-security-policy"]
    assert policy.startswith("default-src 'none'; script-src 'self';")
    assert "frame-ancestors 'none'" in policy
    assert "unsafe" not in policy
    assert said["x-frame-options"] == "DENY"
    assert said["x-content-type-options"] == "nosniff"
    assert said["cross-origin-resource-policy"] == "same-origin"
    assert said["referrer-policy"] == "no-referrer"


def test_the_dashboard_loads_nothing_from_elsewhere(dashboard: Dashboard) -> None:
    unread, needed = ["/"], {"/"}
    while unread:
        with dashboard.ask(unread.pop()) as answer:
            assert answer.status_code == 200
            found = set(re.findall(r'(?:href=|src=|from )"([^"]*)"', answer.read().decode()))
        unread += found - needed
        needed |= found
    assert len(needed) == 9


def chat(dashboard: Dashboard, body: bytes) -> list[dict[str, object]]:
    with dashboard.ask("/chat", JSON, body) as answer:
        assert answer.headers["content-type"].startswith("text/event-stream")
        events = answer.read().split(b"\n\n")[:-1]
    return [json.loads(each.removeprefix(b"data: ")) for each in events]


def test_a_chat_streams_over_a_frontend_that_goes_away(dashboard: Dashboard) -> None:
    dashboard.frontend.service.cuts.extend([3])
    answer = chat(dashboard, HELLO)
    assert "".join(str(each["text"]) for each in answer) == "bcdbcdbc"
    assert answer[-1]["finish_reason"] == "length"
    first, second = dashboard.frontend.service.requests
    assert [each.content for each in first.chat.messages] == ["abc"]
    assert len(second.resume_token_ids) == 3


def test_an_error_ends_the_answer(dashboard: Dashboard) -> None:
    long = {"messages": [{"role": "user", "content": "a" * 300}]}
    (error,) = chat(dashboard, json.dumps(long).encode())
    assert error == {"error": "sampling.max_tokens: 300 + 8 exceed 200"}


def test_a_disconnect_cancels_the_request(stuck_dashboard: Dashboard) -> None:
    with stuck_dashboard.ask("/chat", JSON, HELLO):
        wait_for(lambda: stuck_dashboard.frontend.service.in_flight, "the request")
    assert stuck_dashboard.frontend.service.cancelled.wait(60)


@pytest.mark.parametrize(
    ("headers", "body", "status", "message"),
    [
        ({"content-type": "text/plain"}, HELLO, 415, "content-type: must be application/json"),
        (JSON, b"{", 400, "body: Invalid JSON"),
        (JSON, b"{}", 400, "messages: Field required"),
        (JSON, b'{"messages": []}', 400, "messages: List should have at least 1 item"),
        (JSON, b'{"messages": [{"role": "user"}]}', 400, "messages.0.content: Field required"),
        (JSON, HELLO[:-1] + b', "n": 99}', 400, "n: Extra inputs are not permitted"),
        (JSON, b" " * (1 << 20) + HELLO, 413, "body: more than 1048576 bytes"),
    ],
)
def test_a_bad_request_is_rejected_with_its_field(
    dashboard: Dashboard, headers: dict[str, str], body: bytes, status: int, message: str
) -> None:
    with dashboard.ask("/chat", headers, body) as answer:
        assert answer.status_code == status
        assert answer.read().decode().startswith(message)
    assert not dashboard.frontend.service.requests


@pytest.mark.parametrize(("path", "limit"), [("/chat", 8), ("/events", 16)])
def test_open_streams_are_limited(stuck_dashboard: Dashboard, path: str, limit: int) -> None:
    headers, body = (JSON, HELLO) if path == "/chat" else ({}, None)
    with ExitStack() as streams:
        for _ in range(limit):
            streams.enter_context(stuck_dashboard.ask(path, headers, body))
        refused = streams.enter_context(stuck_dashboard.ask(path, headers, body))
        assert refused.status_code == 503
        assert refused.read().decode().startswith(f"{limit} ")

    def accepted() -> bool:
        with stuck_dashboard.ask(path, headers, body) as answer:
            return answer.status_code == 200

    wait_for(accepted, "a place")


def test_no_chat_if_clients_need_tokens(tmp_path: Path) -> None:
    tokens = tmp_path / "tokens"
    tokens.write_text("k3J9sT0vX2mQp7Rz\n")
    with running_dashboard(tmp_path, auth_tokens_file=str(tokens)) as dashboard:
        with dashboard.ask("/chat", JSON, HELLO) as answer:
            assert answer.status_code == 403
            reason = answer.read().decode()
        assert "need a token" in reason
        with dashboard.ask("/events") as events:
            state = json.loads(next(events.iter_lines()).removeprefix("data: "))
        assert state["chat_disabled"] == reason
        assert not dashboard.frontend.service.requests


def test_open_connections_are_limited(dashboard: Dashboard) -> None:
    host, _, port = dashboard.host.partition(":")

    def status() -> int:
        with dashboard.ask("/static/dashboard.js") as answer:
            answer.read()
            return answer.status_code

    with ExitStack() as connections:
        for _ in range(64):
            connections.enter_context(socket.create_connection((host, int(port)), timeout=30))
        assert status() == 503
    wait_for(lambda: status() == 200, "a place")


async def test_a_slow_body_is_rejected(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(app, "_BODY_S", 0.01)
    scope = {"type": "http", "method": "POST", "headers": [(b"content-type", b"application/json")]}
    with pytest.raises(HTTPException) as refused:
        await app._read(Request(scope, asyncio.Event().wait))  # type: ignore[arg-type]
    assert refused.value.status_code == 408
