"""A worker that hangs is found and replaced; streams notice no more than a pause."""

from __future__ import annotations

from pathlib import Path

from tests.faults.faulty import faulty_stack, request
from tests.faults.streams import assert_undamaged, open_streams, undisturbed


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
