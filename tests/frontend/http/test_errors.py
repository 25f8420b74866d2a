"""Errors other than wrong values have the right status and form, and show no internals."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest

from frontend.generation import Generation
from frontend.settings import FrontendSettings
from shared.pb import scheduler_pb2 as scheduler
from tests.frontend.fake_scheduler import FakeScheduler
from tests.frontend.http.conftest import POSTS, HttpService, Json, parse_events, served
from tests.stack import DEMO_MODEL

CHAT, TEXT, RESPONSES, ANTHROPIC = POSTS
FULL = scheduler.Finished(
    cause=scheduler.FINISH_CAUSE_QUEUE_FULL, message="no room", retry_after_s=2.5
)
LOST = scheduler.Finished(cause=scheduler.FINISH_CAUSE_INTERNAL, message="a secret of the engine")


def check_form(path: str, body: Json, kind: str, anthropic: str) -> str:
    """Asserts that an error has its API's form. Returns its message."""
    if path.startswith(ANTHROPIC):
        assert body == {
            "type": "error",
            "error": {"type": anthropic, "message": body["error"]["message"]},
        }
    else:
        assert body.keys() == {"error"}
        assert body["error"].keys() == {"message", "type", "param", "code"}
        assert body["error"]["type"] == kind
    message: str = body["error"]["message"]
    return message


@pytest.mark.parametrize("path", POSTS)
async def test_another_model_is_not_found(service: HttpService, path: str) -> None:
    status, body = await service.error(path, {**POSTS[path], "model": "other"})
    assert status == 404
    assert "'other' is not served" in check_form(path, body, "not_found_error", "not_found_error")
    if path != ANTHROPIC:
        assert (body["error"]["code"], body["error"]["param"]) == ("model_not_found", "model")


async def test_the_model_is_listed(service: HttpService) -> None:
    (card,) = (await service.http.get("/v1/models")).json()["data"]
    assert (card["id"], card["object"], card["max_model_len"]) == ("demo", "model", 128)
    # The same on all frontends, so not the time of a process.
    assert card["created"] == int((DEMO_MODEL / "config.json").stat().st_mtime)
    assert (await service.http.get("/v1/models/demo")).json() == card
    response = await service.http.get("/v1/models/a/b")
    assert response.status_code == 404
    assert "'a/b'" in response.json()["error"]["message"]


@pytest.mark.parametrize("path", ["/", "/v1", "/v1/nothing", "/v1/chat/completions/", "/metrics"])
async def test_an_unknown_path_is_not_found(service: HttpService, path: str) -> None:
    status, body = await service.error(path, {})
    assert status == 404
    check_form(path, body, "not_found_error", "")


@pytest.mark.parametrize("path", POSTS)
async def test_a_path_names_its_methods(service: HttpService, path: str) -> None:
    for method in ("GET", "PUT", "DELETE"):
        response = await service.http.request(method, path)
        assert response.status_code == 405
        assert response.headers["allow"] == "POST"
        message = check_form(
            path, response.json(), "invalid_request_error", "invalid_request_error"
        )
        assert message == f"method: {method} is not served; use POST"
    assert (await service.http.post("/v1/models")).status_code == 405


@pytest.mark.parametrize("changes", [{"max_message_bytes": 1000}])
@pytest.mark.parametrize("path", POSTS)
@pytest.mark.parametrize("chunked", [False, True])
async def test_a_body_has_a_limit(service: HttpService, path: str, chunked: bool) -> None:
    async def parts() -> AsyncIterator[bytes]:
        for _ in range(11):
            yield b" " * 100

    content: Any = parts() if chunked else b" " * 1001
    response = await service.http.post(path, content=content)
    assert response.status_code == 413
    assert response.headers["connection"] == "close"
    kinds = "invalid_request_error", "request_too_large"
    assert check_form(path, response.json(), *kinds) == "body: more than 1000 bytes"
    assert await service.post(path, POSTS[path])


async def test_a_head_has_a_limit(service: HttpService) -> None:
    status, body = await service.error(TEXT, POSTS[TEXT], **{"x-long": "x" * (16 << 10)})
    assert status == 431
    check_form(TEXT, body, "invalid_request_error", "")
    assert await service.post(TEXT, POSTS[TEXT], **{"x-long": "x" * (15 << 10)})


@pytest.mark.parametrize("path", POSTS)
@pytest.mark.parametrize("stream", [False, True])
async def test_a_full_engine_says_when_to_retry_and_a_failed_one_gives_no_reason(
    service: HttpService, path: str, stream: bool
) -> None:
    for rejection, status, retry_after, message, *kinds in (
        (FULL, 429, "3", "no room", "rate_limit_error", "rate_limit_error"),
        (LOST, 500, None, "internal error", "server_error", "api_error"),
    ):
        service.scheduler.rejection = rejection
        response = await service.http.post(path, json={**POSTS[path], "stream": stream})
        assert response.status_code == status
        assert response.headers.get("retry-after") == retry_after
        assert check_form(path, response.json(), *kinds) == message


