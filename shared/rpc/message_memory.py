"""Bounds the memory of the messages that a process reads and holds, in all and for each caller.

The size of a message is known only once it has been read. So each message first takes a place for
the largest possible message, and afterwards gives back the bytes that it did not need. A caller
gets a further place only if its bytes, including that place, are at most the free bytes (dynamic
thresholds: Choudhury and Hahne 1998). So a place is left for another caller.

A caller without a place waits. The caller that holds the fewest bytes goes next, and equals take
turns. A slow message keeps its place until another message waits for a place. Then the caller with
the most places loses its oldest.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable

from shared.errors import QueueFullError
from shared.round_robin import RoundRobin
from shared.rpc.callers import Caller

# Bytes of messages per process.
MAX_BYTES = 256 << 20
# Bytes of messages of a caller that has no limit of its own.
MAX_BYTES_PER_CALLER = MAX_BYTES // 2

_MAX_READ_S = 30.0  # for one message to arrive
_MAX_WAIT_S = 30.0  # for a place
_PATIENCE_S = 1.0  # for slow messages, while others wait for a place
_RETRY_AFTER_S = 1.0


class Hold:
    """The bytes that a message holds; `release` gives them back, and a second call does nothing."""

    def __init__(self, memory: MessageMemory, caller: Caller, num_bytes: int) -> None:
        self._memory, self._caller, self._num_bytes = memory, caller, num_bytes

    def release(self) -> None:
        num_bytes, self._num_bytes = self._num_bytes, 0
        self._memory._give_back(self._caller, num_bytes)


class MessageMemory:
    """The memory for the messages of one process.

    Args:
        max_message_bytes: the size of the largest message that may arrive.
        max_bytes: the memory for all messages; at least `max_message_bytes` is used.
    """

    def __init__(self, max_message_bytes: int, max_bytes: int = MAX_BYTES) -> None:
        self._place = max_message_bytes
        self._max_bytes = max(max_bytes, max_message_bytes)
        self._used = 0
        self._used_by: Counter[str] = Counter()
        self._places: Counter[str] = Counter()  # by caller; taken by messages being read
        self._waiting: RoundRobin[Caller, asyncio.Future[None]] = RoundRobin()
        self._reading: dict[asyncio.Timeout, str] = {}  # oldest first, with the caller's name
        self._eviction: asyncio.TimerHandle | None = None

    @property
    def used(self) -> int:
        """The number of bytes that messages hold."""
        return self._used

    async def receive(
        self, caller: Caller, read: Callable[[], Awaitable[bytes]]
    ) -> tuple[bytes, Hold]:
        """Reads a message within the limits; returns the message and the hold on its memory.

        Raises:
            QueueFullError: no place was free in time, or the message did not arrive in time.
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
            raise QueueFullError(
                "message: it took too long to arrive", _RETRY_AFTER_S, "message"
            ) from None
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
        return used < caller.max_bytes  # a single place is granted whatever the share

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
        self._waiting.add(caller, granted)
        self._grant()
        self._watch()
        try:
            async with asyncio.timeout(_MAX_WAIT_S):
                await granted
        except BaseException as error:
            if granted.done() and not granted.cancelled():
                self._leave_place(caller)
            self._waiting.remove(caller, granted)
            if isinstance(error, TimeoutError):
                raise QueueFullError(
                    f"message: {self._used} bytes of messages are being read or held; "
                    f"the limit is {self._max_bytes}, and {caller.max_bytes} for one caller",
                    _RETRY_AFTER_S,
                    "message",
                ) from None
            raise

    def _grant(self) -> None:
        """Gives places to waiting messages for as long as places are free."""
        while ready := [caller for caller, _ in self._waiting.heads() if self._fits(caller)]:
            caller = min(ready, key=lambda each: self._used_by[each.name])
            granted = self._waiting.pop_of(caller)
            if not granted.done():
                self._take(caller)
                granted.set_result(None)

    def _watch(self) -> None:
        """Schedules `_evict`, which ends a slow message if another message still waits."""
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
