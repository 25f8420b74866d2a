"""A stack as an HTTP client sees it: faults of each process, and the calls closed to it."""

from __future__ import annotations

import http.client
import json
import select
import socket
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any
from urllib.error import HTTPError
from urllib.parse import urlsplit
from urllib.request import Request, urlopen

import pytest

from deploy.gateway import Admission, GatewaySettings, router_args
from deploy.ports import free_port
from deploy.supervisor import stop_process
from tests.http.small import changed_gateway, half_sent, small_gateway
from tests.stack import DEMO_MODEL, WAIT_S, RealStack, running_stack
from tests.waiting import wait_for
from worker_svc.errors import ModelError

NAME = "acme/fox-1.5"  # of its model
PROMPT = "Once upon a time"
NUM_TOKENS = 1500


@pytest.fixture(scope="module")
def door() -> str:
    """Where its frontend serves the engine protocol."""
    return f"127.0.0.1:{free_port()}"


@pytest.fixture(scope="module")
def stack(door: str) -> Iterator[RealStack]:
    given = {"NANO_ENGINE_ADDRESSES": door}
    with running_stack(given, http_port="auto", served_model_name=NAME) as running:
        yield running


@pytest.mark.parametrize("lines", ["", "# nobody\n", "a-token-of-sixteen name=acme\n"])
def test_a_tokens_file_without_tokens_does_not_let_everybody_in(tmp_path: Path, lines: str) -> None:
    tokens = tmp_path / "tokens"
    tokens.write_text(lines)
    settings = GatewaySettings(engine_addresses=("127.0.0.1:1",), auth_tokens_file=str(tokens))
    keys = dict(Admission.read(settings).keys)
    assert keys.get("acme") == ("a-token-of-sixteen" if "acme" in lines else None)
    assert len(keys["nobody"]) == 64


def test_what_crosses_of_budgets(tmp_path: Path) -> None:
    tokens = tmp_path / "tokens"
    tokens.write_text(
        "a-token-of-sixteen name=both input_tokens_per_minute=7 output_tokens_per_minute=5\n"
        "b-token-of-sixteen name=one input_tokens_per_minute=7\n"
    )
    settings = GatewaySettings(engine_addresses=("127.0.0.1:1",), auth_tokens_file=str(tokens))
    (tenant,) = Admission.read(settings).budgets["tenants"]
    assert (tenant["tenant_key"], tenant["tokens_per_minute"]) == ("auth:both", 12)


def test_parsers_are_those_of_the_models_family(tmp_path: Path) -> None:
    addresses = ("127.0.0.1:1",)
    settings = GatewaySettings(engine_addresses=addresses, model=str(DEMO_MODEL))
    admission, budgets = Admission.read(settings), tmp_path / "budgets"
    args = router_args(settings, 1, admission, budgets)
    assert (args.reasoning_parser, args.tool_call_parser) == ("qwen3", "qwen")

    (tmp_path / "config.json").write_text('{"architectures": ["GPT2LMHeadModel"]}')
    other = GatewaySettings(engine_addresses=addresses, model=str(tmp_path))
    with pytest.raises(ModelError, match="architectures: GPT2LMHeadModel is not served"):
        router_args(other, 1, admission, budgets)


@contextmanager
def streaming(stack: RealStack, **options: Any) -> Iterator[http.client.HTTPResponse]:
    """A streamed completion, from its first line on."""
    url = urlsplit(stack.stack.url)
    connection = http.client.HTTPConnection(str(url.hostname), url.port, timeout=100)
    connection.request("POST", "/v1/completions", body(stream=True, **options), HEADERS)
    response = connection.getresponse()
    try:
        assert response.status == 200
        yield response
    finally:
        response.close()
        connection.close()


HEADERS = {"content-type": "application/json"}


def body(**options: Any) -> str:
    asked = {"model": NAME, "prompt": PROMPT, "max_tokens": NUM_TOKENS, "temperature": 0}
    return json.dumps(asked | {"ignore_eos": True} | options)


def complete(stack: RealStack, **options: Any) -> str:
    """A whole completion."""
    request = Request(f"{stack.stack.url}/v1/completions", body(**options).encode(), HEADERS)
    with urlopen(request, timeout=100) as response:
        text: str = json.load(response)["choices"][0]["text"]
    return text