@pytest.mark.parametrize("path", POSTS)
async def test_an_error_within_a_stream_is_its_last_event(service: HttpService, path: str) -> None:
    async with service.opened(path, POSTS[path]) as lines:
        await service.step()
        assert await lines.next()
        failure = scheduler.Finished(request=lines.number)
        failure.MergeFrom(FULL)
        service.scheduler.send((), [failure])
        events = await lines.rest()
    check_last(path, events, "no room", "rate_limit_error")


def check_last(path: str, events: list[Any], message: str, kind: str) -> None:
    """Asserts that a stream ends with an error."""
    if path == RESPONSES:
        assert events[-1]["type"] == "response.failed"
        assert events[-1]["response"]["status"] == "failed"
        assert events[-1]["response"]["error"]["message"] == message
        return
    if path == ANTHROPIC:
        assert events[-1] == {"type": "error", "error": {"type": kind, "message": message}}
        return
    assert events.pop() == "[DONE]"
    assert events[-1]["error"]["message"] == message
    assert events[-1]["error"]["type"] == kind.replace("overloaded", "server")


async def test_a_failed_prompt_ends_the_request_of_several(service: HttpService) -> None:
    body = {"prompt": ["a", "b", "c"], "max_tokens": 3}
    service.scheduler.automatic = False
    sending = asyncio.create_task(service.http.post(TEXT, json=body))
    first, second, third = [(await service.scheduler.submits.get()).request for _ in range(3)]
    failure = scheduler.Finished(request=second)
    failure.MergeFrom(FULL)
    service.scheduler.send((), [failure])
    assert (await sending).status_code == 429
    assert {await service.scheduler.aborts.get() for _ in range(2)} == {first, third}


async def test_prompts_that_all_fail_are_one_error(service: HttpService, caplog: Any) -> None:
    service.scheduler.rejection = FULL
    assert (await service.error(TEXT, {"prompt": ["a", "b", "c"]}))[0] == 429
    assert not caplog.records


BROKEN = "/secret/path.py"


@pytest.mark.parametrize("path", POSTS)
@pytest.mark.parametrize("stream", [False, True])
async def test_a_bug_shows_no_traceback(
    service: HttpService, path: str, stream: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(self: Generation) -> Any:
        raise RuntimeError(BROKEN)

    monkeypatch.setattr(Generation, "next_deltas", fail)
    response = await service.http.post(path, json={**POSTS[path], "stream": stream})
    assert response.status_code == 500
    assert check_form(path, response.json(), "server_error", "api_error") == "internal error"
    monkeypatch.undo()
    assert await service.post(path, POSTS[path])


@pytest.mark.parametrize("path", POSTS)
async def test_a_bug_within_a_stream_shows_no_traceback(
    service: HttpService, path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    next_deltas = Generation.next_deltas

    async def fail_later(self: Generation) -> Any:
        if self.totals().completion_tokens:
            raise RuntimeError(BROKEN)
        return await next_deltas(self)

    monkeypatch.setattr(Generation, "next_deltas", fail_later)
    async with service.opened(path, POSTS[path]) as lines:
        await service.step()
        assert await lines.next()
        events = await lines.rest()
        number = lines.number
    assert BROKEN not in str(events)
    assert "internal error" in str(events)
    assert await service.scheduler.aborts.get() == number


async def test_health_follows_the_engine(
    scheduler: FakeScheduler, settings: FrontendSettings
) -> None:
    scheduler.ready.clear()
    async with served(settings, scheduler) as service:

        async def statuses() -> list[int]:
            paths = ("/health", "/readiness", "/liveness")
            return [(await service.http.get(path)).status_code for path in paths]

        await scheduler.connected.wait()
        assert await statuses() == [503, 503, 200]
        for path in POSTS:
            status, body = await service.error(path, POSTS[path])
            assert status == 503
            check_form(path, body, "server_error", "overloaded_error")
        assert (await service.http.get("/v1/models")).json()["data"][0]["max_model_len"] is None
        scheduler.ready.set()
        await service.wait_for_health(True)
        assert await statuses() == [200, 200, 200]


async def test_the_form_of_events_is_the_same_for_all_lines(service: HttpService) -> None:
    """No event holds a raw line break, whatever the text."""
    response = await service.http.post(
        TEXT, json={"prompt": "a\r\nb\n\nc\u2028d", "max_tokens": 20, "stream": True}
    )
    events = parse_events(response.text)
    text = "".join(event["choices"][0]["text"] for event in events[:-1])
    assert text.startswith("a\r\nb\n\nc\u2028d")
    assert response.headers["cache-control"] == "no-cache"
    assert response.headers["x-accel-buffering"] == "no"
