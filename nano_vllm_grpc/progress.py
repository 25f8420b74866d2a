"""The progress bar of `generate`: prompts done, prefill and decode tokens/s."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager


class Progress:
    """Counts the requests of one `generate` call and, if `shown`, draws them on stderr.

    A request is in prefill from when it is sent until its first token. Then its prompt's tokens
    count as done and it decodes. A phase's clock runs while any request is in that phase.
    """

    def __init__(
        self, total: int, *, shown: bool, clock: Callable[[], float] = time.perf_counter
    ) -> None:
        from tqdm import tqdm  # imported here, because services import this package, too

        self.shown = shown
        self._bar = tqdm(total=total, desc="Generating", unit="req", disable=not shown)
        self._clock = clock
        self._last = clock()
        # By phase: requests in it, its seconds and its tokens.
        self._requests = {"prefill": 0, "decode": 0}
        self._seconds = {"prefill": 0.0, "decode": 0.0}
        self._tokens = {"prefill": 0, "decode": 0}

    def rate(self, phase: str) -> float:
        """Tokens per second of a phase, 0 before the first."""
        return self._tokens[phase] / self._seconds[phase] if self._seconds[phase] else 0.0

    @contextmanager
    def request(self, prompt_tokens: int) -> Iterator[Callable[[int], None]]:
        """Spans one request; yields a function to call with the number of tokens in each chunk."""
        phase = "prefill"
        self._tick()
        self._requests[phase] += 1

        def received(tokens: int) -> None:
            nonlocal phase
            self._tick()
            if tokens and phase == "prefill":
                self._requests[phase] -= 1
                self._tokens[phase] += prompt_tokens
                phase = "decode"
                self._requests[phase] += 1
                tokens -= 1
            self._tokens["decode"] += tokens
            self._show()

        try:
            yield received
            self._bar.update()
        finally:
            self._tick()
            self._requests[phase] -= 1

    def close(self) -> None:
        self._show()
        self._bar.close()

    def _tick(self) -> None:
        now = self._clock()
        passed, self._last = now - self._last, now
        for phase, requests in self._requests.items():
            if requests:
                self._seconds[phase] += passed

    def _show(self) -> None:
        # refresh=False leaves drawing to the bar, which does so at most ten times a second.
        if self.shown:
            rates = ", ".join(f"{phase} {self.rate(phase):.0f} tok/s" for phase in self._seconds)
            self._bar.set_postfix_str(rates, refresh=False)
            self._bar.update(0)
