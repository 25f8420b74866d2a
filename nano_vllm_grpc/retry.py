"""Decides whether and when to repeat a failed call."""

from __future__ import annotations

import random
import time

from nano_vllm_grpc.errors import LLMError, QueueFullError, UnavailableError

_MIN_DELAY_S, _MAX_DELAY_S = 0.02, 2.0
# For a server that was never reached, which more likely does not exist than is down.
_FIRST_CONTACT_S = 5.0


class Retries:
    """The waits between one call's attempts. They are exponential, with jitter so that many calls
    do not return at once, and no shorter than the server asked for (RetryInfo)."""

    def __init__(self, max_wait_s: float, deadline: float) -> None:
        """`max_wait_s`: from the first failure since anything was received; `deadline`: by
        `time.monotonic`."""
        self._max_wait_s = max_wait_s
        self._deadline = deadline
        self._failing_since: float | None = None
        self._backoff_s = _MIN_DELAY_S

    def progressed(self) -> None:
        """Starts afresh once something was received. The next failure begins a new wait."""
        self._failing_since = None
        self._backoff_s = _MIN_DELAY_S

    def next_delay(self, error: LLMError, *, reached: bool) -> float:
        """Seconds to wait after `error`; `reached`: whether a server has ever answered.

        Raises:
            LLMError: the error itself, if waiting does not help or would take too long.
        """
        if not isinstance(error, UnavailableError | QueueFullError):
            raise error from None
        asked = error.retry_after_s
        if isinstance(error, QueueFullError) and asked is None:
            raise error from None  # the request is too large, so waiting does not help
        delay = self._backoff_s * random.uniform(0.5, 1)
        self._backoff_s = min(2 * self._backoff_s, _MAX_DELAY_S)
        if asked is not None:
            delay = max(asked * random.uniform(1, 1.25), delay)
        max_wait_s = self._max_wait_s if reached else min(self._max_wait_s, _FIRST_CONTACT_S)
        now = time.monotonic()
        if self._failing_since is None:
            self._failing_since = now
        if now + delay > min(self._failing_since + max_wait_s, self._deadline):
            raise error from None
        return delay
