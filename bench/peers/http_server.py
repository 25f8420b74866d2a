"""A server that is asked for completions over HTTP, on this machine."""

from __future__ import annotations

import http.client
import json
import socket
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from typing import Any

from bench.workload import WorkloadRequest

HOST = "127.0.0.1"
_PREFIX = b"data: "


@dataclass(frozen=True)
class HttpServer:
    """A server's command and its API for completions, which it streams as server-sent events."""

    command: list[str]
    port: int
    path: str
    length: str  # the option for the number of tokens
    options: Mapping[str, Any]  # for token ids in events
    tokens: Callable[[dict[str, Any]], Sequence[int]]  # the token ids of an event
    is_last: Callable[[dict[str, Any]], bool]
    variables: Mapping[str, str] = field(default_factory=dict)  # of the environment
    engine: str = ""  # in the command line of the engine's process, if that is another one

    def status(self, timeout_s: float | None = None) -> int | None:
        """The status of `/health`; None if nothing answers."""
        with closing(http.client.HTTPConnection(HOST, self.port, timeout=timeout_s)) as connection:
            try:
                connection.request("GET", "/health")
                return connection.getresponse().status
            except (OSError, http.client.HTTPException):
                return None

    def events(
        self, request: WorkloadRequest, timeout_s: float | None = None, **options: Any
    ) -> Iterator[dict[str, Any]]:
        """Yields the events of a completion that ignores ends.

        Args:
            timeout_s: maximum seconds until the next event.

        Raises:
            OSError, HTTPException: the request was refused, or the stream broke.
        """
        common = {"prompt": request.prompt, "ignore_eos": True, "stream": True}
        body = json.dumps({**common, self.length: request.output_len, **options})
        with closing(http.client.HTTPConnection(HOST, self.port, timeout=timeout_s)) as connection:
            connection.request("POST", self.path, body, {"content-type": "application/json"})
            response = connection.getresponse()
            if response.status != http.client.OK:
                raise ConnectionError(response.read().decode(errors="replace"))
            for line in response:
                if line.startswith(_PREFIX + b"{"):
                    event = json.loads(line.removeprefix(_PREFIX))
                    if "error" in event:
                        raise ConnectionError(str(event["error"]))
                    yield event
                    if self.is_last(event):
                        return
        raise ConnectionError("the stream ended early")

    def token_ids(self, request: WorkloadRequest, timeout_s: float) -> Iterator[Sequence[int]]:
        """Yields the token ids of a greedy completion as events arrive, like `events`."""
        for event in self.events(request, timeout_s, temperature=0, **self.options):
            yield self.tokens(event)


def free_port() -> int:
    with socket.create_server((HOST, 0)) as listener:
        port: int = listener.getsockname()[1]
        return port