def post(stack: RealStack, path: str, value: object) -> dict[str, Any]:
    request = Request(stack.stack.url + path, json.dumps(value).encode(), HEADERS)
    with urlopen(request, timeout=100) as response:
        answer: dict[str, Any] = json.load(response)
    return answer


def status(stack: RealStack, method: str, path: str, data: str | None = None) -> int:
    encoded = data.encode() if data else None
    request = Request(stack.stack.url + path, encoded, HEADERS, method=method)
    try:
        with urlopen(request, timeout=100) as response:
            code: int = response.status
            return code
    except HTTPError as error:
        return error.code


def texts(lines: list[bytes]) -> str:
    """The text in server-sent events, up to where they end or break off."""
    found = ""
    for line in lines:
        if line.startswith(b"data: {"):
            event = json.loads(line[6:])
            found += "".join(choice.get("text", "") for choice in event.get("choices", ()))
    return found


def read_some(response: http.client.HTTPResponse) -> list[bytes]:
    lines: list[bytes] = []
    while sum(line.startswith(b"data: {") for line in lines) < 3:
        lines.append(response.readline())
    return lines


def assert_broken_off(lines: list[bytes], expected: str) -> None:
    text = texts(lines)
    assert len(text) < len(expected)
    assert expected.startswith(text)


@pytest.fixture(scope="module")
def expected(stack: RealStack) -> str:
    return complete(stack)


@pytest.mark.parametrize("service", ["worker", "scheduler"])
def test_to_lose_a_part_of_the_engine_is_a_pause(
    stack: RealStack, expected: str, service: str
) -> None:
    with streaming(stack) as response:
        lines = read_some(response)
        stack.kill(service)
        lines += response.readlines()
    assert texts(lines) == expected
    assert lines[-2].strip() == b"data: [DONE]"
    stack.wait_serving()


def test_a_lost_frontend_breaks_streams_off_and_the_next_request_works(
    stack: RealStack, expected: str
) -> None:
    with streaming(stack) as response:
        lines = read_some(response)
        stack.kill("frontend", while_true=lambda: stack.load().running)
        lines += response.readlines()
    assert_broken_off(lines, expected)
    assert b'"error"' in b"".join(lines)  # told in the stream, whose status was sent long ago
    assert complete(stack) == expected  # the gateway tries again until a frontend is there
    stack.wait_serving()


def test_a_lost_gateway_breaks_connections_and_is_back(stack: RealStack, expected: str) -> None:
    old = stack.pid("gateway")
    with streaming(stack) as response:
        lines = read_some(response)
        stack.kill("gateway", while_true=lambda: stack.load().running)
        with suppress(ConnectionError):
            lines += response.readlines()
    assert_broken_off(lines, expected)
    stack.wait_replaced("gateway", 0, old)
    stack.wait_serving()
    assert complete(stack) == expected
    # What the broken connections asked for is not computed on.
    stack.wait_idle()


def test_a_client_that_goes_away_is_dropped_by_the_engine(stack: RealStack) -> None:
    with streaming(stack, n=4) as response:
        read_some(response)
    before = stack.wait_idle()
    assert before.sampled_tokens
    with streaming(stack, n=4) as response:
        read_some(response)
    after = stack.wait_idle()
    assert after.sampled_tokens - before.sampled_tokens < 4 * NUM_TOKENS


def test_a_stopped_gateway_is_replaced(stack: RealStack) -> None:
    old = stack.stop("gateway")
    stack.wait_replaced("gateway", 0, old)
    stack.wait_serving()
    assert complete(stack, max_tokens=1)


@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("GET", "/workers"),
        ("POST", "/workers"),
        ("POST", "/flush_cache"),
        ("POST", "/start_profile"),
        ("POST", "/wasm"),
        ("POST", "/v1/tokenizers"),
        ("GET", "/get_loads"),
    ],
)
def test_nobody_controls_the_gateway_over_http(stack: RealStack, method: str, path: str) -> None:
    assert status(stack, method, path, "{}" if method == "POST" else None) == 401


