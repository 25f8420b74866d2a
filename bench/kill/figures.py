"""The figures of kills, from what clients, health and memory showed."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise, takewhile
from statistics import median
from typing import Any

from bench.metrics import Trace
from deploy.health import NOT_SERVING, SERVING

_TOTALS = ("streams_ended", "tokens_lost", "tokens_doubled", "tokens_changed")
_TIMES = ("pause_s", "not_serving_s", "unreachable_s", "first_token_s")
_SIZES = ("pss_before_mb", "pss_peak_mb")


@dataclass
class Stream(Trace):
    """One completion, as far as its client received it."""

    token_ids: list[int] = field(default_factory=list)
    error: str = ""  # why the stream ended early


@dataclass(frozen=True)
class Kill:
    """The effects of one kill."""

    pause_s: list[float]  # of the streams that continued
    errors: list[str]  # of the streams that ended
    streams_ended: int
    tokens_lost: int
    tokens_doubled: int
    tokens_changed: int
    not_serving_s: float
    unreachable_s: float
    first_token_s: float  # from the kill to the first token of a new request
    pss_before_mb: float
    pss_peak_mb: float


def figures(
    streams: Sequence[Stream],
    expected: Sequence[Sequence[int]],
    killed: float,
    first_token_s: float,
    health: Sequence[tuple[float, str]],
    memory: Sequence[tuple[float, float]],
) -> Kill:
    pauses = [pause_s(each, killed) for each in streams if not each.error]
    errors = [each.error for each in streams if each.error]
    states = seconds_by_state(health, killed)
    not_serving_s = states.pop(NOT_SERVING, 0.0)
    return Kill(
        [pause for pause in pauses if pause is not None],
        errors,
        len(errors),
        *compare([each.token_ids for each in streams], expected),
        not_serving_s,
        sum(seconds for state, seconds in states.items() if state != SERVING),
        first_token_s,
        [size for at, size in memory if at <= killed][-1],
        max(size for at, size in memory if at > killed),
    )


def pause_s(stream: Trace, killed: float) -> float | None:
    """The longest gap between two chunks that ends after the kill, less two ordinary steps of the
    stream, in seconds. An ordinary step is the median gap before the kill.

    Args:
        killed: the time of the kill, by the clock of the arrivals.

    Returns:
        None if there are no such gaps.
    """
    gaps = [(end - start, end > killed) for (start, _), (end, _) in pairwise(stream.arrivals)]
    before = [gap for gap, is_after in gaps if not is_after]
    after = [gap for gap, is_after in gaps if is_after]
    return max(max(after) - 2 * median(before), 0.0) if before and after else None


def compare(
    received: Sequence[Sequence[int]], expected: Sequence[Sequence[int]]
) -> tuple[int, int, int]:
    """Counts how many tokens of completions were lost, doubled and changed.

    Each completion's common beginning and end with the expected one are left out. In what remains
    between them, missing tokens were lost, surplus ones doubled, and different ones changed.
    """
    lost = doubled = changed = 0
    for found, right in zip(received, expected, strict=True):
        start = _num_common(found, right)
        end = _num_common(found[start:][::-1], right[start:][::-1])
        middle, wanted = found[start : len(found) - end], right[start : len(right) - end]
        lost += max(len(wanted) - len(middle), 0)
        doubled += max(len(middle) - len(wanted), 0)
        changed += sum(a != b for a, b in zip(middle, wanted, strict=False))
    return lost, doubled, changed


def _num_common(a: Sequence[int], b: Sequence[int]) -> int:
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(a, b, strict=False)))


def seconds_by_state(samples: Sequence[tuple[float, str]], since: float) -> dict[str, float]:
    """The seconds after `since` in each state. A sample is a time and a state, which lasts until
    the next sample; the last sample does not count."""
    seconds: defaultdict[str, float] = defaultdict(float)
    for (start, state), (end, _) in pairwise(samples):
        seconds[state] += max(end - max(start, since), 0.0)
    return seconds


def summarize(kills: Sequence[Kill]) -> dict[str, Any]:
    """The figures of all kills of a kind: sums, and medians and maxima, which are None if nothing
    was measured."""
    found: dict[str, Any] = {name: sum(getattr(kill, name) for kill in kills) for name in _TOTALS}
    for name in (*_TIMES, *_SIZES):
        values = [getattr(kill, name) for kill in kills]
        if name == "pause_s":
            values = [pause for pauses in values for pause in pauses]
        found[name] = {"median": median(values), "max": max(values)} if values else None
    return found
