"""Each client's use of the machine, at each priority: the virtual token counters of fair
queueing among requests whose cost shows only as they run (Sheng et al., "Fairness in Serving Large
Language Models", OSDI 2024), with weights.

The client with the smallest counter goes next. A prompt's tokens count when it is admitted, less
those found in the cache; a generated token counts when it is sampled, twice as much. So a client
whose requests run on, in all slots, gets no further one while others wait. A client that comes back
is level with the one that has had least of those that wait: time without requests earns nothing.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from scheduler_svc.core.client import Client

_OUTPUT_COST = 2  # prompt tokens per generated token, as in the paper


class Level:
    """The lines of one priority."""

    __slots__ = ("last_left", "lines", "num_open", "priority")

    def __init__(self, priority: int) -> None:
        self.priority = priority
        self.num_open = 0
        self.lines: dict[str | int, Line] = {}  # by name, or by connection if anonymous
        self.last_left: Line | None = None

    def floor(self) -> float:
        """The least that one of the clients that wait has had; if none does, what the one had that
        waited last."""
        waiting = [line.served for line in self.lines.values() if line.num_waiting]
        if waiting:
            return min(waiting)
        return self.last_left.served if self.last_left else 0.0


class Line:
    """One client's line at one priority; for anonymous requests, one connection's.

    `served` is in prompt tokens, divided by the client's weight.
    """

    __slots__ = ("client", "key", "level", "num_open", "num_waiting", "served")

    def __init__(self, level: Level, key: str | int, client: Client) -> None:
        self.client = client
        self.level = level
        self.key = key
        self.served = 0.0
        self.num_open = 0  # sequences of this line that have not ended
        self.num_waiting = 0  # those of them that wait and have never run

    def add_input(self, num_tokens: int) -> None:
        self.served += num_tokens / self.client.weight

    def add_output(self, num_tokens: int) -> None:
        self.served += _OUTPUT_COST * num_tokens / self.client.weight

    def join(self) -> None:
        """Another sequence waits for the first time."""
        if not self.num_waiting:
            self.served = max(self.served, self.level.floor())
        self.num_waiting += 1

    def leave(self) -> None:
        """One that waited does so no longer."""
        self.num_waiting -= 1
        if not self.num_waiting:
            self.level.last_left = self


class Lines:
    """All lines that matter: a name's are kept as long as anything of their priority is open."""

    def __init__(self) -> None:
        self._levels: dict[int, Level] = {}
        self._num_lines = 0
        self._num_open: Counter[str] = Counter()  # sequences, by client's name

    def __len__(self) -> int:
        return self._num_lines

    @property
    def num_clients(self) -> int:
        """Clients with open sequences; anonymous ones are one."""
        return len(self._num_open)

    def line_of(self, client: Client, connection: int, priority: int) -> Line:
        """The line of a new sequence that came from `client` on that connection."""
        level = self._levels.get(priority)
        if level is None:
            level = self._levels[priority] = Level(priority)
        key = client.name or connection
        line = level.lines.get(key)
        if line is None:
            line = level.lines[key] = Line(level, key, client)
            self._num_lines += 1
        line.client = client  # its weight may have changed
        return line

    def open(self, line: Line) -> None:
        self._num_open[line.client.name] += 1
        line.num_open += 1
        line.level.num_open += 1

    def check_integrity(self, lines: Iterable[Line]) -> None:
        """Raises AssertionError unless these are the lines of the open sequences. For tests."""
        num_open = Counter(lines)
        assert all(line.num_open == n for line, n in num_open.items()), "open sequences of a line"
        clients = Counter(line.client.name for line in num_open.elements())
        assert clients == self._num_open, "open sequences of a client"
        levels = Counter(line.level.priority for line in num_open.elements())
        assert levels == {p: level.num_open for p, level in self._levels.items()}, "levels"
        kept = [line for level in self._levels.values() for line in level.lines.values()]
        assert len(kept) == self._num_lines, "lines"
        assert all(line.num_open or line.client.name for line in kept), "an anonymous line is kept"

    def close(self, line: Line) -> None:
        """Notes that a sequence has ended, and forgets what then no longer matters."""
        level, name = line.level, line.client.name
        self._num_open[name] -= 1
        if not self._num_open[name]:
            del self._num_open[name]
        line.num_open -= 1
        level.num_open -= 1
        if not level.num_open:
            del self._levels[level.priority]
            self._num_lines -= len(level.lines)
        elif not line.num_open and not line.client.name:
            del level.lines[line.key]
            self._num_lines -= 1
