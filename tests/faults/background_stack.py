"""A worker, a scheduler and frontends that share background responses, and ways to kill them.

Each is a parent process with forks, started without a launcher. Each frontend has an HTTP port of
its own, so that clients choose who answers.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import httpx2
import orjson
import psutil

from deploy.ports import free_port
from tests.stack import DEMO_MODEL, ROOT
from tests.waiting import WAIT_S, until

HANG_TIMEOUT_S = 3.0
Event = tuple[int, bytes]  # its number, and all of it
_ENDS = ("response.completed", "response.incomplete", "response.failed")


class RefusedError(Exception):
    """A frontend did not answer with success, or its stream was cut off."""

    def __init__(self, status: int | None, text: str) -> None:
        super().__init__(f"{status}: {text[:200]}")
        self.status = status  # None: the connection failed


class BackgroundStack:
    """The processes, by name: `worker`, `scheduler`, `frontend-0`..."""

    def __init__(self, directory: Path, frontends: int) -> None:
        self.directory = directory
        self.ports = [free_port() for _ in range(frontends)]
        self._grpc_port = free_port()
        self.frontends = [f"frontend-{index}" for index in range(frontends)]
        self.names = ["worker", "scheduler", *self.frontends]
        self.keeps_files = False
        self._processes: dict[str, subprocess.Popen[bytes]] = {}
        self.http = httpx2.AsyncClient(
            timeout=WAIT_S, limits=httpx2.Limits(max_keepalive_connections=0)
        )

    def start(self) -> None:
        """Starts all processes that are not running."""
        for name in self.names:
            process = self._processes.get(name)
            if process is None or process.poll() is not None:
                self._start(name)

    def _start(self, name: str) -> None:
        service, _, index = name.partition("-")
        environment = {
            "NANO_MODEL": str(DEMO_MODEL),
            "NANO_SCHEDULER_ADDRESS": f"unix:{self.directory}/scheduler",
            "NANO_WORKER_ADDRESSES": f"unix:{self.directory}/worker",
            "NANO_HANG_TIMEOUT_S": str(HANG_TIMEOUT_S),
            "NANO_EXIT_WITH_PARENT": "1",
        }
        if service == "frontend":
            environment |= {
                "NANO_INDEX": index,
                "NANO_PORT": str(self._grpc_port),
                "NANO_HTTP_PORT": str(self.ports[int(index)]),
                "NANO_RESPONSES_DIRECTORY": str(self.directory / "responses"),
                "NANO_DRAIN_TIMEOUT_S": "2",
            }
            module = "frontend"
        else:
            module = f"{service}_svc"
        with (self.directory / f"{name}.log").open("ab") as log:
            self._processes[name] = subprocess.Popen(
                [sys.executable, "-m", module],
                cwd=ROOT,
                env=os.environ | environment,
                stdout=log,
                stderr=log,
            )

    def signal(self, name: str, number: signal.Signals, fork: int | None = None) -> int | None:
        """Sends a signal to a parent process, or to one of its forks. Returns its pid, or None if
        there is no such process now."""
        pid = self._processes[name].pid
        with suppress(ProcessLookupError, psutil.NoSuchProcess):
            if fork is not None:
                forks = psutil.Process(pid).children()
                if not forks:
                    return None
                pid = forks[fork % len(forks)].pid
            os.kill(pid, number)
            return pid
        return None

    def end_parent(self, name: str) -> None:
        """Kills a parent process, and so its forks. `start` replaces it."""
        process = self._processes[name]
        process.kill()
        process.wait(WAIT_S)

    async def until_serving(self) -> None:
        for port in range(len(self.ports)):
            while True:
                with suppress(RefusedError):
                    await self.request(port, "GET", "/readiness")
                    break
                self.start()
                await asyncio.sleep(0.05)

    async def request(self, frontend: int, method: str, path: str, body: Any = None) -> Any:
        """
        Raises:
            RefusedError: there was no answer, or an error.
        """
        try:
            answer = await self.http.request(method, self._url(frontend, path), json=body)
        except httpx2.TransportError as error:
            raise RefusedError(None, repr(error)) from error
        if not answer.is_success:
            raise RefusedError(answer.status_code, answer.text)
        return answer.json()

    async def events(
        self, frontend: int, method: str, path: str, body: Any = None
    ) -> AsyncGenerator[Event]:
        """The whole events of a stream.

        Raises:
            RefusedError: there was no answer, an error, or the stream was cut off.
        """
        rest = b""
        try:
            request = self.http.stream(method, self._url(frontend, path), json=body)
            async with request as answer:
                if not answer.is_success:
                    raise RefusedError(answer.status_code, (await answer.aread()).decode())
                async for piece in answer.aiter_bytes():
                    *events, rest = (rest + piece).split(b"\n\n")
                    for event in events:
                        found = parsed(event)
                        if found.get("type") == "error":
                            raise RefusedError(None, str(found))  # the frontend stops
                        yield found["sequence_number"], event
        except httpx2.TransportError as error:
            raise RefusedError(None, repr(error)) from error

    def _url(self, frontend: int, path: str) -> str:
        return f"http://127.0.0.1:{self.ports[frontend]}{path}"

    def count_logged(self, text: str) -> int:
        """How often all processes have logged a text."""
        logs = self.directory.glob("*.log")
        return sum(log.read_bytes().count(text.encode()) for log in logs)

    async def close(self) -> None:
        await self.http.aclose()
        for process in self._processes.values():
            process.kill()
            process.wait(WAIT_S)


@asynccontextmanager
async def running_background_stack(frontends: int) -> AsyncIterator[BackgroundStack]:
    """Runs a stack in a new directory, which is removed unless this fails or `keeps_files`."""
    directory = Path(tempfile.mkdtemp(prefix="nano"))  # short: sockets allow 107 bytes
    stack = BackgroundStack(directory, frontends)
    try:
        stack.start()
        await asyncio.wait_for(stack.until_serving(), WAIT_S)
        yield stack
    finally:
        await stack.close()
    if not stack.keeps_files:
        shutil.rmtree(directory)


def parsed(event: bytes) -> Any:
    return orjson.loads(event.partition(b"data: ")[2])


def is_last(event: bytes) -> bool:
    return event.startswith(tuple(f"event: {name}\n".encode() for name in _ENDS))


async def until_gone(pid: int | None) -> None:
    await until(lambda: pid is None or not psutil.pid_exists(pid), f"process {pid} to end")
