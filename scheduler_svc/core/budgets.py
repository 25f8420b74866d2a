"""Token budgets of clients: buckets that hold a minute's tokens and are refilled continuously
(the token bucket of ITU-T I.371 and RFC 2697, with debt).

A request in progress is never cut off, so a bucket may be overdrawn. New requests are rejected
until the debt is paid off. The buckets belong to this process, so a replaced scheduler begins with
full buckets. The module reads no clock.
"""

from __future__ import annotations

from dataclasses import dataclass

from scheduler_svc.core.client import Client

INPUT, OUTPUT = "input_tokens_per_minute", "output_tokens_per_minute"  # fields of `Client`
_MIN_RETRY_S = 0.01


@dataclass(slots=True)
class _Bucket:
    """A bucket with `balance` tokens at the time `at`. `per_minute` is also its capacity."""

    per_minute: int
    balance: float
    at: float  # seconds

    def refill(self, per_minute: int, now: float) -> None:
        """Updates the balance. From now on the bucket refills at `per_minute`."""
        self.balance += max(now - self.at, 0.0) * self.per_minute / 60
        self.balance = min(self.balance, self.per_minute, per_minute)
        self.per_minute, self.at = per_minute, max(now, self.at)

    def wait_s(self) -> float:
        """The seconds until the balance is positive; 0 if it is positive now."""
        return max(-self.balance * 60 / self.per_minute, _MIN_RETRY_S) if self.balance <= 0 else 0.0


class Budgets:
    """The buckets of all clients that have a limit. Frontends read the limits from files, which
    bound the number of buckets. Times are in seconds of one clock."""

    def __init__(self) -> None:
        self._buckets: dict[tuple[str, str], _Bucket] = {}  # by client name and limit name

    def __bool__(self) -> bool:
        return bool(self._buckets)

    def refusal(self, client: Client, now: float) -> tuple[str, str, float] | None:
        """The limit that keeps a client from beginning a request now, the reason, and the seconds
        until the client may, or None."""
        found, reason, longest_s = "", "", 0.0
        for limit in (INPUT, OUTPUT):
            bucket = self._bucket(client, limit, now)
            if bucket and (wait_s := bucket.wait_s()) > longest_s:
                reason = f"{limit}: all {bucket.per_minute} tokens are spent"
                found, longest_s = limit, wait_s
        return (found, f"{reason}; retry in {longest_s:.1f} s", longest_s) if found else None

    def charge(self, client: Client, limit: str, num_tokens: int, now: float) -> None:
        """Charges tokens to a client's INPUT or OUTPUT, if that has a limit."""
        if bucket := self._bucket(client, limit, now):
            bucket.balance -= num_tokens

    def _bucket(self, client: Client, limit: str, now: float) -> _Bucket | None:
        per_minute = getattr(client, limit)
        if not per_minute:
            return None
        full = _Bucket(per_minute, per_minute, now)
        bucket = self._buckets.setdefault((client.name, limit), full)
        bucket.refill(per_minute, now)
        return bucket
