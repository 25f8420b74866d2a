"""Figures of a *window*: a stretch of time in which honest clients stream."""

from __future__ import annotations

import time
from collections import Counter
from dataclasses import dataclass, field

NOT_SERVING, STUCK = "not serving", "stuck"  # kinds of harm: answers of health, and streams

_SILENT_S = 3.0  # without any token on any stream, health should have said something
_SILENT_CHECKS = 100  # answers meanwhile: fewer, and the machine itself was silent
_FLOWING_S = 0.2  # since a token on some stream, nothing is out of order
_LATE_S = 0.5  # after a change, tokens may still be on their way


@dataclass
class Figures:
    """The figures of one window; times in milliseconds.

    `harm` counts whatever no attack may cause, however slow it makes the honest: their errors by
    status, streams that are `stuck` or got `wrong` tokens, connections without an answer, and
    answers of health that are `not serving` or `lies`: SERVING without tokens for seconds, or
    NOT_SERVING with tokens just now.
    """

    tokens: int = 0
    gap_p99_ms: float = 0.0  # between chunks of a stream
    health_ms: float = 0.0  # slowest answer of health, also on a new connection
    harm: Counter[str] = field(default_factory=Counter)


class Recorder:
    """Gathers what happens in one window after another."""

    def __init__(self) -> None:
        self._last_token_at = self._served_at = time.monotonic()
        self._silent_checks = 0  # that said SERVING since the last token
        self.begin()

    def begin(self) -> None:
        self._gaps: list[float] = []
        self._figures = Figures()

    def tokens(self, count: int, gap_s: float | None) -> None:
        """Notes a chunk, `gap_s` after the previous one of its stream; None: it is the first."""
        self._last_token_at = time.monotonic()
        self._silent_checks = 0
        self._figures.tokens += count
        if gap_s is not None:
            self._gaps.append(gap_s)

    def harm(self, kind: str) -> None:
        self._figures.harm[kind] += 1

    def health(self, service: str, took_s: float, *, serving: bool) -> None:
        """Notes an answer of a service, or that there was none: `serving` is False."""
        self._took(took_s)
        if not serving:
            self.harm(NOT_SERVING)
        if service != "frontend":
            return
        now = time.monotonic()
        silent_s = now - self._last_token_at
        if serving:
            self._served_at = now
            self._silent_checks += 1
            lies = silent_s > _SILENT_S and self._silent_checks > _SILENT_CHECKS
        else:
            lies = silent_s < _FLOWING_S and now - self._served_at > _LATE_S
        if lies:
            self.harm("lies")

    def connect(self, took_s: float, *, answered: bool) -> None:
        """Notes an attempt to connect and ask for health."""
        self._took(took_s)
        if not answered:
            self.harm("no connection")

    def end(self, stuck: int = 0) -> Figures:
        """Returns the window's figures, and begins another."""
        figures = self._figures
        if stuck:
            figures.harm[STUCK] = stuck
        if self._gaps:
            p99 = sorted(self._gaps)[round(0.99 * (len(self._gaps) - 1))]
            figures.gap_p99_ms = round(1e3 * p99, 2)
        self.begin()
        return figures

    def _took(self, seconds: float) -> None:
        self._figures.health_ms = max(self._figures.health_ms, round(1e3 * seconds, 2))
