"""Endpoints of engines' schedulers, given as addresses, or polled from a DNS name or a file."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

import structlog

log = structlog.get_logger(__name__)

_POLL_S = 0.2  # between reads of a file
_RESOLVE_S = 2.0  # between DNS queries


class Endpoint(NamedTuple):
    """A scheduler's address. Its certificate must have `name`, or the host's name if empty."""

    address: str
    name: str = ""


class _Source:
    """One entry of `scheduler_addresses`."""

    def __init__(self, text: str) -> None:
        self._kind, _, self._rest = text.partition(":")
        self.endpoints: list[Endpoint] = []
        self._poll_at = 0.0  # the next time, by the event loop's clock
        self._failed = False
        if self._kind not in ("dns", "file"):
            self.endpoints = [Endpoint(text)]

    async def poll(self, now: float) -> None:
        """Updates `endpoints`. They stay as they are while the look-up fails."""
        if self._kind not in ("dns", "file") or now < self._poll_at:
            return
        try:
            if self._kind == "dns":
                self.endpoints = await self._resolve()
            else:
                self.endpoints = _read(Path(self._rest))
            self._failed = False
        except OSError as error:
            if not self._failed:
                log.error(
                    "lookup of engines failed; keeping the known engines",
                    source=self._rest,
                    reason=str(error),
                )
            self._failed = True
        self._poll_at = now + (_RESOLVE_S if self._kind == "dns" else _POLL_S)

    async def _resolve(self) -> list[Endpoint]:
        host, _, port = self._rest.rpartition(":")
        host = host.strip("/[]")
        found = await asyncio.get_running_loop().getaddrinfo(
            host, int(port), type=socket.SOCK_STREAM
        )
        ips = sorted({str(address[0]) for *_, address in found})
        return [Endpoint(f"[{ip}]:{port}" if ":" in ip else f"{ip}:{port}", host) for ip in ips]


async def watch_endpoints(
    sources: Iterable[str], check: Callable[[str], object]
) -> AsyncIterator[Sequence[Endpoint]]:
    """Yields the endpoints of all schedulers, at once and then after each change.

    Args:
        sources: `host:port` or `unix:path`; `dns:host:port`, for all addresses of a name;
            `file:path`, for the addresses on a file's lines.
        check: raises ValueError for an address that must not be called.
    """
    found = [_Source(text) for text in sources]
    watched = any(not each.endpoints for each in found)
    known: list[Endpoint] | None = None
    rejected: set[Endpoint] = set()
    loop = asyncio.get_running_loop()
    while True:
        for source in found:
            await source.poll(loop.time())
        endpoints = list(dict.fromkeys(each for source in found for each in source.endpoints))
        for endpoint in set(endpoints) - rejected:
            try:
                check(endpoint.address)
            except ValueError as error:
                log.error("engine address rejected; ignoring the engine", reason=str(error))
                rejected.add(endpoint)
        endpoints = [endpoint for endpoint in endpoints if endpoint not in rejected]
        if endpoints != known:
            known = endpoints
            yield endpoints
        if not watched:
            return
        await asyncio.sleep(_POLL_S)


def _read(path: Path) -> list[Endpoint]:
    lines = path.read_text(encoding="utf-8").splitlines()
    return [Endpoint(line.strip()) for line in lines if line.strip()]
