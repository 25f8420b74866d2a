"""Frontends with HTTP that share a directory of responses, and a client that reads their events."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import AsyncExitStack, aclosing, asynccontextmanager
from pathlib import Path
from typing import Any

import httpx2
import orjson
import psutil

from deploy.ports import free_port
from frontend.service import Frontend
from frontend.settings import FrontendSettings
from shared.process.ports import SharedListener, held_ports
from tests.frontend.cluster import submitted
from tests.frontend.conftest import DEMO
from tests.frontend.fake_scheduler import FakeScheduler, Live
from tests.waiting import WAIT_S, until

Event = tuple[int, bytes]  # its number, and all of it

SIXTH = 8  # the number of the event that shows the sixth token


class Server:
    """A frontend, and a client of its."""

    def __init__(self, port: int, token: str = "") -> None:
        self.port = port
        headers = {"authorization": f"Bearer {token}"} if token else {}
        self.http = httpx2.AsyncClient(
            base_url=f"http://127.0.0.1:{port}", timeout=WAIT_S, headers=headers
        )

    async def until_ready(self) -> None:
        while True:
            try:
                if (await self.http.get("/readiness")).is_success:
                    return
            except httpx2.TransportError:
                pass
            await asyncio.sleep(0.02)

    async def create(self, **body: Any) -> Any:
        """Creates a background response of 10 tokens."""
        answer = await self.http.post("/v1/responses", json=background(**body))
        assert answer.is_success, answer.text
        return answer.json()

    async def get(self, response: str, **query: Any) -> Any:
        answer = await self.http.get(f"/v1/responses/{response}", params=query)
        assert answer.is_success, answer.text
        return answer.json()

    async def events(self, response: str, after: int | None = None) -> AsyncGenerator[Event]:
        query = {"stream": "true"} | ({} if after is None else {"starting_after": str(after)})
        request = self.http.stream("GET", f"/v1/responses/{response}", params=query)
        async with request as answer, aclosing(events_of(answer)) as events:
            assert answer.is_success
            async for event in events:
                yield event

    async def read(
        self, response: str, after: int | None = None, until_number: int = 1 << 30
    ) -> list[Event]:
        """The events above `after` until the end, or up to a number."""
        found = []
        async with aclosing(self.events(response, after)) as events:
            async for event in events:
                found.append(event)
                if event[0] >= until_number:
                    break
        return found

    async def read_new(self, **body: Any) -> list[Event]:
        """Creates a response, and reads its events."""
        async with self.http.stream("POST", "/v1/responses", json=background(**body)) as answer:
            assert answer.headers["content-type"].startswith("text/event-stream")
            return [event async for event in events_of(answer)]

    async def until_ended(self, response: str) -> Any:
        await self.read(response)
        return await self.get(response)


class LocalServer(Server):
    """A frontend in this process."""

    frontend: Frontend
    serving: asyncio.Task[None]

    async def stop(self) -> None:
        self.frontend.server.stop()
        await self.serving


class ForkedServer(Server):
    """A frontend as users run it: a parent process and its fork."""

    process: asyncio.subprocess.Process

    def fork(self) -> int:
        (fork,) = psutil.Process(self.process.pid).children()
        return int(fork.pid)

    def send(self, number: signal.Signals, *, to_fork: bool = False) -> None:
        os.kill(self.fork() if to_fork else self.process.pid, number)

    async def kill(self) -> None:
        self.process.kill()
        await self.process.wait()


class Rig:
    """Starts frontends of one scheduler."""

    def __init__(self, directory: Path, scheduler_address: str) -> None:
        self.responses = directory / "responses"
        self.stack = AsyncExitStack()
        self._scheduler_address = scheduler_address

    async def local(self, **settings: Any) -> LocalServer:
        server: LocalServer = await self._client(LocalServer(free_port()))
        values: dict[str, Any] = {
            "model": str(DEMO),
            "port": free_port(),
            "http_port": server.port,
            "scheduler_address": self._scheduler_address,
            "responses_directory": str(self.responses),
            "drain_timeout_s": WAIT_S,
        }
        server.frontend = Frontend(FrontendSettings(**values | settings))
        listener = SharedListener(f"127.0.0.1:{server.port}")
        self.stack.enter_context(held_ports((), (), listener))
        server.serving = asyncio.create_task(server.frontend.serve(listener))
        self.stack.push_async_callback(self._end, server)
        await server.until_ready()
        return server

    async def _end(self, server: LocalServer) -> None:
        server.frontend.server.calls.end()  # or those of a failed test would delay the end
        await server.stop()

    async def forked(self, **settings: object) -> ForkedServer:
        server: ForkedServer = await self._client(ForkedServer(free_port()))
        values: dict[str, object] = {
            "model": DEMO,
            "port": free_port(),
            "http_port": server.port,
            "scheduler_address": self._scheduler_address,
            "responses_directory": self.responses,
        }
        environment = {
            f"NANO_{name.upper()}": str(value) for name, value in (values | settings).items()
        }
        server.process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "frontend", env=os.environ | environment
        )
        self.stack.push_async_callback(self._reap, server)
        await server.until_ready()
        return server

    async def _reap(self, server: ForkedServer) -> None:
        if server.process.returncode is None:
            await server.kill()

    async def _client(self, server: Any) -> Any:
        await self.stack.enter_async_context(server.http)
        return server

    async def client(self, server: Server, token: str) -> Server:
        """A client of a frontend that has this token."""
        found: Server = await self._client(Server(server.port, token))
        return found

    @asynccontextmanager
    async def running(self) -> AsyncIterator[Rig]:
        async with self.stack:
            yield self


def background(**body: Any) -> dict[str, Any]:
    common = {"input": "Once upon a time", "background": True, "temperature": 0}
    return common | {"max_output_tokens": 10, "ignore_eos": True} | body


async def events_of(answer: httpx2.Response) -> AsyncGenerator[Event]:
    """The events of a stream. One that is cut off is dropped."""
    rest = b""
    async for piece in answer.aiter_bytes():
        *events, rest = (rest + piece).split(b"\n\n")
        for event in events:
            yield parse(event)["sequence_number"], event


def parse(event: bytes) -> Any:
    return orjson.loads(event.partition(b"data: ")[2])


def final(events: Sequence[Event]) -> Any:
    """The response in the last event."""
    return parse(events[-1][1])["response"]


def text_of(response: Any) -> str:
    return "".join(item["content"][0]["text"] for item in response["output"])


def check_whole(events: Sequence[Event]) -> None:
    """Every event once, in order, and deltas that join to the text of the response."""
    assert [number for number, _ in events] == [*range(len(events))]
    found = [parse(event) for _, event in events]
    deltas = [each["delta"] for each in found if each["type"] == "response.output_text.delta"]
    assert "".join(deltas) == text_of(final(events))


async def until_dead(pid: int) -> None:
    await until(lambda: not psutil.pid_exists(pid), f"process {pid} to end")


def backwards(live: Live) -> int:
    """The tokens of an engine that continues in another way."""
    return live.prompt[-1 - len(live.tokens) % len(live.prompt)]


async def begin(server: Server, scheduler: FakeScheduler, steps: int = 6, **body: Any) -> str:
    """Creates a response that has so many tokens."""
    created = await server.create(**body)
    await submitted(scheduler)
    for _ in range(steps):
        scheduler.step_all()
    return str(created["id"])


async def finish(scheduler: FakeScheduler) -> None:
    for _ in range(20):
        scheduler.step_all()


async def continued(scheduler: FakeScheduler) -> int:
    """Waits until a frontend continues the response, which then ends in another way. Returns the
    number of tokens that it had."""
    submit = await submitted(scheduler)
    scheduler.next_token = backwards
    await finish(scheduler)
    return len(submit.generated_ids) // 4
