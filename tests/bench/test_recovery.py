from __future__ import annotations

import pytest

from bench.kill import STREAMS
from bench.recovery import record
from tests.stack import DEMO_MODEL, faulty_environment


@pytest.mark.system
def test_a_recovery_is_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    tokens = 1900  # so many that streams outlast the wait for the kill by far
    for name, value in faulty_environment(EXPORT_TIMEOUT_S="100").items():
        monkeypatch.setenv(name, value)  # a span that is not accepted in time is lost
    recorded = record(DEMO_MODEL, tokens)
    assert [len(times) for times in recorded["streams"]] == [tokens] * STREAMS
    for times in recorded["streams"]:
        assert times == sorted(times)
        assert times[0] < 0 < times[-1]  # the kill is at 0
    recoveries = [span for span in recorded["spans"] if span["name"] == "recovery"]
    assert {span["service"] for span in recoveries} == {"scheduler"}
    assert len({span["trace"] for span in recoveries}) == STREAMS
    assert all(0 < span["start_s"] < span["end_s"] for span in recoveries)
