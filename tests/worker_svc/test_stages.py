"""Pipeline stages in one process, against a worker with all layers."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.worker_svc.device import cpu_only
from tests.worker_svc.families import SHAPES
from tests.worker_svc.gpu_path.small_model import SMALL
from tests.worker_svc.harness import Asked, Batch, batch_for, save_model, worker_settings
from tests.worker_svc.platforms import GpuPlatform
from tests.worker_svc.test_pooling import pooling
from worker_svc import model_runner
from worker_svc.devices.base import Platform
from worker_svc.devices.cpu import CpuPlatform
from worker_svc.errors import ModelError
from worker_svc.model_runner import ModelRunner
from worker_svc.models.config import load_model_config
from worker_svc.models.stages import layers_of_stages
from worker_svc.ranks.distributed import Pipeline, Ranks
from worker_svc.step.arrays import StepArrays
from worker_svc.step.decode import decode_step
from worker_svc.step_result import StepResult
from worker_svc.tier.key import block_key
from worker_svc.weights.files import WeightReader

NUM_BLOCKS = 128
VOCAB = 301


class Queued(Pipeline):
    """A stage whose hidden states wait in a queue for the next stage."""

    def __init__(self, stage: int, num_stages: int, queues: list[deque[torch.Tensor]]) -> None:
        super().__init__(stage, num_stages)
        self.queues = queues
        self.runs = False

    def receive(self, x: torch.Tensor) -> torch.Tensor:
        if self.defer is not None:
            return self.defer(self.receive, x)
        return x.copy_(self.queues[self.rank - 1].popleft()) if self.runs else x.zero_()

    def send(self, x: torch.Tensor) -> torch.Tensor:
        if self.defer is not None:
            return self.defer(self.send, x)
        if self.runs:
            self.queues[self.rank].append(x.clone())
        return x


class Stages:
    """The stages of a model, which run one after the other."""

    def __init__(
        self,
        path: Path,
        pp: int,
        patch: pytest.MonkeyPatch,
        platform: type[Platform] = CpuPlatform,
        graph_tokens: int = 0,
        **settings: Any,
    ) -> None:
        queues = [deque[torch.Tensor]() for _ in range(pp)]
        made: list[Queued] = []

        def make(stage: int, num_stages: int) -> Queued:
            made.append(Queued(stage, num_stages, queues))
            return made[-1]

        patch.setattr(model_runner, "Pipeline", make)
        patch.setattr(Ranks, "join", lambda *_: None)
        of_ranks = [worker_settings(path, pp=pp, rank=rank, **settings) for rank in range(pp)]
        self.runners = [ModelRunner(each, platform(each)) for each in of_ranks]
        for runner, pipeline in zip(self.runners, made, strict=True):
            runner.configure(1, NUM_BLOCKS, graph_tokens=graph_tokens)
            pipeline.runs = True
        self.queues = queues

    def launch(self, step: StepArrays) -> StepResult:
        *_, result = [runner.launch(step).wait() for runner in self.runners]
        assert not any(self.queues)
        return result


def alone(path: Path, **settings: Any) -> ModelRunner:
    runner = ModelRunner(worker_settings(path, **settings))
    runner.configure(1, NUM_BLOCKS)
    return runner


def steps(batch: Batch, vocab: int = VOCAB) -> list[StepArrays]:
    """Prompts whole, in chunks and longer than a part of a step; decodes; all features; states of
    every token."""
    rng = np.random.default_rng(0)

    def text(length: int) -> list[int]:
        found: list[int] = rng.integers(vocab, size=length).tolist()
        return found

    long = text(min(300, batch.limits.max_model_len - 8))
    features = {
        0: Asked(repetition_penalty=1.5, presence_penalty=0.5, logprobs=3),
        1: Asked(prompt_len=4, frequency_penalty=1.0, bias={7: 9.0}),
        2: Asked(top_k=5, top_p=0.9, logprobs=0, allowed=[*range(40)]),
    }
    drawn: dict[str, Any] = {"temperatures": [0.0, 1.0, 0.7], "seeds": [1, 2, 3]}
    pooled = replace(batch).request([(9, text(12)), (8, text(3))])
    pooled.pooling.CopyFrom(pooling([0, 1], [1, 0], {1: (7, 40)}))
    batch.step_id = 1
    return [
        decode_step(pooled, batch.limits, None),
        batch.step([(0, long), (1, text(5)), (2, text(9))], silent=[1]),
        batch.step([(0, text(1)), (1, text(1)), (2, text(20))], **drawn),
        batch.step([(0, text(1)), (1, text(1)), (2, text(1))], features=features, **drawn),
        batch.step([(3, text(40)), (0, text(1))], targets={0: text(39)}, num_prompt_logprobs=2),
    ]


def assert_equal(found: StepResult, expected: StepResult) -> None:
    for name in ("token_ids", "logprob_ids", "logprob_values", "hidden_states"):
        assert np.array_equal(getattr(found, name), getattr(expected, name)), name


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES.keys())
@pytest.mark.parametrize("pp", [2, 3])
def test_stages_give_the_bits_of_one_worker(
    tmp_path: Path, shape: dict[str, Any], pp: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    vocab = save_model(tmp_path, **shape).config.vocab_size
    runner = alone(tmp_path)
    stages = Stages(tmp_path, pp, monkeypatch)
    assert {each.info.paging for each in stages.runners} == {runner.info.paging}
    for step in steps(batch_for(runner, NUM_BLOCKS), min(vocab, VOCAB)):
        assert_equal(stages.launch(step), runner.launch(step).wait())


@cpu_only  # a replay on a GPU calls no Python
def test_stages_run_from_graphs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Prompts with decodes, and decodes; a size is captured when a step has it."""
    save_model(tmp_path, **{**SMALL, "num_hidden_layers": 3})
    settings = {"attention": "triton", "max_num_seqs": 4, "max_num_batched_tokens": 40}
    graphs: Any = {"platform": GpuPlatform, "graph_tokens": 32, "kv_blocks": 2, **settings}
    stages, one = (Stages(tmp_path, pp, monkeypatch, **graphs) for pp in (3, 1))
    batch = batch_for(one.runners[0], NUM_BLOCKS)
    for chunks in (
        [(0, [*range(20)]), (1, [5, 6])],
        [(1, [7]), (2, [*range(9)])],
        [(0, [1]), (1, [2]), (2, [3])],
        [(0, [4]), (2, [5])],
    ):
        step = batch.step(chunks, graph=any(len(tokens) > 1 for _, tokens in chunks))
        assert_equal(stages.launch(step), one.launch(step))
    for runner in stages.runners:
        assert runner._model.graphs
        assert len(runner._model.graphs._replays) > 3
        if runner is not stages.runners[-1]:  # their results would take memory for each size
            assert not any(map(len, runner._model.graphs._results.values()))


