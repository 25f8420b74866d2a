"""Stacks whose workers cannot run a certain step, or whose schedulers die of certain requests; see
`faulty_worker/sitecustomize.py` and `faulty_scheduler/sitecustomize.py`."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from nano_vllm_grpc.pb.frontend_pb2 import GenerateRequest, SamplingParams, TokenIds
from tests.stack import ROOT, RealStack, running_stack
from tests.waiting import WAIT_S

TRIGGER = (1500, 1501, 1500)  # sets off the workers' fault


def request(first: int, *, trigger: bool = False, max_tokens: int = 200) -> GenerateRequest:
    """A greedy request with a prompt of 40 tokens, the trigger among them or not."""
    ids = [first, *range(100, 136), *(TRIGGER if trigger else (1500, 1500, 1501))]
    params = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True)
    return GenerateRequest(token_ids=TokenIds(ids=ids), sampling=params)


def faulty_environment(fault: str) -> dict[str, str]:
    """The variables for faulty workers; `fault` is the value of WORKER_FAULT."""
    path = f"{Path(__file__).parent / 'faulty_worker'}:{ROOT}"
    return {"PYTHONPATH": path, "WORKER_FAULT": fault}


def deadly_environment(deaths: Path) -> dict[str, str]:
    """The variables for schedulers that die of some requests, which `faulty_scheduler` lists;
    `deaths` is a file that gets longer with each."""
    path = f"{Path(__file__).parent / 'faulty_scheduler'}:{ROOT}"
    return {"PYTHONPATH": path, "SCHEDULER_FAULT": str(deaths)}


@contextmanager
def faulty_stack(fault: str) -> Iterator[RealStack]:
    with running_stack(environment=faulty_environment(fault), kv_blocks=256) as stack:
        yield stack


class HealthHistory:
    """The history of a frontend's health."""

    def __init__(self, address: str) -> None:
        self.seen: list[str] = []
        self._changed = threading.Condition()
        self._channel = grpc.insecure_channel(address)
        stub = health_pb2_grpc.HealthStub(self._channel)
        self._call = stub.Watch(health_pb2.HealthCheckRequest(), wait_for_ready=True)
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._thread.start()

    def wait_for(self, *expected: str) -> None:
        """Returns once the whole history is exactly this."""
        with self._changed:
            assert self._changed.wait_for(lambda: self.seen == [*expected], WAIT_S), self.seen

    def close(self) -> None:
        self._call.cancel()
        self._channel.close()
        self._thread.join()

    def _read(self) -> None:
        names = health_pb2.HealthCheckResponse.ServingStatus
        with suppress(grpc.RpcError):
            for answer in self._call:
                with self._changed:
                    self.seen.append(names.Name(answer.status))
                    self._changed.notify_all()


@contextmanager
def health_history(address: str) -> Iterator[HealthHistory]:
    history = HealthHistory(address)
    try:
        yield history
    finally:
        history.close()
