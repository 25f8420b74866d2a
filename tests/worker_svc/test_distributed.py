"""Ranks in processes of their own: what passes between stages, and how ranks part."""

from __future__ import annotations

import multiprocessing
from collections.abc import Iterator
from datetime import timedelta
from multiprocessing.connection import Connection
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import _world

from deploy.ports import free_port
from tests.waiting import WAIT_S
from worker_svc.errors import RanksLostError
from worker_svc.ranks.distributed import COLLECTIVE_TIMEOUT, Pipeline, Ranks, TensorParallel

TP, PP = 2, 2
ROWS = (1, 3, 200, 700)  # of hidden states; the last ones take several messages
SIZE = 160


def states(tensor_rank: int, rows: int) -> torch.Tensor:
    return torch.arange(rows * SIZE, dtype=torch.float32).view(rows, SIZE) + tensor_rank


def run_rank(rank: int, port: int, pipe: Connection) -> None:
    """Does what the pipe says, and answers."""
    stage, tensor_rank = divmod(rank, TP)
    ranks = Ranks(TensorParallel(tensor_rank, TP), Pipeline(stage, PP))
    while True:
        match pipe.recv():
            case "join", epoch:
                _world.group_count += rank  # as if attempts had failed
                ranks.join(epoch, torch.device("cpu"), "127.0.0.1", port, lambda: False)
                pipe.send("joined")
            case ("pass",):
                for rows in ROWS:
                    if stage == 0:
                        ranks.pipeline.send(states(tensor_rank, rows))
                    else:
                        found = ranks.pipeline.receive(torch.empty(rows, SIZE))
                        assert torch.equal(found, states(tensor_rank, rows))
                pipe.send(ranks.tensor.all_reduce(torch.tensor([rank])).item())
            case ("reduce",):
                try:
                    ranks.tensor.all_reduce(torch.ones(5))
                except RanksLostError:
                    pipe.send("lost")
            case ("receive",):
                try:
                    ranks.pipeline.receive(torch.empty(1, SIZE))
                except RanksLostError:
                    pipe.send("lost")
            case ("leave",):
                ranks.leave()
                pipe.send("left")


class Processes:
    """A process per rank."""

    def __init__(self) -> None:
        context, port = multiprocessing.get_context("spawn"), free_port()
        self._pipes = []
        self._processes = []
        for rank in range(TP * PP):
            ours, theirs = context.Pipe()
            process = context.Process(target=run_rank, args=(rank, port, theirs), daemon=True)
            process.start()
            self._pipes.append(ours)
            self._processes.append(process)

    def tell(self, rank: int, *what: object) -> None:
        self._pipes[rank].send(what)

    def answer(self, rank: int, timeout_s: float = WAIT_S) -> Any:
        assert self._pipes[rank].poll(timeout_s), f"rank {rank} does not answer"
        return self._pipes[rank].recv()

    def all(self, *what: object) -> list[Any]:
        for rank in range(TP * PP):
            self.tell(rank, *what)
        return [self.answer(rank) for rank in range(TP * PP)]

    def end(self) -> None:
        for process in self._processes:
            process.kill()
            process.join()


@pytest.fixture(scope="module")
def processes() -> Iterator[Processes]:
    started = Processes()
    yield started
    started.end()


@pytest.mark.parametrize(("lost", "waiting"), [(3, "reduce"), (0, "receive")])
def test_a_rank_that_leaves_ends_the_waits_of_others(
    processes: Processes, lost: int, waiting: str
) -> None:
    """Long before they time out. In the next epoch, all meet again, and get nothing of the old
    one."""
    epoch = 10 * (lost + 1)
    assert processes.all("join", epoch) == ["joined"] * 4
    assert processes.all("pass") == [1, 1, 5, 5]
    processes.tell(2, waiting)
    processes.tell(lost, "leave")
    assert processes.answer(lost) == "left"
    assert processes.answer(2, COLLECTIVE_TIMEOUT.total_seconds() / 2) == "lost"
    assert processes.all("join", epoch + 1) == ["joined"] * 4
    assert processes.all("pass") == [1, 1, 5, 5]


def test_a_stage_waits_longer_than_a_connection_may_take(monkeypatch: pytest.MonkeyPatch) -> None:
    """Gloo's own limit is that of the connection."""
    waits: list[timedelta] = []
    work = SimpleNamespace(wait=waits.append)
    monkeypatch.setattr(dist, "irecv", lambda *_: work)
    monkeypatch.setattr(dist, "isend", lambda *_: work)
    middle = Pipeline(1, 3)
    middle.join(TensorParallel())
    x = torch.zeros(1, SIZE)
    middle.receive(x)
    for _ in range(100):
        middle.send(x)
    assert len(waits) > 1
    assert {*waits} == {3 * COLLECTIVE_TIMEOUT}
