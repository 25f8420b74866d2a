"""Steps that run before a worker reports that it serves."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.worker_svc.harness import worker_settings
from worker_svc.devices.cpu import CpuPlatform
from worker_svc.devices.cuda_graph import graph_sizes
from worker_svc.model_runner import ModelRunner
from worker_svc.step.arrays import StepArrays
from worker_svc.step_result import PendingStep


class CompilingPlatform(CpuPlatform):
    compiles = True
    num_batched_tokens = 640


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> list[StepArrays]:
    steps: list[StepArrays] = []
    launch = ModelRunner.launch

    def noted(runner: ModelRunner, step: StepArrays) -> PendingStep:
        steps.append(step)
        return launch(runner, step)

    monkeypatch.setattr(ModelRunner, "launch", noted)
    return steps


def test_without_graphs_decodes_of_every_size_have_run(
    tiny_dir: Path, launched: list[StepArrays]
) -> None:
    """The number of sequences decides how attention is divided, and so which kernels run; a later
    step would have to wait for those. Graphs run each size when they are captured."""
    settings = worker_settings(tiny_dir, max_num_seqs=20, max_model_len=40)
    ModelRunner(settings, CompilingPlatform(settings))
    plain = [step.num_seqs for step in launched if step.decodes_only and step.features is None]
    assert plain == graph_sizes(20)

    launched.clear()
    ModelRunner(settings)  # nothing is compiled on a CPU
    assert not [step for step in launched if step.decodes_only and step.features is None]


@pytest.mark.parametrize(
    ("asked", "max_num_seqs", "expected"), [("auto", 8, 640), ("auto", 700, 700), (50, 8, 50)]
)
def test_tokens_of_a_step(tiny_dir: Path, asked: object, max_num_seqs: int, expected: int) -> None:
    """Unless set, as many as suit the platform, and at least one for each sequence."""
    limits = {"max_num_seqs": max_num_seqs, "max_num_batched_tokens": asked}
    settings = worker_settings(tiny_dir, **limits)
    assert (
        ModelRunner(settings, CompilingPlatform(settings)).info.max_num_batched_tokens == expected
    )
