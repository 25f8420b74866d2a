"""Steps with prompts that run from CUDA graphs equal the same padded steps launched kernel by
kernel, bit for bit."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

from shared.graph_sizes import NUM_PROMPTS, GraphSize
from tests.worker_svc.device import ON_GPU, by_device, cpu_only
from tests.worker_svc.gpu_path.small_model import (
    LARGER_DTYPE,
    LARGER_HEADS,
    MAX_NUM_SEQS,
    NUM_BLOCKS,
    make_runner,
)
from tests.worker_svc.harness import batch_for, worker_settings
from tests.worker_svc.kernels.triton.precision import assert_identical
from tests.worker_svc.platforms import GpuPlatform, Uncaptured, make_backend
from tests.worker_svc.random_steps import Mixtures
from worker_svc.attention.choice import BACKENDS
from worker_svc.devices.cuda_graph import StepGraphs, graph_sizes
from worker_svc.errors import SupersededError
from worker_svc.kv_cache import CacheLayout
from worker_svc.step.arrays import StepArrays
from worker_svc.step.wire import Int32s

# The first test of each backend compiles its kernels.
pytestmark = [pytest.mark.timeout(240), pytest.mark.usefixtures("libraries")]

SEQS = by_device(cpu=5, gpu=70)
TOKENS = by_device(cpu=20, gpu=400)  # of prompts in a graph
STEPS = by_device(cpu=8, gpu=100)


@pytest.mark.parametrize("name", BACKENDS)
def test_random_mixtures(larger_dir: Path, name: str) -> None:
    """On a CPU, they also equal steps that are not padded."""
    size = make_backend(name, LARGER_HEADS, LARGER_DTYPE).block_size  # skips what is not there
    num_blocks = 2 * SEQS * -(-by_device(cpu=96, gpu=1100) // size) + 40
    platforms = [
        (GpuPlatform, True),
        (Uncaptured, True),
        *([] if ON_GPU else [(GpuPlatform, False)]),
    ]
    runners = []
    for platform, captures in platforms:
        runner, _ = make_runner(
            larger_dir,
            platform,
            captures=captures,
            num_blocks=num_blocks,
            attention=name,
            max_num_seqs=SEQS,
            max_num_batched_tokens=SEQS + 2 * TOKENS,
        )
        runner.configure(2, num_blocks, graph_tokens=TOKENS)
        runners.append(runner)
    mixtures = Mixtures(batch_for(runner, num_blocks).limits, seed=0)
    steps = [step for _ in range(STEPS) for step in mixtures.steps()]
    assert any(step.follows for step in steps)
    assert len({step.graph for step in steps if step.graph}) > 1
    for step in steps:
        found, *others = [runner.run(step).tolist() for runner in runners]
        for other in others:
            assert found == other
    for ours, theirs in zip(runners[0]._model.caches, runners[1]._model.caches, strict=True):
        assert_identical(ours, theirs)


@cpu_only
def test_the_largest_graph_is_captured_first(larger_dir: Path) -> None:
    """So the memory of all graphs is agreed when an epoch is configured."""
    runner, _ = make_runner(larger_dir, block_size=16)
    runner.configure(2, NUM_BLOCKS, graph_tokens=20)
    assert runner._model.graphs
    first, *others = runner._model.graphs._replays
    assert first == (MAX_NUM_SEQS, NUM_PROMPTS, 20)
    assert [size.decodes for size in others] == [4, 2, 1]


class PlansDecodes:
    """A backend with a column for steps that only decode."""

    block_size = 16

    def __init__(self, windows: tuple[int | None, ...]) -> None:
        self.layout = CacheLayout.of(windows, self.block_size, max_model_len=40)

    def plan_column(self, step: StepArrays) -> Int32s:
        return step.query_lens if step.decodes_only else step.query_lens[:0]


@cpu_only
@pytest.mark.parametrize("tokens", [0, 17, 4000])
@pytest.mark.parametrize(("windows", "num_parts"), [((None,), 3), ((None, 32, 32), 4 + 3)])
def test_every_column_has_room(
    tokens: int, windows: tuple[int | None, ...], num_parts: int
) -> None:
    """In a table with blocks of two parts, 40 tokens take four parts of 16."""
    platform: Any = Uncaptured(worker_settings(Path()))
    largest = GraphSize(1000, NUM_PROMPTS, tokens)
    backend: Any = PlansDecodes(windows)
    graphs = StepGraphs(platform, backend, Mock(), largest, 40, None)
    assert len(graphs._tensors) == len(graph_sizes(1000)) + (tokens > NUM_PROMPTS)
    for columns in graphs._tensors.values():
        num_tables = len({*windows})
        assert len(columns.block_table) == num_parts * 1000
        assert len(columns.slot_mapping) == num_tables * len(columns.input_ids)
        assert len(columns.table_offsets) == num_tables * len(columns.context_lens) + 1


@cpu_only
def test_a_capture_leaves_what_the_last_step_has_sampled(larger_dir: Path) -> None:
    runner, _ = make_runner(larger_dir, block_size=16)
    runner.configure(2, NUM_BLOCKS, graph_tokens=100)
    for state in (runner._last_tokens, *runner._model.caches):
        state.fill_(7)
    step = batch_for(runner, NUM_BLOCKS).step([(0, [*range(9)]), (1, [-1])], graph=True)
    runner.run(step)
    assert runner._tokens.slots[step.slot_mapping[-1]] == 7
    assert (runner._last_tokens[2:] == 7).all()
    for cache in runner._model.caches:
        assert (cache != 7).any(-1).sum() == 2 * 10


@cpu_only
def test_a_capture_may_take_as_long_as_compiling(
    larger_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The hang watch knows how long a step of that size takes, but not a capture."""
    runner, _ = make_runner(larger_dir, block_size=16)
    runner.configure(2, NUM_BLOCKS, graph_tokens=100)
    found: list[bool] = []

    def capture(_: object, run: Callable[[], None], *args: object) -> Callable[[], None]:
        found.append(runner.compiling)
        return run

    monkeypatch.setattr(GpuPlatform, "capture", capture)
    runner.run(batch_for(runner, NUM_BLOCKS).step([(0, [*range(9)])], graph=True))
    assert found == [True]
    assert not runner.compiling


@cpu_only
def test_a_newer_epoch_ends_a_capture_in_a_step(larger_dir: Path) -> None:
    """The next epoch captures what it needs."""
    runner, _ = make_runner(larger_dir, block_size=16)
    runner.configure(2, NUM_BLOCKS, graph_tokens=20)
    step = batch_for(runner, NUM_BLOCKS).step([(0, [*range(9)])], graph=True)
    with pytest.raises(SupersededError):
        runner.launch(step, superseded=lambda: True)
    runner.configure(3, NUM_BLOCKS + 1, graph_tokens=20)
    assert len(runner.run(step)) == 1
