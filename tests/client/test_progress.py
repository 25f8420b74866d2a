from __future__ import annotations

from contextlib import ExitStack, suppress

import pytest

from nano_vllm_grpc.progress import Progress


def test_the_clock_of_each_phase_runs_while_a_request_is_in_it() -> None:
    now = 0.0
    progress = Progress(4, shown=False, clock=lambda: now)
    assert (progress.rate("prefill"), progress.rate("decode")) == (0.0, 0.0)
    with ExitStack() as stack:
        first, second = (stack.enter_context(progress.request(n)) for n in (100, 50))
        now = 2.0  # both prompts are computed until here
        first(1)
        now = 3.0
        second(1)
        assert progress.rate("prefill") == pytest.approx(150 / 3)
        now = 5.0  # both decode, since 2.0 and 3.0
        first(6)
        assert progress.rate("decode") == pytest.approx(6 / 3)
    now = 100.0  # idle: neither clock runs
    with progress.request(10), suppress(ValueError), progress.request(10):
        assert progress.rate("decode") == pytest.approx(6 / 3)
        assert progress.rate("prefill") == pytest.approx(150 / 3)
        now = 101.0
        raise ValueError("failed")
    now = 109.0  # no request is in prefill any more
    with progress.request(10):
        assert progress.rate("prefill") == pytest.approx(150 / 4)
