"""Token budgets of clients: a bucket of a minute's worth of tokens each, refilled continuously
(the token bucket of ITU-T I.371 and RFC 2697, with debt).

What is in progress is never cut off, so a bucket may be overdrawn; until it is paid off, new
requests are refused. The buckets are this process's: a scheduler that is replaced begins with full
ones. The module knows no clock.
"""

from __future__ import annotations

from dataclasses import dataclass

from scheduler_svc.core.client import Client

_MIN_RETRY_S = 0.01


@dataclass(slots=True)
class _Bucket:
    """`balance` tokens at the time `at`; `per_minute` is also the most that it holds."""

    per_minute: int
    balance: float
    at: float  # seconds

    def refill(self, per_minute: int, now: float) -> None:
        """Brings the balance up to date; from now on the bucket refills at `per_minute`."""
        self.balance += max(now - self.at, 0.0) * self.per_minute / 60
        self.balance = min(self.balance, self.per_minute, per_minute)
        self.per_minute, self.at = per_minute, max(now, self.at)

    def wait_s(self) -> float:
        """The seconds until the balance is positive, 0 if it is."""
        return max(-self.balance * 60 / self.per_minute, _MIN_RETRY_S) if self.balance <= 0 else 0.0


class Budgets:
    """The buckets of all clients that have a limit, which frontends read from files: they are as
    many as those name. Times are in seconds, of one clock."""

    def __init__(self) -> None:
        self._buckets: dict[tuple[str, str], _Bucket] = {}  # by client's name and limit's

    def __bool__(self) -> bool:
        return bool(self._buckets)

    def refusal(self, client: Client, now: float) -> tuple[str, float] | None:
        """The reason that a client may not begin another request, and the seconds until it may."""
        waits = []
        for limit, per_minute in (
            ("input_tokens_per_minute", client.input_tokens_per_minute),
            ("output_tokens_per_minute", client.output_tokens_per_minute),
        ):
            if per_minute:
                wait_s = self._bucket(client.name, limit, per_minute, now).wait_s()
                waits.append((wait_s, f"{limit}: {per_minute} tokens, which are spent"))
        wait_s, reason = max(waits, default=(0.0, ""))
        return (f"{reason}; more in {wait_s:.1f} s", wait_s) if wait_s else None

    def charge_input(self, client: Client, num_tokens: int, now: float) -> None:
        if per_minute := client.input_tokens_per_minute:
            bucket = self._bucket(client.name, "input_tokens_per_minute", per_minute, now)
            bucket.balance -= num_tokens

    def charge_output(self, client: Client, num_tokens: int, now: float) -> None:
        if per_minute := client.output_tokens_per_minute:
            bucket = self._bucket(client.name, "output_tokens_per_minute", per_minute, now)
            bucket.balance -= num_tokens

    def _bucket(self, name: str, limit: str, per_minute: int, now: float) -> _Bucket:
        bucket = self._buckets.setdefault((name, limit), _Bucket(per_minute, per_minute, now))
        bucket.refill(per_minute, now)
        return bucket
