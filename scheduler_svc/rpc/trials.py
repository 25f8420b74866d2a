"""Tries requests that may have killed earlier schedulers, in the groups of `shared.suspects`. Each
scheduler does a part of the trials, and the frontends remember the results.

Frontends count, for each request, the schedulers that died with it before it made progress. They
name suspects instead of submitting them. Other requests continue while a group is tried.

A suspect that is a group by itself is tried alone, and only a death in such a trial convicts. All
other requests are withdrawn meanwhile, and each frontend confirms that it will submit nothing. If
the scheduler then dies, no other request can be the cause.

A suspect passes with its next few tokens. They may take long, because beams end together and
prompts are long. A trial of suspects with n losses therefore lasts at most 2 ** n seconds, and at
most about a minute. It is short while the suspects are likely to be innocent, and long enough for
guilty suspects later.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Mapping
from collections.abc import Sequence as Seq
from contextlib import suppress

import structlog

from scheduler_svc.core.sequence import SequenceKey
from scheduler_svc.rpc.connection import Connection
from shared.suspects import next_groups

log = structlog.get_logger(__name__)

_MAX_LOG_SECONDS = 6
# Frontends that have not confirmed by then are cut off, because the others wait for them.
_CONFIRMATION_S = 3.0


class Trials:
    """Tries the suspects of all connected frontends. Use it only from the engine's event loop."""

    def __init__(self, connections: Mapping[int, Connection]) -> None:
        """`connections` are the accepted connections, by number."""
        self._connections = connections
        self._news = asyncio.Event()
        self._open = asyncio.Event()  # set unless a suspect is tried alone
        self._open.set()

    async def opened(self) -> None:
        """Waits until no suspect is tried alone, so that another connection may be accepted."""
        while not self._open.is_set():
            await self._open.wait()

    def wake(self) -> None:
        """Notes that a connection has ended, and its suspects with it."""
        self._news.set()

    def receive(
        self,
        connection: Connection,
        suspects: Mapping[int, int],
        cleared: Iterable[int] = (),
        *,
        holding: bool = False,
    ) -> None:
        """Receives a frontend's report: losses of suspects by request, requests that are no longer
        suspects, and whether it has withdrawn everything and submits nothing."""
        connection.suspects.update(suspects)
        for request in cleared:
            connection.suspects.pop(request, None)
        connection.holding |= holding
        self._news.set()

    async def run(self, engine_at_rest: Callable[[], Awaitable[None]]) -> None:
        """Runs until cancelled. `engine_at_rest` waits until the engine computes nothing."""
        self._engine_at_rest = engine_at_rest
        while True:
            await self._until(lambda: bool(self._suspects()))
            suspects = self._suspects()
            seconds = 2.0 ** min(max(suspects.values()), _MAX_LOG_SECONDS)
            for group in next_groups(suspects):
                if self._untried(group):
                    await self._try(group, seconds)
            if not self._suspects():
                self._release()

    async def _try(self, group: Seq[SequenceKey], timeout_s: float) -> None:
        log.warning("trying requests that earlier schedulers died with", requests=len(group))
        alone = len(group) == 1
        if alone:
            await self._isolate()
        else:
            self._release()
        group = self._untried(group)
        owners = {key.connection for key in group}
        for number in self._connections if alone else owners:
            requests = [key.number for key in group if key.connection == number]
            self._connections[number].send_trial(requests, alone=alone)
        try:
            async with asyncio.timeout(timeout_s):
                await self._until(lambda: not self._untried(group))
        except TimeoutError:
            for key in self._untried(group):
                del self._connections[key.connection].suspects[key.number]
            if alone:
                await self._isolate()  # tells its frontend that it is no longer alone
                return
            for owner in owners & self._connections.keys():
                self._connections[owner].send_trial()

    async def _isolate(self) -> None:
        """Waits until all frontends have withdrawn everything and nothing is computed."""
        self._open.clear()
        for connection in self._connections.values():
            connection.holding = False
            connection.send_trial(withdraw=True)
        with suppress(TimeoutError):
            async with asyncio.timeout(_CONFIRMATION_S):
                await self._until(self._all_hold)
        for connection in self._connections.values():
            if not connection.holding:
                connection.cut_off("the frontend did not confirm that it had withdrawn everything")
        await self._until(self._all_hold)
        await self._engine_at_rest()

    def _all_hold(self) -> bool:
        return all(connection.holding for connection in self._connections.values())

    def _release(self) -> None:
        if not self._open.is_set():
            self._open.set()
            for connection in self._connections.values():
                connection.send_trial()

    def _suspects(self) -> dict[SequenceKey, int]:
        """The losses of all suspects."""
        return {
            SequenceKey(number, request): losses
            for number, connection in self._connections.items()
            for request, losses in connection.suspects.items()
        }

    def _untried(self, group: Seq[SequenceKey]) -> list[SequenceKey]:
        """The members of a group that have neither passed nor ended."""
        suspects = self._suspects()
        return [key for key in group if key in suspects]

    async def _until(self, condition: Callable[[], bool]) -> None:
        while not condition():
            self._news.clear()
            await self._news.wait()
