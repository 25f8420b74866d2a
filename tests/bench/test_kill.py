from __future__ import annotations

import sys
from itertools import accumulate
from pathlib import Path

import pytest

from bench.kill import (
    Kill,
    Stream,
    compare,
    figures,
    pause_s,
    seconds_by_state,
    summarize,
)
from bench.metrics import Trace
from bench.processes import Samples, Supervised
from deploy.health import NOT_SERVING, SERVING, UNREACHABLE
from tests.bench.conftest import Bench
from tests.waiting import wait_for


def trace(*gaps: float) -> Trace:
    """A stream with its first chunk at 0 s and these gaps after it."""
    return Trace(1, 0.0, [(time, 1) for time in accumulate(gaps, initial=0.0)])


@pytest.mark.parametrize(
    ("gaps", "killed", "pause"),
    [
        ((0.1, 0.1, 0.1, 2.0, 0.1), 0.35, 1.8),
        ((0.1, 0.1, 0.3, 0.1, 0.9, 0.1), 0.35, 0.7),  # a gap after the one with the kill
        ((3.0, 0.1, 0.1, 0.5, 0.1), 3.25, 0.3),  # a long gap before the kill is no pause
        ((0.1, 0.1, 0.1, 0.1), 0.25, 0.0),
        ((0.1, 0.1), 5.0, None),
        ((), 0.0, None),
    ],
)
def test_the_pause_is_the_longest_gap_after_the_kill_less_two_steps(
    gaps: tuple[float, ...], killed: float, pause: float | None
) -> None:
    assert pause_s(trace(*gaps), killed) == (None if pause is None else pytest.approx(pause))


@pytest.mark.parametrize(
    ("received", "lost_doubled_changed"),
    [
        ([1, 2, 3, 4, 5, 6], (0, 0, 0)),
        ([1, 2, 5, 6], (2, 0, 0)),
        ([1, 2, 3], (3, 0, 0)),
        ([], (6, 0, 0)),
        ([1, 2, 3, 2, 3, 4, 5, 6], (0, 2, 0)),
        ([1, 2, 9, 4, 8, 6], (0, 0, 2)),
        ([1, 2, 9, 9], (2, 0, 2)),
    ],
)
def test_tokens_that_were_lost_doubled_and_changed_are_counted(
    received: list[int], lost_doubled_changed: tuple[int, int, int]
) -> None:
    right = [1, 2, 3, 4, 5, 6]
    assert compare([received], [right]) == lost_doubled_changed
    assert compare([right, received], [right, right]) == lost_doubled_changed


def test_tokens_in_a_loop_that_were_doubled_are_counted_once() -> None:
    assert compare([[7, 7, 7, 7]], [[7, 7, 7]]) == (0, 1, 0)
    assert compare([[7, 7]], [[7, 7, 7]]) == (1, 0, 0)


def test_a_state_lasts_until_the_next_sample() -> None:
    samples = [(0.0, SERVING), (1.0, NOT_SERVING), (1.5, UNREACHABLE), (3.0, SERVING)]
    expected = {SERVING: 0.0, NOT_SERVING: 0.25, UNREACHABLE: 1.5}
    assert seconds_by_state(samples, since=1.25) == pytest.approx(expected)


def test_the_figures_of_streams_that_continue_and_that_end() -> None:
    arrivals = trace(0.1, 0.1, 1.0).arrivals
    continued = Stream(1, 0.0, arrivals, [1, 2, 3, 4])
    ended = Stream(1, 0.0, arrivals[:2], [1, 2], error="reset")
    health = [
        (0.0, SERVING),
        (0.3, UNREACHABLE),
        (0.5, NOT_SERVING),
        (0.6, SERVING),
        (1.0, SERVING),
    ]

    found = figures([continued, ended], [[1, 2, 3, 4]] * 2, 0.25, 0.7, health)

    assert found.pause_s == pytest.approx([0.8])
    assert (found.streams_ended, found.errors) == (1, ["reset"])
    assert (found.tokens_lost, found.tokens_doubled, found.tokens_changed) == (2, 0, 0)
    assert (found.not_serving_s, found.unreachable_s) == pytest.approx((0.1, 0.2))


def test_a_summary_has_sums_medians_and_maxima() -> None:
    ended = Kill([], ["reset"] * 2, 2, 7, 0, 0, 0.0, 4.0, 5.0)
    kills = [ended, Kill([0.1, 0.3], [], 0, 0, 1, 2, 0.5, 0.0, 1.0)]
    found = summarize(kills)
    assert found["pause_s"] == {"median": pytest.approx(0.2), "max": 0.3}
    assert found["first_token_s"] == {"median": 3.0, "max": 5.0}
    assert (found["streams_ended"], found["tokens_lost"]) == (2, 7)
    assert summarize([ended])["pause_s"] is None


def test_a_supervised_process_is_started_again_until_it_is_closed(tmp_path: Path) -> None:
    log = tmp_path / "log"
    supervised = Supervised([sys.executable, "-c", "print('started')"], {}, log)
    wait_for(lambda: supervised.starts >= 3, "two restarts")
    supervised.close()
    starts = supervised.starts
    assert 2 <= log.read_text().count("started") <= starts
    assert supervised.starts == starts


def test_samples_have_times_and_end_with_the_block() -> None:
    values = iter(range(1000))
    with Samples(lambda: next(values), period_s=0.001) as samples:
        wait_for(lambda: len(samples.found) >= 3, "three samples")
    times, found = zip(*samples.found, strict=True)
    assert list(found) == list(range(len(found)))
    assert list(times) == sorted(times)
    assert next(values) == len(found)


@pytest.mark.system
def test_nothing_is_lost_when_this_server_is_killed(
    bench: Bench, capsys: pytest.CaptureFixture[str]
) -> None:
    # So many tokens that streams outlast the random delays of kills by far.
    words = "--mode kill --only nano-bf16 --kills 1 --tokens 1900 --kinds worker scheduler"
    found = bench(words)
    (entry,) = found["entries"].values()
    assert list(entry["kinds"]) == ["worker", "scheduler"]
    for kind in entry["kinds"].values():
        assert kind["streams_ended"] == kind["tokens_lost"] == kind["tokens_doubled"] == 0
        assert 0 < kind["pause_s"]["median"] <= kind["pause_s"]["max"]
        assert kind["first_token_s"]["max"] > 0
    assert entry["settings"]["dtype"] == "bfloat16"
    assert "nano-bf16, scheduler: pause" in capsys.readouterr().out
