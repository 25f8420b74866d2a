"""A stack as an HTTP client sees it: faults of each process, and the calls closed to it."""

from __future__ import annotations

import json
import select
import socket
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import httpx2
import pytest

from deploy.gateway import Admission, GatewaySettings, router_args
from deploy.native.processes import stop_processes
from deploy.ports import free_port
from tests.http.small import changed_gateway, half_sent, small_gateway
from tests.stack import DEMO_MODEL, WAIT_S, RealStack, running_stack
from tests.waiting import wait_for
from worker_svc.errors import ModelError

NAME = "acme/fox-1.5"  # of its model
PROMPT = "Once upon a time"
NUM_TOKENS = 1500


@pytest.fixture(scope="module")
def engine_address() -> str:
    """Where its frontend serves the engine protocol."""
    return f"127.0.0.1:{free_port()}"


@pytest.fixture(scope="module")
def stack(engine_address: str) -> Iterator[RealStack]:
    given = {"NANO_GATEWAY_ADDRESSES": engine_address, "NANO_HANG_TIMEOUT_S": "10"}
    with running_stack(given, http_port="auto", served_model_name=NAME) as running:
        yield running


@pytest.mark.parametrize("lines", ["", "# nobody\n", "a-token-of-sixteen name=acme\n"])
def test_a_tokens_file_without_tokens_does_not_let_everybody_in(tmp_path: Path, lines: str) -> None:
    tokens = tmp_path / "tokens"
    tokens.write_text(lines)
    settings = GatewaySettings(gateway_addresses=("127.0.0.1:1",), auth_tokens_file=str(tokens))
    keys = dict(Admission.read(settings).keys)
    assert keys.get("acme") == ("a-token-of-sixteen" if "acme" in lines else None)
    assert len(keys["nobody"]) == 64


def test_what_crosses_of_budgets(tmp_path: Path) -> None:
    tokens = tmp_path / "tokens"
    tokens.write_text(
        "a-token-of-sixteen name=both input_tokens_per_minute=7 output_tokens_per_minute=5\n"
        "b-token-of-sixteen name=one input_tokens_per_minute=7\n"
    )
    settings = GatewaySettings(gateway_addresses=("127.0.0.1:1",), auth_tokens_file=str(tokens))
    (tenant,) = Admission.read(settings).budgets["tenants"]
    assert (tenant["tenant_key"], tenant["tokens_per_minute"]) == ("auth:both", 12)


def test_parsers_are_those_of_the_models_family(tmp_path: Path) -> None:
    addresses = ("127.0.0.1:1",)
    settings = GatewaySettings(gateway_addresses=addresses, model=str(DEMO_MODEL))
    admission, budgets = Admission.read(settings), tmp_path / "budgets"
    args = router_args(settings, "127.0.0.1:1", admission, budgets)
    assert (args.reasoning_parser, args.tool_call_parser) == ("qwen3", "qwen")

    (tmp_path / "config.json").write_text('{"architectures": ["GPT2LMHeadModel"]}')
    other = GatewaySettings(gateway_addresses=addresses, model=str(tmp_path))
    with pytest.raises(ModelError, match="architectures: GPT2LMHeadModel is not served"):
        router_args(other, "127.0.0.1:1", admission, budgets)


def completion(**options: Any) -> dict[str, Any]:
    asked = {"model": NAME, "prompt": PROMPT, "max_tokens": NUM_TOKENS, "temperature": 0}
    return asked | {"ignore_eos": True} | options


@contextmanager
def streaming(url: str, **options: Any) -> Iterator[Iterator[str]]:
    """Yields the lines of a streamed completion of the gateway at `url`."""
    asked = completion(stream=True, **options)
    with httpx2.stream("POST", f"{url}/v1/completions", json=asked, timeout=100) as response:
        assert response.status_code == 200
        yield response.iter_lines()


def ask(stack: RealStack, method: str, path: str, value: object = None) -> httpx2.Response:
    return httpx2.request(method, stack.stack.url + path, json=value, timeout=100)


def complete(url: str, **options: Any) -> str:
    """A whole completion of the gateway at `url`."""
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


def read_some(stream: Iterator[str]) -> list[str]:
    lines: list[str] = []
    while sum(line.startswith("data: {") for line in lines) < 3:
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
    stack: RealStack, engine_address: str, expected: str
) -> None:
    change = "deploy.gateway._RETRIES = 100_000"  # the gateway tries until a frontend is there
    with changed_gateway(engine_address, change) as (_, address):
        url = f"http://{address}"
        with streaming(url) as stream:
            lines = read_some(stream)
            stack.kill("frontend", while_true=lambda: stack.load().running)
            lines += stream
        assert_broken_off(lines, expected)
        assert '"error"' in "".join(lines)  # in the stream: its status was sent long ago
        assert complete(url) == expected
    stack.wait_serving()


