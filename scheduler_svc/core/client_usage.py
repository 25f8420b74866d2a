"""Each client's use of the engine, for fair queueing of requests whose cost shows only as they run.
The method is virtual token counters, with weights (Sheng et al., "Fairness in Serving Large
Language Models", OSDI 2024).

The client with the smallest counter goes next. A prompt's tokens count when it is admitted, less
the tokens found in the cache. A generated token counts twice as much, when it is sampled. A
client whose long requests hold all slots therefore gets no further slot while others wait. When a
client comes back, its counter is raised to the smallest counter of the waiting clients, so that
time without requests earns nothing.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from scheduler_svc.core.client import Client

_OUTPUT_COST = 2  # prompt tokens per generated token, as in the paper


class ClientUsage:
    """The usage of one client, or of one connection's anonymous requests.

    `num_tokens` is in prompt tokens, divided by the client's weight.
    """

    __slots__ = ("client", "key", "num_open", "num_tokens", "num_waiting")

    def __init__(self, key: str | int, client: Client) -> None:
        self.key = key
        self.client = client
        self.num_tokens = 0.0
        self.num_open = 0  # sequences that have not ended
        self.num_waiting = 0  # open sequences that wait and have never run

    def add_input(self, num_tokens: int) -> None:
        self.num_tokens += num_tokens / self.client.weight

    def add_output(self, num_tokens: int) -> None:
        self.num_tokens += _OUTPUT_COST * num_tokens / self.client.weight


class ClientUsages:
    """The usages of clients. A named client's usage is kept until no sequence of any client is
    open."""

    def __init__(self) -> None:
        self._usages: dict[str | int, ClientUsage] = {}  # by name, or by connection if anonymous
        self._num_open: Counter[str] = Counter()  # open sequences, by client name
        self._last_tokens = 0.0  # the usage of the client that waited last

    def __len__(self) -> int:
        return len(self._usages)

    @property
    def num_clients(self) -> int:
        """The number of clients with open sequences. Anonymous clients count as one."""
        return len(self._num_open)

    def of(self, client: Client, connection: int) -> ClientUsage:
        """The usage that a new sequence from `client` on `connection` adds to."""
        key = client.name or connection
        usage = self._usages.get(key)
        if usage is None:
            usage = self._usages[key] = ClientUsage(key, client)
        usage.client = client  # its weight may have changed
        return usage

    def open(self, usage: ClientUsage) -> None:
        """Notes that a sequence has been accepted."""
        usage.num_open += 1
        self._num_open[usage.client.name] += 1

    def close(self, usage: ClientUsage) -> None:
        """Notes that a sequence has ended, and forgets usages that no longer matter."""
        name = usage.client.name
        usage.num_open -= 1
        self._num_open[name] -= 1
        if not self._num_open[name]:
            del self._num_open[name]
        if not self._num_open:
            self._usages.clear()
        elif not usage.num_open and not name:
            del self._usages[usage.key]

    def join(self, usage: ClientUsage) -> None:
        """Notes that a sequence of a client waits for the first time."""
        if not usage.num_waiting:
            waiting = (each.num_tokens for each in self._usages.values() if each.num_waiting)
            usage.num_tokens = max(usage.num_tokens, min(waiting, default=self._last_tokens))
        usage.num_waiting += 1

    def leave(self, usage: ClientUsage) -> None:
        """Notes that a sequence that waited for the first time no longer waits."""
        usage.num_waiting -= 1
        if not usage.num_waiting:
            self._last_tokens = usage.num_tokens

    def check_integrity(self, open_usages: Iterable[ClientUsage]) -> None:
        """Raises AssertionError unless these are the usages of the open sequences. For tests."""
        num_open = Counter(open_usages)
        assert all(usage.num_open == n for usage, n in num_open.items()), "a usage's sequences"
        clients = Counter(usage.client.name for usage in num_open.elements())
        assert clients == self._num_open, "a client's sequences"
        for usage in self._usages.values():
            assert usage.num_open or usage.client.name, "an anonymous usage is kept"
