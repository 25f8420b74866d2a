"""Tries requests that may have killed schedulers before this one: group testing (Dorfman 1943), of
which each scheduler does one part and the frontends remember the result.

Frontends count, per request, the schedulers that died with it before it got any further, and from
two on name it instead of submitting it. Those with the most losses were in the latest group to be
tried: they are tried in halves, one after the other, then those with fewer. No more than half of
them are in the next death, and then have one more than the rest. Other requests go on meanwhile.

A suspect that is the only one of its half is tried alone: only such deaths convict. Everything else
is withdrawn for as long, and each frontend confirms that it will submit nothing, so that whatever
the scheduler then dies of, it is no other request.

A suspect passes with its next few tokens. They need not come soon: beams end together, prompts are
long. So a trial of suspects with n losses lasts at most 2 ** n seconds, and a minute: short while
they are likely to be innocent, then long enough for any that are not.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Mapping
from collections.abc import Sequence as Seq
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Protocol

import structlog

from scheduler_svc.core.sequence import SequenceKey

log = structlog.get_logger(__name__)

_MAX_LOG_SECONDS = 6
# Frontends that have not confirmed by then are cut off: the others wait for them.
_CONFIRMATION_S = 3.0


class Engine(Protocol):
    """The part of the engine that is needed here."""

    async def rest(self) -> None:
        """Returns once there is nothing to do and no step is in flight."""

    def abort_connection(self, connection: int) -> object:
        """Ends all sequences that came from one frontend's stream."""


class Tell(Protocol):
    """Tells a frontend which of its suspects to submit, beside everything that is none."""

    def __call__(
        self, requests: Seq[int] = (), *, withdraw: bool = False, alone: bool = False
    ) -> None:
        """With `withdraw` it withdraws everything, confirms that and submits nothing; with `alone`
        it learns that all have, and submits nothing but what it is told to."""


@dataclass
class _Frontend:
    tell: Tell
    cut_off: Callable[[str], None]
    suspects: dict[int, int] = field(default_factory=dict)  # losses by request
    holding: bool = False  # it has withdrawn everything


class Trials:
    """Tries the suspects of all connected frontends. Use it only from the engine's event loop."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._frontends: dict[int, _Frontend] = {}
        self._news = asyncio.Event()
        self._open = asyncio.Event()  # unless a suspect is tried alone
        self._open.set()

    async def join(self, connection: int, tell: Tell, cut_off: Callable[[str], None]) -> None:
        """Takes in a frontend that has submitted nothing yet, once no suspect is tried alone.
        `cut_off` ends its stream, for a reason."""
        while not self._open.is_set():
            await self._open.wait()
        self._frontends[connection] = _Frontend(tell, cut_off)

    def leave(self, connection: int) -> None:
        """Forgets a frontend, if it has joined, and its suspects."""
        self._frontends.pop(connection, None)
        self._news.set()

    def hear(
        self,
        connection: int,
        suspects: Mapping[int, int],
        cleared: Iterable[int] = (),
        *,
        holding: bool = False,
    ) -> None:
        """Takes in a frontend's news: losses of suspects by request, those that are none any more,
        and whether it has withdrawn everything and submits nothing."""
        frontend = self._frontends[connection]
        frontend.suspects.update(suspects)
        for request in cleared:
            frontend.suspects.pop(request, None)
        if holding:
            self._engine.abort_connection(connection)
            frontend.holding = True
        self._news.set()

    async def run(self) -> None:
        """Runs until cancelled."""
        while True:
            await self._until(lambda: bool(self._suspects()))
            suspects = self._suspects()
            losses = max(suspects.values())
            group = sorted(key for key, count in suspects.items() if count == losses)
            middle = len(group) // 2
            for half in (group[:middle], group[middle:]):
                if self._untried(half):
                    await self._try(half, 2.0 ** min(losses, _MAX_LOG_SECONDS))
            if not self._suspects():
                self._release()

    async def _try(self, group: Seq[SequenceKey], timeout_s: float) -> None:
        log.warning("trying requests that schedulers died with", requests=len(group))
        alone = len(group) == 1
        if alone:
            await self._isolate()
        else:
            self._release()
        group = self._untried(group)
        owners = {key.connection for key in group}
        for connection in self._frontends if alone else owners:
            numbers = [key.number for key in group if key.connection == connection]
            self._frontends[connection].tell(numbers, alone=alone)
        try:
            async with asyncio.timeout(timeout_s):
                await self._until(lambda: not self._untried(group))
        except TimeoutError:
            for key in self._untried(group):
                del self._frontends[key.connection].suspects[key.number]
            if alone:
                await self._isolate()  # so that its frontend knows that it is not alone any more
                return
            for owner in owners & self._frontends.keys():
                self._frontends[owner].tell()

    async def _isolate(self) -> None:
        """Returns once all frontends have withdrawn everything and nothing is computed."""
        self._open.clear()
        for frontend in self._frontends.values():
            frontend.holding = False
            frontend.tell(withdraw=True)
        with suppress(TimeoutError):
            async with asyncio.timeout(_CONFIRMATION_S):
                await self._until(self._all_hold)
        for frontend in self._frontends.values():
            if not frontend.holding:
                frontend.cut_off("a request to withdraw everything was not confirmed")
        await self._until(self._all_hold)
        await self._engine.rest()

    def _all_hold(self) -> bool:
        return all(frontend.holding for frontend in self._frontends.values())

    def _release(self) -> None:
        if not self._open.is_set():
            self._open.set()
            for frontend in self._frontends.values():
                frontend.tell()

    def _suspects(self) -> dict[SequenceKey, int]:
        return {
            SequenceKey(connection, request): losses
            for connection, frontend in self._frontends.items()
            for request, losses in frontend.suspects.items()
        }

    def _untried(self, group: Seq[SequenceKey]) -> list[SequenceKey]:
        """The members of a group that have neither passed nor ended."""
        frontends = self._frontends
        return [
            key
            for key in group
            if key.connection in frontends and key.number in frontends[key.connection].suspects
        ]

    async def _until(self, condition: Callable[[], bool]) -> None:
        while not condition():
            self._news.clear()
            await self._news.wait()
