"""A stack as an HTTP client sees it: faults of each process, and the calls closed to it."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from typing import Any

import httpx2
import pytest

from deploy.native.processes import stop_processes
from tests.stack import RealStack, running_stack

NAME = "acme/fox-1.5"  # of its model
PROMPT = "Once upon a time"
NUM_TOKENS = 1500


@pytest.fixture(scope="module")
def stack() -> Iterator[RealStack]:
    environment = {"NANO_HANG_TIMEOUT_S": "10"}
    with running_stack(environment, http_port="auto", served_model_name=NAME) as running:
        yield running


def completion(**options: Any) -> dict[str, Any]:
    asked = {"model": NAME, "prompt": PROMPT, "max_tokens": NUM_TOKENS, "temperature": 0}
    return asked | {"ignore_eos": True} | options


@contextmanager
def streaming(url: str, **options: Any) -> Iterator[Iterator[str]]:
    """Yields the lines of a streamed completion of the frontend at `url`."""
    asked = completion(stream=True, **options)
    with httpx2.stream("POST", f"{url}/v1/completions", json=asked, timeout=100) as response:
        assert response.status_code == 200
        yield response.iter_lines()


def ask(stack: RealStack, method: str, path: str, value: object = None) -> httpx2.Response:
    return httpx2.request(method, stack.stack.url + path, json=value, timeout=100)


def complete(url: str, **options: Any) -> str:
    """A whole completion of the frontend at `url`."""
    response = httpx2.post(f"{url}/v1/completions", json=completion(**options), timeout=100)
    return str(response.raise_for_status().json()["choices"][0]["text"])


def texts(lines: list[str]) -> str:
    """The text in server-sent events, up to where they end or break off."""
    found = ""
    for line in lines:
        if line.startswith("data: {"):
            event = json.loads(line[6:])
            found += "".join(choice.get("text", "") for choice in event.get("choices", ()))
    return found


def read_some(stream: Iterator[str], events: int = 3) -> list[str]:
    lines: list[str] = []
    while sum(line.startswith("data: {") for line in lines) < events:
        lines.append(next(stream))
    return lines


def assert_broken_off(lines: list[str], expected: str) -> None:
    text = texts(lines)
    assert len(text) < len(expected)
    assert expected.startswith(text)


@pytest.fixture(scope="module")
def expected(stack: RealStack) -> str:
    return complete(stack.stack.url)


@pytest.mark.parametrize("service", ["worker", "scheduler"])
def test_to_lose_a_part_of_the_engine_is_a_pause(
    stack: RealStack, expected: str, service: str
) -> None:
    with streaming(stack.stack.url) as stream:
        lines = read_some(stream)
        stack.kill(service)
        lines += stream
    assert texts(lines) == expected
    assert lines[-2] == "data: [DONE]"
    stack.wait_serving()


def test_a_lost_frontend_breaks_streams_off_and_the_next_request_works(
    stack: RealStack, expected: str
) -> None:
    old = stack.pid("frontend")
    with stack.hold.after(20), streaming(stack.stack.url) as stream:
        lines = read_some(stream, 1)
        stack.kill("frontend")
        stack.hold.release()
        with suppress(httpx2.TransportError):
            lines += stream
    assert_broken_off(lines, expected)
    # The connection waits until the next fork listens.
    assert complete(stack.stack.url) == expected
    stack.wait_replaced("frontend", 0, old)
    stack.wait_serving()
    # What the broken connections asked for is not computed on.
    stack.wait_idle()


def test_a_client_that_goes_away_is_dropped_by_the_engine(stack: RealStack) -> None:
    with streaming(stack.stack.url, n=4) as stream:
        read_some(stream)
    before = stack.wait_idle()
    assert before.sampled_tokens
    with streaming(stack.stack.url, n=4) as stream:
        read_some(stream)
    after = stack.wait_idle()
    assert after.sampled_tokens - before.sampled_tokens < 4 * NUM_TOKENS


def test_a_frontend_that_hangs_is_replaced(stack: RealStack) -> None:
    old = stack.stop("frontend")
    stack.wait_replaced("frontend", 0, old)
    stack.wait_serving()
    assert complete(stack.stack.url, max_tokens=1)


def test_a_frontend_that_is_told_to_stop_ends_its_streams_first(stack: RealStack) -> None:
    old = stack.pid("frontend")
    with streaming(stack.stack.url, max_tokens=300) as stream:
        stack.terminate("frontend")
        assert [*stream][-2] == "data: [DONE]"
    stack.wait_replaced("frontend", 0, old)
    stack.wait_serving()


@pytest.mark.parametrize("path", ["/workers", "/flush_cache", "/start_profile", "/metrics"])
def test_nobody_controls_the_stack_over_http(stack: RealStack, path: str) -> None:
    for method in ("GET", "POST"):
        assert ask(stack, method, path, {} if method == "POST" else None).status_code == 404


@pytest.mark.parametrize(
    ("options", "code"),
    [
        ({"max_tokens": 100_000}, 400),
        ({"prompt": "word " * 5000}, 400),
        ({"regex": "(a"}, 400),
        ({"model": "other"}, 404),
    ],
    ids=["max_tokens", "prompt", "regex", "model"],
)
def test_what_cannot_be_done_is_refused_at_once(
    stack: RealStack, options: dict[str, Any], code: int
) -> None:
    for stream in (False, True):
        asked = completion(stream=stream, **options)
        assert ask(stack, "POST", "/v1/completions", asked).status_code == code


def half_sent(address: str, host: str = "localhost", length: int = 1000) -> socket.socket:
    """The connection of a request of which only the first byte of the body comes."""
    name, _, port = address.partition(":")
    connection = socket.create_connection((name, int(port)), timeout=100)
    head = f"POST /v1/completions HTTP/1.1\r\nhost: {host}\r\ncontent-length: {length}\r\n"
    connection.sendall(f"{head}content-type: application/json\r\n\r\n{{".encode())
    return connection


def test_a_body_that_is_too_large_is_not_read(stack: RealStack) -> None:
    address = stack.stack.url.removeprefix("http://")
    with half_sent(address, length=5 << 20) as connection:
        assert connection.recv(100).startswith(b"HTTP/1.1 413 ")


def test_bodies_that_never_come_time_out_and_take_no_place(stack: RealStack) -> None:
    address = stack.stack.url.removeprefix("http://")
    with ExitStack() as connections:
        stalled = [connections.enter_context(half_sent(address)) for _ in range(4)]
        assert complete(stack.stack.url, max_tokens=1)
        for connection in stalled:
            assert connection.recv(100).startswith(b"HTTP/1.1 408 ")


def test_a_full_queue_is_429_and_no_engine_503() -> None:
    limits = {"max_num_seqs": 1, "max_waiting": 1}
    with running_stack(http_port="auto", served_model_name=NAME, **limits) as stack:
        url = stack.stack.url
        with streaming(url, n=16):  # one after another
            assert ask(stack, "POST", "/v1/completions", completion()).status_code == 429
        stop_processes(stack.stack, ["scheduler-0"])
        assert ask(stack, "POST", "/v1/completions", completion()).status_code == 503
