"""CUDA graphs, or the padded steps that they are made of, equal the same steps launched kernel by
kernel, bit for bit."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from torch.distributed import DistBackendError

from shared.graph_sizes import GraphSize
from tests.worker_svc.device import by_device, cpu_only, gpu_only
from tests.worker_svc.device_memory import stand_in
from tests.worker_svc.gpu_path.small_model import (
    LARGER_DTYPE,
    LARGER_HEADS,
    NUM_BLOCKS,
    decode,
    decode_with_features,
    make_runner,
)
from tests.worker_svc.harness import Asked, Batch, batch_for, worker_settings
from tests.worker_svc.kernels.triton.precision import assert_identical
from tests.worker_svc.platforms import GpuPlatform, Uncaptured, make_backend
from tests.worker_svc.test_model_runner import prompts
from worker_svc.attention.choice import BACKENDS
from worker_svc.devices.cuda_graph import StepGraphs, graph_sizes
from worker_svc.errors import CaptureError, DeviceLostError, SupersededError
from worker_svc.kept_memory.memory import KeptMemory
from worker_svc.model_runner import ModelRunner
from worker_svc.step.arrays import StepArrays
from worker_svc.step.decode import decode_run

# The first test of a model on a GPU compiles its kernels.
pytestmark = pytest.mark.timeout(240)

ROWS = by_device(cpu=[3], gpu=[1, 3, 8, 13, 100])
LONGEST_PROMPT = by_device(cpu=20, gpu=70)
DECODES = by_device(cpu=3, gpu=16)


@dataclass(frozen=True)
class Pair:
    captured: ModelRunner
    uncaptured: ModelRunner
    num_blocks: int
    unwritten: float  # what the caches hold before a run


@pytest.fixture(scope="module", params=by_device(cpu=["triton"], gpu=BACKENDS))
def pair(request: pytest.FixtureRequest, larger_dir: Path) -> Pair:
    name = request.param
    size = make_backend(name, LARGER_HEADS, LARGER_DTYPE).block_size  # skips what is not there
    blocks = max(ROWS) * -(-(LONGEST_PROMPT + DECODES) // size) + 8
    captured, uncaptured = (
        make_runner(
            larger_dir,
            platform,
            num_blocks=blocks,
            attention=name,
            max_num_seqs=max(ROWS),
            max_num_batched_tokens=max(ROWS) * LONGEST_PROMPT,
            max_model_len=LONGEST_PROMPT + DECODES,
        )[0]
        for platform in (GpuPlatform, Uncaptured)
    )
    # Libraries' kernels may load what was never written: see test_backends.
    return Pair(captured, uncaptured, blocks, torch.nan if name == "triton" else 0.0)


def make_steps(pair: Pair, rows: int) -> list[StepArrays]:
    """Makes prompts, then decodes of the tokens that the previous step sampled, which the host need
    not know, in another order in each step. Half of the sequences are greedy."""
    batch = batch_for(pair.captured, pair.num_blocks)
    rng = np.random.default_rng(rows)
    texts = prompts(batch.limits.vocab_size, rng.integers(1, LONGEST_PROMPT + 1, rows).tolist())
    order = list(range(rows))
    chunks = list(enumerate(texts))
    steps = []
    for _ in range(1 + DECODES):
        temperatures = [0.8 * (seq % 2) for seq in order]
        seeds = [rows + seq for seq in order]
        steps.append(batch.step(chunks, temperatures=temperatures, seeds=seeds))
        before, order = order, rng.permutation(rows).tolist()
        chunks = [(seq, [-1 - before.index(seq)]) for seq in order]
    return steps


def run(
    runner: ModelRunner, steps: Sequence[StepArrays], ahead: int, unwritten: float
) -> tuple[list[list[int]], list[torch.Tensor]]:
    """Launches `ahead` steps beyond the one whose tokens are waited for -> the tokens of each step,
    and the caches."""
    for cache in runner._model.caches:
        cache.fill_(unwritten)
    pending, tokens = [], []
    for step in steps:
        pending.append(runner.launch(step))
        if len(pending) > ahead:
            tokens.append(pending.pop(0).wait().token_ids.tolist())
    tokens += [each.wait().token_ids.tolist() for each in pending]
    return tokens, [cache.clone() for cache in runner._model.caches]


@pytest.mark.parametrize("rows", ROWS)
def test_graphs_equal_uncaptured_steps(pair: Pair, rows: int) -> None:
    """They wait after each step, launch one ahead, or launch all at once. Padding and plans are the
    same with and without graphs: other numbers of rows may round differently."""
    steps = make_steps(pair, rows)
    tokens, caches = run(pair.uncaptured, steps, 0, pair.unwritten)
    for ahead in (0, 1, len(steps)):
        found, found_caches = run(pair.captured, steps, ahead, pair.unwritten)
        assert found == tokens, f"{ahead} ahead"
        for actual, expected in zip(found_caches, caches, strict=True):
            assert_identical(actual, expected)


def make_run(batch: Batch, features: Mapping[int, Asked] | None) -> list[StepArrays]:
    """A run of three sequences, in a graph of four."""
    request = batch.request(
        [(seq, [seq]) for seq in range(3)],
        temperatures=[0.8, 0, 0.8],
        seeds=[1, 2, 3],
        features=features,
        room=4,
    )
    request.num_steps = 4
    return decode_run(request, batch.limits, None)


@pytest.fixture
def uploads(monkeypatch: pytest.MonkeyPatch) -> Mock:
    """Counts the uploads of columns for graphs."""
    count = Mock(side_effect=StepGraphs._upload)
    monkeypatch.setattr(StepGraphs, "_upload", lambda *args: count(*args))
    return count


@pytest.mark.parametrize("features", [None, {1: Asked(repetition_penalty=3.0)}])
def test_a_run_is_uploaded_once(
    small_dir: Path, uploads: Mock, features: dict[int, Asked] | None
) -> None:
    """Its other steps advance the columns on the device. Tokens and caches are those of steps that
    are uploaded one by one."""
    runner, batch = make_runner(small_dir, block_size=1, num_blocks=40, max_model_len=20)
    run = make_run(batch, features)
    one_by_one = [replace(step, follows=None) for step in run]
    expected = launch_all(runner, one_by_one)
    uploads.reset_mock()
    found = launch_all(runner, run)
    uploads.assert_called_once()
    assert found[0] == expected[0]
    for actual, each in zip(found[1], expected[1], strict=True):
        assert_identical(actual, each)


def test_a_step_between_those_of_a_run_has_the_columns_uploaded_again(
    small_dir: Path, uploads: Mock
) -> None:
    runner, batch = make_runner(small_dir, block_size=1, num_blocks=40, max_model_len=20)
    run, other = make_run(batch, None), batch.step([(9, [9])])
    uploads.reset_mock()
    launch_all(runner, [*run[:2], other, *run[2:]])
    assert uploads.call_count == 3


def launch_all(
    runner: ModelRunner, steps: Sequence[StepArrays]
) -> tuple[list[list[int]], list[torch.Tensor]]:
    return run(runner, steps, len(steps), unwritten=0.0)


@gpu_only  # on a CPU they are those of other kernels: test_model
def test_features_are_the_same_beside_graphs(pair: Pair) -> None:
    found, expected = (
        decode_with_features(runner, batch_for(runner, pair.num_blocks))
        for runner in (pair.captured, pair.uncaptured)
    )
    for ours, theirs in zip(found, expected, strict=True):
        assert ours.token_ids.tolist() == theirs.token_ids.tolist()
        assert ours.logprob_ids.tolist() == theirs.logprob_ids.tolist()
        assert ours.logprob_values.tolist() == theirs.logprob_values.tolist()


def test_graphs_leave_their_logits_in_one_buffer(small_dir: Path) -> None:
    """Kept in each graph's own memory, they would take as much many times over."""
    runner, batch = make_runner(small_dir, block_size=16)
    assert runner._model.graphs
    addresses = set()
    for rows in (1, 2, 4):
        step = batch.step([(seq, [seq]) for seq in range(rows)])
        with torch.inference_mode():
            _, logits = runner._model.graphs.replay(step)
        assert logits.shape[0] == rows
        addresses.add(logits.data_ptr())
    assert len(addresses) == 1


