"""The progress bar of `generate`: prompts done, prefill and decode tokens/s."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager


class PhaseRates:
    """Prefill and decode tokens/s as a client sees them from the events of its streams.

    A request is in prefill from when it is sent until its first token. Then its prompt's tokens
    count as done and it decodes. A phase's clock runs while any request is in that phase.
    """

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self._last = clock()
        self._in_prefill = 0
        self._in_decode = 0
        self._prefill_s = 0.0
        self._decode_s = 0.0
        self._prefill_tokens = 0
        self._decode_tokens = 0

    @property
    def prefill(self) -> float:
        """Tokens per second, 0 before the first."""
        return self._prefill_tokens / self._prefill_s if self._prefill_s else 0.0

    @property
    def decode(self) -> float:
        """Tokens per second, 0 before the first."""
        return self._decode_tokens / self._decode_s if self._decode_s else 0.0

    def sent(self) -> None:
        self._tick()
        self._in_prefill += 1

    def first_token(self, prompt_tokens: int) -> None:
        self._tick()
        self._in_prefill -= 1
        self._in_decode += 1
        self._prefill_tokens += prompt_tokens

    def decoded(self, tokens: int) -> None:
        self._tick()
        self._decode_tokens += tokens

    def ended(self, *, had_tokens: bool) -> None:
        self._tick()
        if had_tokens:
            self._in_decode -= 1
        else:
            self._in_prefill -= 1

    def _tick(self) -> None:
        now = self._clock()
        passed, self._last = now - self._last, now
        if self._in_prefill:
            self._prefill_s += passed
        if self._in_decode:
            self._decode_s += passed


class Progress:
    """Counts the requests of one `generate` call and, if `shown`, draws them on stderr."""

    def __init__(self, total: int, *, shown: bool) -> None:
        from tqdm import tqdm  # imported here, because services import this package, too

        self.shown = shown
        self._rates = PhaseRates()
        self._bar = tqdm(total=total, desc="Generating", unit="req", disable=not shown)

    @contextmanager
    def request(self, prompt_tokens: int) -> Iterator[Callable[[int], None]]:
        """Spans one request; yields a function to call with the number of tokens in each chunk."""
        had_tokens = False
        self._rates.sent()

        def received(tokens: int) -> None:
            nonlocal had_tokens
            if tokens and not had_tokens:
                had_tokens = True
                self._rates.first_token(prompt_tokens)
                tokens -= 1
            self._rates.decoded(tokens)
            self._show()

        try:
            yield received
            self._bar.update()
        finally:
            self._rates.ended(had_tokens=had_tokens)

    def close(self) -> None:
        self._show()
        self._bar.close()

    def _show(self) -> None:
        # refresh=False leaves drawing to the bar, which does so at most ten times a second.
        if self.shown:
            self._bar.set_postfix_str(
                f"prefill {self._rates.prefill:.0f} tok/s, decode {self._rates.decode:.0f} tok/s",
                refresh=False,
            )
            self._bar.update(0)
