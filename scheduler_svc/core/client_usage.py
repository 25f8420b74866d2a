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

    def __init__(self, client: Client) -> None:
        self.client = client
        self.num_tokens = 0.0
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
        self._num_open: Counter[str | int] = Counter()  # sequences that have not ended; no zeros
        self._last_tokens = 0.0  # the usage of the client that waited last

    def __len__(self) -> int:
        return len(self._usages)

    @property
    def several_are_open(self) -> bool:
        """Whether several clients have open sequences. Anonymous clients count as one."""
        return len({isinstance(key, str) and key for key in self._num_open}) > 1

    def get(self, client: Client, connection: int) -> ClientUsage | None:
        """The usage of a client that has open sequences or had some lately, or None."""
        return self._usages.get(client.name or connection)

    def of(self, client: Client, connection: int) -> ClientUsage:
        """The usage that a new sequence from `client` on `connection` adds to."""
        usage = self._usages.setdefault(client.name or connection, ClientUsage(client))
        usage.client = client  # its weight may have changed
        return usage

    def open(self, client: Client, connection: int) -> None:
        """Notes that a sequence has been accepted."""
        self._num_open[client.name or connection] += 1

    def close(self, client: Client, connection: int) -> None:
        """Notes that a sequence has ended, and forgets usages that no longer matter."""
        key = client.name or connection
        self._num_open[key] -= 1
        if not self._num_open[key]:
            del self._num_open[key]
            if not client.name:
                del self._usages[key]
            if not self._num_open:
                self._usages.clear()

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

    def check_integrity(self, open_sequences: Iterable[tuple[Client, int]]) -> None:
        """Raises AssertionError unless these are the open sequences, each with its client and
        connection. For tests."""
        found = Counter(client.name or connection for client, connection in open_sequences)
        assert found == self._num_open, "open sequences"
        anonymous = {key for key in self._usages if isinstance(key, int)}
        assert anonymous <= found.keys() <= self._usages.keys(), "usages"
