"""The frontend in this process, over gRPC and HTTP, with a fake scheduler behind it."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import httpx2
import pytest
from grpc import aio

from deploy.ports import free_port
from frontend.metrics import RequestMetrics
from frontend.service import Frontend
from frontend.settings import FrontendSettings
from nano_vllm_grpc.pb import frontend_pb2 as pb
from nano_vllm_grpc.pb.frontend_pb2_grpc import InferenceServiceStub
from shared.process.ports import SharedListener, held_ports
from tests.frontend.conftest import Service
from tests.frontend.fake_scheduler import FakeScheduler

Json = dict[str, Any]
TIMEOUT_S = 20
# Of the demo model: parts of words, and both bytes of "é", which has no token of its own.
PROMPT = [105, 300, 511, 600, 42]
E_ACUTE = [127, 102]
POSTS = {
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 3},
    "/v1/completions": {"prompt": "hi", "max_tokens": 3},
    "/v1/responses": {"input": "hi", "max_output_tokens": 3},
    "/v1/messages": {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 3},
}


@dataclass
class HttpService(Service):
    """A running frontend, with an HTTP client."""

    http_port: int
    http: httpx2.AsyncClient

    async def post(self, path: str, body: Json, **headers: str) -> Json:
        """The answer to a request, which must succeed."""
        response = await self.http.post(path, json=body, headers=headers)
        assert response.status_code == 200, response.text
        assert response.headers["content-type"] == "application/json"
        found: Json = response.json()
        return found

    async def error(self, path: str, body: Any, **headers: str) -> tuple[int, Json]:
        """The status and the body of a request that fails."""
        response = await self.http.post(path, json=body, headers=headers)
        return response.status_code, response.json()

    async def events(self, path: str, body: Json, **headers: str) -> list[Any]:
        """The events of a stream, which must have the right form."""
        body = {**body, "stream": True}
        response = await self.http.post(path, json=body, headers=headers)
        assert response.status_code == 200, response.text
        assert response.headers["content-type"] == "text/event-stream; charset=utf-8"
        return parse_events(response.text)

    @asynccontextmanager
    async def opened(self, path: str, body: Json, **headers: str) -> AsyncIterator[Lines]:
        """A stream that is read event by event. The scheduler makes a token per `step`."""
        self.scheduler.automatic = False
        body = {**body, "stream": True}
        request = self.http.build_request("POST", path, json=body, headers=headers)
        sending = asyncio.create_task(self.http.send(request, stream=True))
        while (
            number := (await self.scheduler.submits.get()).request
        ) not in self.scheduler.connection.live:
            pass
        lines = Lines(sending, number)
        try:
            yield lines
        finally:
            await lines.close()

    async def step(self) -> None:
        """Makes a token for every request, and waits until it is sent."""
        self.scheduler.step()
        await self.scheduler.connection.outbox.join()


class Lines:
    """Reads a response event by event."""

    def __init__(self, sending: asyncio.Task[httpx2.Response], number: int) -> None:
        self._sending = sending
        self.number = number  # of the request at the scheduler
        self._chunks: Any = None
        self._rest = ""

    async def response(self) -> httpx2.Response:
        return await self._sending

    async def next(self) -> list[Any]:
        """The events of the next piece."""
        while "\n\n" not in self._rest:
            if self._chunks is None:
                self._chunks = (await self._sending).aiter_text()
            self._rest += await anext(self._chunks)
        whole, _, self._rest = self._rest.rpartition("\n\n")
        return parse_events(whole + "\n\n")

    async def rest(self) -> list[Any]:
        """All further events."""
        events = []
        try:
            while True:
                events += await self.next()
        except StopAsyncIteration:
            assert self._rest == ""
            return events

    async def close(self) -> None:
        """Disconnects, unless the response has ended."""
        if self._sending.done() and not self._sending.cancelled():
            if self._chunks is not None:
                await self._chunks.aclose()
            await self._sending.result().aclose()
        else:
            self._sending.cancel()
            await asyncio.gather(self._sending, return_exceptions=True)


def parse_events(text: str) -> list[Any]:
    """The data of server-sent events; `[DONE]` as a text. A named event names its type."""
    events: list[Any] = []
    *blocks, rest = text.split("\n\n")
    assert rest == "", "an event does not end"
    for block in blocks:
        *head, data = block.split("\n")
        assert data.startswith("data: "), block
        found = data.removeprefix("data: ")
        events.append(found if found == "[DONE]" else json.loads(found))
        if head:
            assert head == [f"event: {events[-1]['type']}"]
    return events


def token_request(ids: Sequence[int] = PROMPT, **sampling: Any) -> pb.GenerateRequest:
    return pb.GenerateRequest(
        token_ids=pb.TokenIds(ids=ids), sampling=pb.SamplingParams(**sampling)
    )


def chat_request(messages: Sequence[Json], **sampling: Any) -> pb.GenerateRequest:
    chat = pb.Chat(messages=[pb.ChatMessage(**message) for message in messages])
    return pb.GenerateRequest(chat=chat, sampling=pb.SamplingParams(**sampling))


REASONS = {
    pb.FINISH_REASON_EOS: "stop",
    pb.FINISH_REASON_STOP: "stop",
    pb.FINISH_REASON_LENGTH: "length",
}


@pytest.fixture
def changes() -> Json:
    """Settings that a test changes."""
    return {}


@pytest.fixture
def settings(settings: FrontendSettings, changes: Json) -> FrontendSettings:
    return settings.model_copy(update={"http_port": free_port(), **changes})


@asynccontextmanager
async def served(
    settings: FrontendSettings, scheduler: FakeScheduler
) -> AsyncIterator[HttpService]:
    """Runs a frontend without TLS until the context ends."""
    metrics = RequestMetrics(settings.model)
    frontend = Frontend(settings, metrics=metrics)
    listener = SharedListener(f"{settings.host}:{settings.http_port}")
    address = f"{settings.host}:{settings.port}"
    try_again_soon = [("grpc.initial_reconnect_backoff_ms", 50)]
    with held_ports([], listener=listener):
        serving = asyncio.create_task(frontend.serve(listener))
        async with (
            aio.insecure_channel(address, options=try_again_soon) as channel,
            httpx2.AsyncClient(
                base_url=f"http://{settings.host}:{settings.http_port}", timeout=TIMEOUT_S
            ) as http,
        ):
            service = HttpService(
                address=address,
                server=frontend.server,
                scheduler=scheduler,
                channel=channel,
                stub=InferenceServiceStub(channel),
                metrics=metrics,
                http_port=settings.http_port,
                http=http,
            )
            await channel.channel_ready()
            if scheduler.ready.is_set():
                await service.wait_for_health(True)
            yield service
        frontend.server.stop()
        await serving


@pytest.fixture
async def service(
    scheduler: FakeScheduler, settings: FrontendSettings
) -> AsyncIterator[HttpService]:
    async with served(settings, scheduler) as service:
        yield service
