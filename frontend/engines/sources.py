"""Addresses of engines' schedulers: given, from DNS that is asked again, or from a watched file."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

import structlog

log = structlog.get_logger(__name__)

_LOOK_S = 0.2  # between looks at a file
_RESOLVE_S = 2.0  # between questions to DNS


class Place(NamedTuple):
    """Where a scheduler listens; `name` is the one its certificate must have, empty: the host's."""

    address: str
    name: str = ""


class _Source:
    """One entry of `scheduler_addresses`."""

    def __init__(self, text: str) -> None:
        self._kind, _, self._rest = text.partition(":")
        self.places: list[Place] = []
        self._look_at = 0.0  # next, in the event loop's time
        self._failed = False
        if self._kind not in ("dns", "file"):
            self.places = [Place(text)]

    async def look(self, now: float) -> None:
        """Brings `places` up to date. They stay as they are while nobody can be asked."""
        if self._kind not in ("dns", "file") or now < self._look_at:
            return
        try:
            self.places = await self._resolve() if self._kind == "dns" else _read(Path(self._rest))
            self._failed = False
        except OSError as error:
            if not self._failed:
                log.error("cannot look for engines", source=self._rest, reason=str(error))
            self._failed = True
        self._look_at = now + (_RESOLVE_S if self._kind == "dns" else _LOOK_S)

    async def _resolve(self) -> list[Place]:
        host, _, port = self._rest.rpartition(":")
        host = host.strip("/[]")
        found = await asyncio.get_running_loop().getaddrinfo(
            host, int(port), type=socket.SOCK_STREAM
        )
        ips = sorted({str(address[0]) for *_, address in found})
        return [Place(f"[{ip}]:{port}" if ":" in ip else f"{ip}:{port}", host) for ip in ips]


async def watch_places(
    sources: Iterable[str], refuse: Callable[[str], object]
) -> AsyncIterator[Sequence[Place]]:
    """Yields the places of all schedulers, first at once and then whenever they have changed.

    Args:
        sources: `host:port` or `unix:path`; `dns:host:port`, for all addresses of a name;
            `file:path`, for those on a file's lines.
        refuse: raises ValueError for an address that must not be called.
    """
    found = [_Source(text) for text in sources]
    watched = any(not each.places for each in found)
    known: list[Place] | None = None
    refused: set[Place] = set()
    loop = asyncio.get_running_loop()
    while True:
        for source in found:
            await source.look(loop.time())
        places = list(dict.fromkeys(place for source in found for place in source.places))
        for place in set(places) - refused:
            try:
                refuse(place.address)
            except ValueError as error:
                log.error("an engine is left out", reason=str(error))
                refused.add(place)
        places = [place for place in places if place not in refused]
        if places != known:
            known = places
            yield places
        if not watched:
            return
        await asyncio.sleep(_LOOK_S)


def _read(path: Path) -> list[Place]:
    lines = path.read_text(encoding="utf-8").splitlines()
    return [Place(line.strip()) for line in lines if line.strip()]
