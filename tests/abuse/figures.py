"""Times and counts of what honest clients saw in a stretch of time, a *window*."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

_SILENT_S = 3.0  # without any token on any stream, health should have said something
_SILENT_CHECKS = 100  # answers meanwhile: fewer, and the machine itself was silent
_FLOWING_S = 0.2  # since a token on some stream, nothing is out of order
_LATE_S = 0.5  # after a change, tokens may still be on their way


@dataclass
class Figures:
    """The figures of one window; times in milliseconds."""

    seconds: float = 0.0
    tokens: int = 0
    gaps: int = 0  # between chunks of a stream, as many as were measured
    gap_p50_ms: float = 0.0
    gap_p99_ms: float = 0.0
    gap_worst_ms: float = 0.0
    first_p50_ms: float = 0.0  # from a request to its first chunk
    first_worst_ms: float = 0.0
    structured_worst_ms: float = 0.0  # the same of requests with a schema that is new
    health_ms: dict[str, float] = field(default_factory=dict)  # slowest answer, by service
    connect_ms: float = 0.0  # slowest new connection with an answer of health
    no_connection: int = 0
    not_serving: int = 0  # answers
    lies: int = 0  # SERVING without tokens for seconds, or NOT_SERVING with tokens just now
    errors: dict[str, int] = field(default_factory=dict)  # honest streams, by status
    wrong: int = 0  # honest streams with other tokens than undisturbed
    stuck: int = 0  # honest streams without a chunk since, long after the end

    def harm(self) -> Counter[str]:
        """Counts whatever no attack may cause, however slow it makes the honest."""
        harm = Counter(self.errors)
        for name in ("wrong", "stuck", "lies", "no_connection"):
            harm[name.replace("_", " ")] += getattr(self, name)
        return +harm


class Recorder:
    """Gathers what happens in one window after another."""

    def __init__(self) -> None:
        self._last_token_at = self._served_at = time.monotonic()
        self._silent_checks = 0  # that said SERVING since the last token
        self.begin()

    def begin(self) -> None:
        self._began_at = time.monotonic()
        self._gaps: list[float] = []
        self._firsts: list[float] = []
        self._structured: list[float] = []
        self._health: dict[str, list[float]] = {}
        self._connects: list[float] = []
        self._errors: Counter[str] = Counter()
        self._figures = Figures()

    def token(self, waited_s: float, count: int, *, first: bool) -> None:
        """Notes a chunk of `count` tokens, `waited_s` after the previous, or after the request."""
        self._last_token_at = time.monotonic()
        self._silent_checks = 0
        self._figures.tokens += count
        (self._firsts if first else self._gaps).append(waited_s)

    def structured(self, waited_s: float) -> None:
        """Notes the first chunk of a request with a schema, besides `token`."""
        self._structured.append(waited_s)

    def error(self, status: str) -> None:
        self._errors[status] += 1

    def wrong(self) -> None:
        self._figures.wrong += 1

    def health(self, service: str, took_s: float, *, serving: bool) -> None:
        """Notes an answer of a service, or that there was none: `serving` is False."""
        self._health.setdefault(service, []).append(took_s)
        self._figures.not_serving += not serving
        if service != "frontend":
            return
        now = time.monotonic()
        silent_s = now - self._last_token_at
        if serving:
            self._served_at = now
            self._silent_checks += 1
            silent = silent_s > _SILENT_S and self._silent_checks > _SILENT_CHECKS
            self._figures.lies += silent
        else:
            self._figures.lies += silent_s < _FLOWING_S and now - self._served_at > _LATE_S

    def connect(self, took_s: float, *, answered: bool) -> None:
        """Notes an attempt to connect and ask for health."""
        self._connects.append(took_s)
        self._figures.no_connection += not answered

    def end(self, stuck: int = 0) -> Figures:
        """Returns the window's figures, and begins another."""
        figures = self._figures
        figures.seconds = time.monotonic() - self._began_at
        figures.stuck = stuck
        figures.gaps = len(self._gaps)
        figures.gap_p50_ms, figures.gap_p99_ms, figures.gap_worst_ms = _quantiles(self._gaps)
        figures.first_p50_ms, _, figures.first_worst_ms = _quantiles(self._firsts)
        _, _, figures.structured_worst_ms = _quantiles(self._structured)
        figures.health_ms = {name: _quantiles(each)[2] for name, each in self._health.items()}
        figures.connect_ms = _quantiles(self._connects)[2]
        figures.errors = dict(self._errors)
        self.begin()
        return figures


def _quantiles(times_s: Sequence[float]) -> tuple[float, float, float]:
    """p50, p99 and the longest, in milliseconds; zeros if there are none."""
    if not times_s:
        return 0.0, 0.0, 0.0
    ordered = sorted(times_s)
    last = len(ordered) - 1
    return tuple(round(ordered[round(q * last)] * 1e3, 2) for q in (0.5, 0.99, 1.0))  # type: ignore[return-value]
