"""Bounds the memory of the messages that a process reads and holds, in all and for each caller.

How large a message is shows only when it has been read. So a place for the largest one is taken
first, and what it did not need is given back after. A caller may have a further place only while
that much more is free than it has (dynamic thresholds: Choudhury and Hahne 1998), so that however
many it asks for, there is one for another. A caller without a place waits. The caller that holds
least goes next, and equals take turns. A message that is slow to arrive keeps its place until
another message waits for one; then the caller with the most places loses its oldest.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from shared.errors import QueueFullError
from shared.round_robin import RoundRobin
from shared.rpc.callers import Caller

# Bytes of messages per process.
MAX_BYTES = 256 << 20
# Of a caller without a limit of its own.
MAX_BYTES_PER_CALLER = MAX_BYTES // 2

_MAX_READ_S = 30.0  # for one message to arrive
_MAX_WAIT_S = 30.0  # for a place
_PATIENCE_S = 1.0  # with slow messages, while others wait for a place
_RETRY_AFTER_S = 1.0


@dataclass(eq=False, slots=True)
class _Waiting:
    """A message that waits for a place."""

    caller: Caller
    granted: asyncio.Future[None]


class Hold:
    """The bytes that a message has been given; `release` gives them back, once."""

    def __init__(self, memory: MessageMemory, caller: Caller, num_bytes: int) -> None:
        self._memory, self._caller, self._num_bytes = memory, caller, num_bytes

    def release(self) -> None:
        num_bytes, self._num_bytes = self._num_bytes, 0
        self._memory._give_back(self._caller, num_bytes)


class MessageMemory:
    """The memory for the messages of one process.

    Args:
        max_message_bytes: of the largest message that may arrive.
    """

    def __init__(self, max_message_bytes: int, max_bytes: int = MAX_BYTES) -> None:
        self._place = max_message_bytes
        self._max_bytes = max(max_bytes, max_message_bytes)
        self._used = 0
        self._used_by: Counter[str] = Counter()
        self._places: Counter[str] = Counter()  # of messages to be read
        self._waiting: RoundRobin[str, _Waiting] = RoundRobin()
        self._reading: dict[asyncio.Timeout, str] = {}  # oldest first, with the caller's name
        self._eviction: asyncio.TimerHandle | None = None

    @property
    def used(self) -> int:
        """Bytes that are taken."""
        return self._used

    async def receive(
        self, caller: Caller, read: Callable[[], Awaitable[bytes]]
    ) -> tuple[bytes, Hold]:
        """Reads a message within the limits; returns it and the hold on its memory.

        Raises:
            QueueFullError: there was no place for it in time, or it did not arrive in time.
        """
        if self._waiting or not self._fits(caller):
            await self._wait(caller)
        else:
            self._take(caller)
        data = b""
        try:
            async with asyncio.timeout(_MAX_READ_S) as limit:
                self._reading[limit] = caller.name
                try:
                    data = await read()
                finally:
                    del self._reading[limit]
        except TimeoutError:
            raise QueueFullError("message: it took too long to arrive", _RETRY_AFTER_S) from None
        finally:
            self._leave_place(caller, len(data))
        return data, Hold(self, caller, len(data))

    def _fits(self, caller: Caller) -> bool:
        free = self._max_bytes - self._used
        if free < self._place:
            return False
        used = self._used_by[caller.name]
        if self._places[caller.name]:
            return used + self._place <= min(caller.max_bytes, free)
        return used < caller.max_bytes  # one at a time, whatever the share

    def _take(self, caller: Caller) -> None:
        self._used += self._place
        self._used_by[caller.name] += self._place
        self._places[caller.name] += 1

    def _leave_place(self, caller: Caller, num_bytes: int = 0) -> None:
        """Gives back all of a place but `num_bytes`."""
        self._places[caller.name] -= 1
        if not self._places[caller.name]:
            del self._places[caller.name]
        self._give_back(caller, self._place - num_bytes)

    def _give_back(self, caller: Caller, num_bytes: int) -> None:
        self._used -= num_bytes
        self._used_by[caller.name] -= num_bytes
        if not self._used_by[caller.name]:
            del self._used_by[caller.name]
        if self._waiting:
            self._grant()

    async def _wait(self, caller: Caller) -> None:
        """Waits for a place and takes it."""
        granted: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        waiting = _Waiting(caller, granted)
        self._waiting.add(caller.name, waiting)
        self._grant()
        self._watch()
        try:
            async with asyncio.timeout(_MAX_WAIT_S):
                await granted
        except BaseException as error:
            if granted.done() and not granted.cancelled():
                self._leave_place(caller)
            self._waiting.remove(caller.name, waiting)
            if isinstance(error, TimeoutError):
                raise QueueFullError(
                    f"message: {self._used} bytes of messages are being read or held; "
                    f"the limit is {self._max_bytes}, and {caller.max_bytes} for one caller",
                    _RETRY_AFTER_S,
                ) from None
            raise

    def _grant(self) -> None:
        """Gives places to waiting messages as long as there are any."""
        while ready := [n for n, first in self._waiting.heads() if self._fits(first.caller)]:
            waiting = self._waiting.pop_of(min(ready, key=self._used_by.__getitem__))
            if not waiting.granted.done():
                self._take(waiting.caller)
                waiting.granted.set_result(None)

    def _watch(self) -> None:
        """Ends slow messages soon, if a message still waits for a place by then."""
        if self._eviction is None and self._waiting:
            loop = asyncio.get_running_loop()
            self._eviction = loop.call_later(_PATIENCE_S, self._evict)

    def _evict(self) -> None:
        self._eviction = None
        if self._waiting and self._reading:
            holder, _ = Counter(self._reading.values()).most_common(1)[0]
            oldest = next(limit for limit, name in self._reading.items() if name == holder)
            oldest.reschedule(asyncio.get_running_loop().time())
        self._watch()
