"""A request that kills the worker every time it is computed ends alone."""

from __future__ import annotations

import grpc
import pytest

from tests.faults.faulty import faulty_stack, request
from tests.faults.streams import assert_undamaged, open_streams, undisturbed

pytestmark = pytest.mark.timeout(900)


def test_a_poisoned_request_ends_and_the_others_go_on() -> None:
    healthy = {f"{n}": request(n) for n in (10, 11)}
    poisoned = {"poisoned": request(9, trigger=True)}
    with faulty_stack("exit") as stack:
        expected = undisturbed(stack.address, healthy)
        with open_streams(stack.address, healthy) as streams:
            streams.wait_for_tokens(20, *healthy)
            with open_streams(stack.address, poisoned) as dying:
                dying.wait_until(lambda: not dying.open)
                error = dying.errors["poisoned"]
                assert isinstance(error, grpc.Call)
                assert error.code() is grpc.StatusCode.INTERNAL
                assert error.details() == "internal error"
            assert_undamaged(streams.wait_ended(), expected)
        assert_undamaged(undisturbed(stack.address, healthy), expected)
        stack.wait_serving()
        stack.wait_idle()