def test_a_new_epoch_keeps_the_graphs_of_a_cache_of_the_same_size(
    small_dir: Path, tokens: list[list[int]]
) -> None:
    runner, _ = make_runner(small_dir, block_size=16)
    graphs = runner._model.graphs
    runner.configure(2, NUM_BLOCKS)
    assert runner._model.graphs is graphs
    for epoch, num_blocks in ((3, NUM_BLOCKS + 1), (4, NUM_BLOCKS)):
        runner.configure(epoch, num_blocks)
        assert runner._model.graphs is not graphs
        assert decode(runner, batch_for(runner, NUM_BLOCKS)) == tokens


def test_graphs_are_dropped_before_the_connections_that_they_use(
    small_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """To end a connection, NCCL waits for all graphs that use it."""
    runner, _ = make_runner(small_dir, block_size=16)
    calls: list[str] = []

    def note(name: str) -> None:
        assert runner._model.graphs is None
        calls.append(name)

    monkeypatch.setattr(runner._platform, "drop_graphs", lambda: note("graphs"))
    monkeypatch.setattr(runner._ranks, "leave", lambda: note("connections"))
    runner.configure(2, NUM_BLOCKS + 1)
    assert calls == ["graphs", "connections"]


def unconfigured(model: Path) -> ModelRunner:
    settings = worker_settings(
        model, attention="triton", max_num_seqs=4, block_size=16, kv_blocks=1
    )
    return ModelRunner(settings, GpuPlatform(settings))


def failing(cause: Exception) -> Callable[..., Callable[[], None]]:
    """A capture that fails as torch's do: ending it fails too."""

    def capture(*_: object) -> Callable[[], None]:
        try:
            raise cause
        finally:
            raise RuntimeError("operation failed due to a previous error during capture")

    return capture


@cpu_only  # torch's allocator never recovers from one: tests/gpu/test_processes
def test_a_failed_capture_is_reported_and_nothing_counts_as_configured(
    small_dir: Path, tokens: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Configuring the same number of blocks again is not taken for done."""
    runner = unconfigured(small_dir)
    with monkeypatch.context() as patched:
        patched.setattr(GpuPlatform, "capture", failing(RuntimeError("not permitted")))
        with pytest.raises(CaptureError, match=r"a step of 4 decodes and 0 tokens"):
            runner.configure(1, NUM_BLOCKS)
    runner.configure(2, NUM_BLOCKS)
    assert runner._model.graphs
    assert decode(runner, batch_for(runner, NUM_BLOCKS)) == tokens


@cpu_only
@pytest.mark.parametrize(
    ("cause", "ends_as", "reason"),
    [
        (RuntimeError("operation not permitted"), CaptureError, "operation not permitted"),
        (torch.OutOfMemoryError("CUDA out of memory"), CaptureError, "CUDA out of memory"),
        (DistBackendError("NCCL error"), DeviceLostError, "NCCL error"),
        (torch.AcceleratorError("CUDA error: misaligned address"), DeviceLostError, "misaligned"),
    ],
)
def test_how_a_failed_capture_ends(
    small_dir: Path,
    cause: RuntimeError,
    ends_as: type[Exception],
    reason: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It ends with the cause, not with the error of ending the capture; and a lost rank or device
    is no reason not to start again."""
    runner = unconfigured(small_dir)
    monkeypatch.setattr(GpuPlatform, "capture", failing(cause))
    with pytest.raises(ends_as, match=reason):
        runner.configure(1, NUM_BLOCKS)


@cpu_only
def test_a_newer_epoch_ends_the_capture_of_graphs(small_dir: Path) -> None:
    runner = unconfigured(small_dir)
    asked = iter((False, False, True))  # before each of three sizes
    with pytest.raises(SupersededError):
        runner.configure(1, NUM_BLOCKS, superseded=lambda: next(asked))


@pytest.mark.parametrize("limit", [1, 3, 8, 9, 16, 100, 256, 257, 600, 1024])
def test_graph_sizes(limit: int) -> None:
    sizes = graph_sizes(limit)
    assert sizes == sorted(set(sizes))
    assert sizes[-1] == limit
    for seqs in range(1, limit + 1):
        size = next(size for size in sizes if size >= seqs)
        assert size - seqs < max(2, 16, seqs / 8 + 1)


def test_the_next_fork_captures_when_needed_and_changes_nothing_in_the_cache(
    larger_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It waits for the largest graphs only, and continues with the same tokens."""
    monkeypatch.setattr(GpuPlatform, "memory", by_device(cpu=stand_in, gpu=GpuPlatform.memory))
    captured: list[int] = []
    capture = StepGraphs._capture

    def noting(graphs: StepGraphs, size: GraphSize, superseded: Callable[[], bool]) -> None:
        captured.append(size.decodes)
        capture(graphs, size, superseded)

    monkeypatch.setattr(StepGraphs, "_capture", noting)
    memory, found = KeptMemory(), []
    settings = worker_settings(
        larger_dir, attention="triton", max_num_seqs=4, max_num_batched_tokens=16, kv_blocks=2
    )
    for has_died in (False, True):
        runner = ModelRunner(settings, GpuPlatform(settings), memory)
        runner.configure(1, NUM_BLOCKS)
        assert captured == [4, 2, 1]
        batch = batch_for(runner, NUM_BLOCKS)
        runner.run(batch.step([(0, [1, 2, 3])]))
        if has_died:
            before = [cache.clone() for cache in runner._model.caches]
            captured.clear()
            runner = ModelRunner(settings, GpuPlatform(settings), memory)
            runner.configure(2, NUM_BLOCKS, keep=runner.cache_id)
            assert captured == [4]
            for cache, expected in zip(runner._model.caches, before, strict=True):
                assert_identical(cache, expected)
        found.append(runner.run(batch.step([(0, [4])])).tolist())
        captured.clear()
    assert found[0] == found[1]
