"""The faults of a stack: which processes were lost, and for how long it could not serve."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Mapping
from dataclasses import dataclass, field

_MAX_FAULTS = 20
_SAME_S = 2.0  # events so soon after the end of a fault belong to it


@dataclass
class Fault:
    """Times are by `time.monotonic`; a fault without a pause ends when it begins."""

    began: float
    ended: float | None = None  # None: it lasts
    lost: list[str] = field(default_factory=list)  # names of processes

    @property
    def pause_s(self) -> float | None:
        return None if self.ended is None else self.ended - self.began


class Faults:
    """Finds faults in the health of the stack and the pids of its processes, from the moment that
    the stack has served."""

    def __init__(self) -> None:
        self.recent: deque[Fault] = deque(maxlen=_MAX_FAULTS)
        self.restarts: Counter[str] = Counter()  # by process
        self.serving = False
        self._has_served = False
        self._pids: dict[str, int | None] = {}

    def set_serving(self, serving: bool, now: float) -> None:
        """Call this whenever the health changes."""
        self.serving = serving
        if not self._has_served:
            self._has_served = serving
        elif serving:
            self._current(now).ended = now
        else:
            fault = self._current(now)
            if not fault.pause_s:
                fault.began = now
            fault.ended = None

    def observe(self, pids: Mapping[str, int | None], now: float) -> None:
        """Notices which processes have ended or been replaced. `pids`: by name, None for a process
        that does not run."""
        for name, pid in pids.items():
            known = self._pids.get(name, pid)
            self._pids[name] = pid
            if not self._has_served or pid == known:
                continue
            if pid:
                self.restarts[name] += 1
            if known and name not in (fault := self._current(now)).lost:
                fault.lost.append(name)

    def _current(self, now: float) -> Fault:
        """Returns the fault to which an event at this time belongs."""
        last = self.recent[-1] if self.recent else None
        if last is None or (last.ended is not None and now - last.ended > _SAME_S):
            last = Fault(now, now)
            self.recent.append(last)
        return last
