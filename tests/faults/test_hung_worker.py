"""A worker that hangs is found and replaced; streams notice no more than a pause."""

from __future__ import annotations

from pathlib import Path

from tests.faults.faulty import faulty_stack, health_history, request
from tests.faults.streams import REQUESTS, assert_undamaged, open_streams, undisturbed
from tests.stack import running_stack

REPLACED = ("SERVING", "NOT_SERVING", "SERVING")


def test_a_stopped_worker_is_replaced_and_the_other_rank_stays() -> None:
    """While it works, and while it has nothing to do."""
    names = ("greedy", "seeded", "several", "penalties")
    requests = {name: REQUESTS[name] for name in names}
    with running_stack(tp=2, kv_blocks=256) as stack, health_history(stack.address) as health:
        health.wait_for(*REPLACED[:1])
        expected = undisturbed(stack.address, requests)
        first = stack.pids()
        with open_streams(stack.address, requests) as streams:
            streams.wait_for_tokens(20, *names)
            stopped = stack.stop("worker", 1)
            streams.require_open(*names)
            stack.wait_replaced("worker", 1, stopped)
            assert_undamaged(streams.wait_ended(), expected)
        health.wait_for(*REPLACED)
        stack.wait_serving()
        stack.wait_idle()
        second = stack.pids()
        assert {key for key in first if first[key] != second[key]} == {("worker", 1)}

        stack.wait_replaced("worker", 0, stack.stop("worker", 0))
        health.wait_for(*REPLACED, *REPLACED[1:])
        assert_undamaged(undisturbed(stack.address, requests), expected)


def test_a_step_that_never_ends_ends_its_worker(tmp_path: Path) -> None:
    healthy = {f"{n}": request(n) for n in range(10, 13)}
    with faulty_stack(f"hang:{tmp_path}/hung") as stack:
        expected = undisturbed(stack.address, healthy)
        last = {"last": request(9, trigger=True)}
        with open_streams(stack.address, healthy) as streams:
            streams.wait_for_tokens(20, *healthy)
            worker = stack.pid("worker")
            streams.require_open(*healthy)
            with open_streams(stack.address, last) as hanging:
                stack.wait_replaced("worker", 0, worker)
                assert hanging.wait_ended()["last"].num_tokens == 200
            assert_undamaged(streams.wait_ended(), expected)
        assert "does not end" in stack.stack.log("worker-0").read_text()
        assert (tmp_path / "hung").exists()
        stack.wait_idle()