def test_the_gateway_keeps_nothing_that_callers_send(stack: RealStack) -> None:
    conversation = f"/v1/conversations/{post(stack, '/v1/conversations', {})['id']}"
    items = {"items": [{"type": "message", "role": "user", "content": "Hello!"}]}
    assert status(stack, "POST", f"{conversation}/items", json.dumps(items)) == 404
    asked = {"model": NAME, "input": "Hello!", "max_output_tokens": 3, "store": True}
    response = post(stack, "/v1/responses", asked)["id"]
    assert status(stack, "GET", f"/v1/responses/{response}") == 404
    follows = json.dumps(asked | {"previous_response_id": response})
    assert status(stack, "POST", "/v1/responses", follows) == 400


def test_no_work_outlives_its_connection(stack: RealStack) -> None:
    asked = {"model": NAME, "input": "Hello!", "max_output_tokens": 3, "background": True}
    answer = post(stack, "/v1/responses", asked)
    assert not answer["background"]
    assert answer["output"]


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
        assert status(stack, "POST", "/v1/completions", body(stream=stream, **options)) == code


def test_a_body_that_is_too_large_is_not_read(stack: RealStack) -> None:
    url = urlsplit(stack.stack.url)
    connection = http.client.HTTPConnection(str(url.hostname), url.port, timeout=100)
    connection.putrequest("POST", "/v1/completions")
    for name, value in (HEADERS | {"content-length": str(5 << 20)}).items():
        connection.putheader(name, value)
    connection.endheaders()
    assert connection.getresponse().status == 413
    connection.close()


@pytest.fixture
def brief_gateway(stack: RealStack, door: str) -> Iterator[str]:
    """Gives a body a second."""
    with small_gateway(door, body_s=1) as address:
        yield address


def test_bodies_that_never_come_lose_their_places(brief_gateway: str) -> None:
    with ExitStack() as connections:
        stalled = [connections.enter_context(half_sent(brief_gateway)) for _ in range(4)]
        data = body(max_tokens=1).encode()
        request = Request(f"http://{brief_gateway}/v1/completions", data, HEADERS)
        with urlopen(request, timeout=100) as response:
            assert response.status == 200
        for connection in stalled:
            assert connection.recv(100).startswith(b"HTTP/1.1 408 ")


_NEVER_ENDS = """
import threading
start = deploy.gateway.Router.start
deploy.gateway.Router.start = lambda self: (start(self), threading.Event().wait())
"""


def test_a_gateway_that_is_told_to_stop_ends_with_the_last_connection(
    stack: RealStack, door: str
) -> None:
    """Without waiting for smg."""
    with changed_gateway(door, _NEVER_ENDS) as (process, address):
        url = urlsplit(f"http://{address}")
        connection = http.client.HTTPConnection(str(url.hostname), url.port, timeout=100)
        connection.request("POST", "/v1/completions", body(stream=True, max_tokens=300), HEADERS)
        response = connection.getresponse()
        process.terminate()
        lines = response.readlines()
        assert lines[-2].strip() == b"data: [DONE]"
        response.close()
        connection.close()
        assert process.wait(WAIT_S) == 0


def test_a_full_queue_is_429_and_no_engine_503() -> None:
    limits = {"max_num_seqs": 1, "max_waiting": 1}
    with running_stack(http_port="auto", served_model_name=NAME, **limits) as stack:
        with streaming(stack, n=16):  # one after another, beyond all of the gateway's retries
            assert status(stack, "POST", "/v1/completions", body()) == 429
        stop_process(stack.directory, next(p for p in stack.processes() if p.name == "scheduler-0"))
        assert status(stack, "POST", "/v1/completions", body()) == 503


def test_no_more_than_a_hundred_wait_for_a_place(stack: RealStack, door: str) -> None:
    with small_gateway(door, body_s=100) as address, ExitStack() as connections:
        sent = [connections.enter_context(half_sent(address)) for _ in range(2 + 100 + 8)]

        def answered() -> list[socket.socket]:
            return select.select(sent, [], [], 0)[0]

        wait_for(lambda: len(answered()) >= 8, "those beyond to be answered")
        answers = [each.recv(100) for each in answered()]
    assert len(answers) == 8
    assert all(answer.startswith(b"HTTP/1.1 429 ") for answer in answers)