@pytest.mark.parametrize("quantization", ["int8", "int4"])
def test_quantized_stages(
    tmp_path: Path, quantization: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also those that read what the first start has packed."""
    save_model(tmp_path, intermediate_size=128)
    settings = {"quantization": quantization, "kv_dtype": "int8"}
    runner = alone(tmp_path, **settings)
    batch = batch_for(runner, NUM_BLOCKS)
    expected = [(step, runner.launch(step).wait()) for step in steps(batch)]
    for _ in range(2):
        stages = Stages(tmp_path, 2, monkeypatch, **settings)
        for step, result in expected:
            assert_equal(stages.launch(step), result)


def test_a_head_that_differs_from_the_tied_embedding(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_model(tmp_path, tie_word_embeddings=False)
    config = tmp_path / "config.json"
    config.write_text(config.read_text().replace('embeddings": false', 'embeddings": true'))
    runner, stages = alone(tmp_path), Stages(tmp_path, 2, monkeypatch)
    for step in steps(batch_for(runner, NUM_BLOCKS)):
        assert_equal(stages.launch(step), runner.launch(step).wait())


def test_a_stage_reads_only_its_own_weights(
    tiny_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read: list[str] = []
    read_into: Callable[..., None] = WeightReader.read_into

    def note(self: WeightReader, out: torch.Tensor, name: str, **named: Any) -> None:
        read.append(name)
        read_into(self, out, name, **named)

    monkeypatch.setattr(WeightReader, "read_into", note)
    found = []
    for rank in range(3):
        read.clear()
        ModelRunner(worker_settings(tiny_dir, pp=3, rank=rank, pp_layers="1,1,1"))
        layers = {name.split(".")[2] for name in read if name.startswith("model.layers.")}
        found.append((layers, {name for name in read if not name.startswith("model.layers.")}))
    embedding = "model.embed_tokens.weight"
    assert found == [
        ({"0"}, {embedding}),
        ({"1"}, set()),
        ({"2"}, {embedding, "model.norm.weight"}),  # the head is tied
    ]


def test_a_tensor_that_no_stage_has_is_named(tiny_dir: Path, tmp_path: Path) -> None:
    save_model(tmp_path, num_hidden_layers=4)
    config = tmp_path / "config.json"
    config.write_text(config.read_text().replace('hidden_layers": 4', 'hidden_layers": 3'))
    with pytest.raises(ModelError, match=r"unknown weight: model\.layers\.3\."):
        ModelRunner(worker_settings(tmp_path, pp=2))


def test_the_largest_stage_is_as_small_as_possible(tmp_path: Path) -> None:
    """The head of this model takes 1.3 times as long as a layer."""
    save_model(tmp_path, num_hidden_layers=8, vocab_size=6000, max_position_embeddings=4096)
    config = load_model_config(tmp_path)
    layer = config.layer_weights(0, active=True) + 2 * 2048 * 4 * 16
    assert config.head_weights / layer == pytest.approx(1.3, abs=0.1)
    assert [len(each) for each in layers_of_stages(config, 1)] == [8]
    assert [len(each) for each in layers_of_stages(config, 2)] == [5, 3]
    assert layers_of_stages(config, 3) == [range(3), range(3, 6), range(6, 8)]
    assert [len(each) for each in layers_of_stages(config, 8)] == [1] * 8
    assert layers_of_stages(config, 2, [1, 7]) == [range(1), range(1, 8)]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"pp": 4}, r"^pp: 4 stages, but the model has 3 layers$"),
        ({"pp": 2, "pp_layers": "1,1"}, r"^pp_layers: 1,1 must be 2 numbers, and their sum .* 3"),
        ({"pp": 2, "pp_layers": "1,1,1"}, r"^pp_layers: 1,1,1 must be 2 numbers"),
    ],
)
def test_stages_that_cannot_be(tiny_dir: Path, settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelError, match=message):
        ModelRunner(worker_settings(tiny_dir, **settings))


def test_blocks_of_a_directory_are_those_of_some_layers(
    tiny_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only the first stages of two of these have the same ones."""
    keys = set()
    for pp, layers in ((2, "1,2"), (2, "2,1"), (3, "")):
        for runner in Stages(tiny_dir, pp, monkeypatch, pp_layers=layers).runners:
            keys.add(block_key(runner._settings, runner._model, runner.info, ""))
    assert len(keys) == 6
