"""A request that kills a worker or the scheduler every time ends alone. A step that never ends ends
its worker."""

from __future__ import annotations

from pathlib import Path

import grpc

from frontend.engines.deaths import MIN_DEATHS_BEFORE_ALONE
from nano_vllm_grpc.pb.frontend_pb2 import GenerateRequest, SamplingParams, TokenIds
from tests.faults.faulty_services.sitecustomize import (
    DEADLY_TOKEN,
    FAILURE,
    READ,
    STEP,
    TOKEN,
    TRIGGER,
)
from tests.faults.streams import OpenStreams, assert_undamaged, open_streams, undisturbed
from tests.stack import running_stack
from worker_svc.hang_watch import EXIT_HUNG

OF_WORKERS = 9  # the first token of a request that kills workers
STEPS = 20  # after which the streams wait for the deadly request


def request(first: int, *, trigger: bool = False) -> GenerateRequest:
    """A greedy request with a prompt of 40 tokens, the workers' trigger among them or not."""
    ids = [first, *range(100, 136), *(TRIGGER if trigger else (1500, 1500, 1501))]
    params = SamplingParams(temperature=0, max_tokens=200, ignore_eos=True)
    return GenerateRequest(token_ids=TokenIds(ids=ids), sampling=params)


def assert_internal_error(streams: OpenStreams, name: str) -> None:
    streams.wait_until(lambda: name not in streams.open)
    error = streams.errors[name]
    assert isinstance(error, grpc.Call)
    assert error.code() is grpc.StatusCode.INTERNAL
    assert error.details() == "internal error"


def test_a_request_that_kills_a_service_ends_and_the_others_go_on(tmp_path: Path) -> None:
    """Schedulers that are killed at the same time, for no reason that lies in a request, neither
    hide it nor cost another its answer."""
    deaths = tmp_path / "deaths"  # of schedulers
    deaths.touch()
    healthy = {f"{n}": request(n) for n in range(10, 18)}
    environment = {"SCHEDULER_FAULT": str(deaths), "WORKER_FAULT": "exit"}
    with running_stack(environment, frontends=2, kv_blocks=512) as stack:
        expected = undisturbed(stack.address, healthy)
        for kind in (READ, STEP, TOKEN, FAILURE, OF_WORKERS):
            deadly = request(kind, trigger=kind == OF_WORKERS)
            died_before = deaths.stat().st_size
            with stack.hold.after(STEPS), open_streams(stack.address, healthy) as streams:
                streams.wait_for_tokens(STEPS)
                with open_streams(stack.address, {"deadly": deadly}) as dying:
                    if kind == TOKEN:
                        pid = stack.kill("scheduler")
                        stack.wait_replaced("scheduler", 0, pid)
                        stack.kill("scheduler")
                    stack.hold.release()
                    assert_internal_error(dying, "deadly")
                assert_undamaged(streams.wait_ended(), expected)
            died = deaths.stat().st_size - died_before
            late = DEADLY_TOKEN if kind == TOKEN else 0  # its tokens may come from later schedulers
            assert died <= MIN_DEATHS_BEFORE_ALONE + 1 + late, kind
            assert bool(died) == (kind != OF_WORKERS)
            stack.wait_serving()
        assert_undamaged(undisturbed(stack.address, healthy), expected)
        stack.wait_idle()


def test_a_step_that_never_ends_ends_its_worker(tmp_path: Path) -> None:
    healthy = {f"{n}": request(n) for n in range(10, 13)}
    environment = {"WORKER_FAULT": f"hang:{tmp_path}/hung", "NANO_HANG_TIMEOUT_S": "5"}
    with running_stack(environment, kv_blocks=256) as stack:
        expected = undisturbed(stack.address, healthy)
        last = {"last": request(9, trigger=True)}
        with stack.hold.after(STEPS), open_streams(stack.address, healthy) as streams:
            streams.wait_for_tokens(STEPS)
            worker = stack.pid("worker")
            with open_streams(stack.address, last) as hanging:
                stack.hold.release()
                stack.wait_replaced("worker", 0, worker)
                assert hanging.wait_ended()["last"].num_tokens == 200
            assert_undamaged(streams.wait_ended(), expected)
        assert f'"exit_status": {EXIT_HUNG}' in stack.stack.log("worker-0").read_text()
        assert (tmp_path / "hung").exists()
        stack.wait_idle()