def test_a_lost_gateway_breaks_connections_and_is_back(stack: RealStack, expected: str) -> None:
    old = stack.pid("gateway")
    with streaming(stack.stack.url) as stream:
        lines = read_some(stream)
        stack.kill("gateway", while_true=lambda: stack.load().running)
        with suppress(httpx2.TransportError):
            lines += stream
    assert_broken_off(lines, expected)
    stack.wait_replaced("gateway", 0, old)
    stack.wait_serving()
    assert complete(stack.stack.url) == expected
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


def test_a_stopped_gateway_is_replaced(stack: RealStack) -> None:
    old = stack.stop("gateway")
    stack.wait_replaced("gateway", 0, old)
    stack.wait_serving()
    assert complete(stack.stack.url, max_tokens=1)


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
    assert ask(stack, method, path, {} if method == "POST" else None).status_code == 401


def test_the_gateway_keeps_nothing_that_callers_send(stack: RealStack) -> None:
    conversation = ask(stack, "POST", "/v1/conversations", {}).json()["id"]
    items = {"items": [{"type": "message", "role": "user", "content": "Hello!"}]}
    path = f"/v1/conversations/{conversation}/items"
    assert ask(stack, "POST", path, items).status_code == 404
    asked = {"model": NAME, "input": "Hello!", "max_output_tokens": 3, "store": True}
    response = ask(stack, "POST", "/v1/responses", asked).json()["id"]
    assert ask(stack, "GET", f"/v1/responses/{response}").status_code == 404
    follows = asked | {"previous_response_id": response}
    assert ask(stack, "POST", "/v1/responses", follows).status_code == 400


def test_no_work_outlives_its_connection(stack: RealStack) -> None:
    asked = {"model": NAME, "input": "Hello!", "max_output_tokens": 3, "background": True}
    answer = ask(stack, "POST", "/v1/responses", asked).json()
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
        asked = completion(stream=stream, **options)
        assert ask(stack, "POST", "/v1/completions", asked).status_code == code


def test_a_body_that_is_too_large_is_not_read(stack: RealStack) -> None:
    address = stack.stack.url.removeprefix("http://")
    with half_sent(address, length=5 << 20) as connection:
        assert connection.recv(100).startswith(b"HTTP/1.1 413 ")


def test_bodies_that_never_come_lose_their_places(stack: RealStack, engine_address: str) -> None:
    with small_gateway(engine_address, body_s=1) as address, ExitStack() as connections:
        stalled = [connections.enter_context(half_sent(address)) for _ in range(4)]
        url = f"http://{address}/v1/completions"
        response = httpx2.post(url, json=completion(max_tokens=1), timeout=100)
        assert response.status_code == 200
        for connection in stalled:
            assert connection.recv(100).startswith(b"HTTP/1.1 408 ")


_NEVER_ENDS = """
import threading
start = deploy.gateway.Router.start
deploy.gateway.Router.start = lambda self: (start(self), threading.Event().wait())
"""


def test_a_gateway_that_is_told_to_stop_ends_with_the_last_connection(
    stack: RealStack, engine_address: str
) -> None:
    """Without waiting for smg."""
    with changed_gateway(engine_address, _NEVER_ENDS) as (process, address):
        with streaming(f"http://{address}", max_tokens=300) as stream:
            process.terminate()
            assert [*stream][-2] == "data: [DONE]"
        assert process.wait(WAIT_S) == 0


def test_a_full_queue_is_429_and_no_engine_503() -> None:
    limits = {"max_num_seqs": 1, "max_waiting": 1}
    with running_stack(http_port="auto", served_model_name=NAME, **limits) as stack:
        url = stack.stack.url
        with streaming(url, n=16):  # one after another, beyond all of the gateway's retries
            assert ask(stack, "POST", "/v1/completions", completion()).status_code == 429
        stop_processes(stack.stack, ["scheduler-0"])
        assert ask(stack, "POST", "/v1/completions", completion()).status_code == 503


def test_no_more_than_a_hundred_wait_for_a_place(stack: RealStack, engine_address: str) -> None:
    with small_gateway(engine_address, body_s=100) as address, ExitStack() as connections:
        sent = [connections.enter_context(half_sent(address)) for _ in range(2 + 100 + 8)]

        def answered() -> list[socket.socket]:
            return select.select(sent, [], [], 0)[0]

        wait_for(lambda: len(answered()) >= 8, "those beyond to be answered")
        answers = [each.recv(100) for each in answered()]
    assert len(answers) == 8
    assert all(answer.startswith(b"HTTP/1.1 429 ") for answer in answers)
