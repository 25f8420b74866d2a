"""Which steps with prompts the scheduler has run from CUDA graphs."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from shared.pb import scheduler_pb2
from tests.fake_worker import FakeWorker
from tests.scheduler_svc.stacks import stack_of


def lens_in_graphs(worker: FakeWorker) -> list[list[int]]:
    """The tokens of each row, for steps that run from a graph."""
    steps = [step for step in worker.steps if step.graph]
    return [np.frombuffer(step.query_lens, "<i4").tolist() for step in steps]


def capable(**properties: int) -> FakeWorker:
    worker = FakeWorker(**properties)
    worker.info.graph_tokens = 100
    return worker


def prompt(number: int, length: int) -> list[int]:
    """A prompt of which nothing is in the prefix cache."""
    return [number, *range(1, length)]


async def test_a_size_is_captured_when_it_is_needed_again(tmp_path: Path) -> None:
    ranks = [capable(rank=rank, world_size=2) for rank in range(2)]
    ranks[1].info.graph_tokens = 80
    async with stack_of(tmp_path, *ranks, max_num_batched_tokens=128) as stack:
        frontend = await stack.frontend()
        for number, length in enumerate((5, 7, 70, 64, 90, 90, 72), start=1):
            await frontend.complete(number, prompt(number, length), 3)
    for rank in ranks:
        assert [each.graph_tokens for each in rank.configured] == [80]
        assert lens_in_graphs(rank) == [[7], [64], [72]]


async def test_features_and_prompt_logprobs_run_without_a_graph(tmp_path: Path) -> None:
    worker = capable()
    featured = scheduler_pb2.TokenSampling(max_tokens=3, top_k=2)
    scored = scheduler_pb2.TokenSampling(max_tokens=3, prompt_logprobs=1)
    async with stack_of(tmp_path, worker, max_num_batched_tokens=128) as stack:
        frontend = await stack.frontend()
        for number, sampling in enumerate((None, featured, scored, None), start=1):
            await frontend.submit(number, prompt(number, 10 + number), 3, sampling)
            await frontend.read_until_finished(number)
    assert lens_in_graphs(worker) == [[14]]


async def test_a_size_at_which_workers_are_lost_twice_is_not_captured_again(tmp_path: Path) -> None:
    """Once may be by chance."""
    worker = capable()
    worker.fails = lambda step: step.graph and step.epoch < 3
    async with stack_of(tmp_path, worker, max_num_batched_tokens=128) as stack:
        frontend = await stack.frontend()
        for number in range(1, 8):
            await frontend.complete(number, prompt(number, 5), 3)
        assert lens_in_graphs(worker) == [[5], [5]]
        for number in range(8, 10):
            await frontend.complete(number, prompt(number, 80), 3)
    assert lens_in_graphs(worker) == [[5], [5], [80]]
