"""CUDA graphs against the same steps launched kernel by kernel: equal in every bit."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch

from bench.gpu_check.inputs import blocks_needed, count_differences
from bench.gpu_check.model import small_model, texts
from bench.gpu_check.parts import PartPlan
from bench.gpu_check.records import Report
from bench.gpu_check.setup import BACKENDS, QWEN_0_6B, Setup
from bench.gpu_check.steps import Sequences
from shared.config import WorkerSettings
from worker_svc.model_runner import ModelRunner
from worker_svc.platforms.base import Platform
from worker_svc.step import Int32s, Step


def parts(setup: Setup) -> list[PartPlan[Setup]]:
    return [PartPlan(name, partial(check_graphs, name=name), limit_s=80) for name in BACKENDS]


@dataclass(frozen=True)
class Run:
    tokens: Int32s  # [steps, S]
    caches: list[torch.Tensor]


def check_graphs(setup: Setup, report: Report, name: str) -> None:
    """Prompts, then decodes of the tokens that the step before sampled, which the host need not
    know. Half of the sequences are greedy.

    Padding and plans are the same with and without graphs: a matrix product with more rows, or
    attention divided into other parts, may round differently. What steps without padding sample is
    compared too, but only noted.
    """
    setup.backend(name, QWEN_0_6B, setup.dtype)  # skips what is not there
    captured = _Model(setup, name, setup.platform, enforce_eager=False)
    uncaptured = _Model(setup, name, setup.uncaptured, enforce_eager=False)
    unpadded = _Model(setup, name, setup.platform, enforce_eager=True)
    same, total = 0, 0
    for rows in setup.sizes.graph_batches:
        steps = captured.steps(rows)
        expected = uncaptured.run(steps, ahead=0)
        for ahead, how in ((0, "one by one"), (1, "one ahead"), (len(steps), "all at once")):
            found = captured.run(steps, ahead)
            case = f"{rows} sequences, {how}"
            different = float((found.tokens != expected.tokens).sum())
            report.check(f"{case}, tokens", different, 0, f"of {found.tokens.size} differ")
            pairs = zip(found.caches, expected.caches, strict=True)
            different = sum(count_differences(*pair) for pair in pairs)
            report.check(f"{case}, caches", different, 0, "elements differ")
        tokens = unpadded.run(steps, ahead=0).tokens
        same += int((tokens == expected.tokens).all(axis=0).sum())
        total += rows
    report.note(f"{same} of {total} sequences are equal without padding")


class _Model:
    """A runner, whose cache is zeros before each run: what a step leaves alone can be compared."""

    def __init__(
        self,
        setup: Setup,
        name: str,
        platform: Callable[[WorkerSettings], Platform],
        enforce_eager: bool,
    ) -> None:
        sizes = setup.sizes
        self._most = max(sizes.graph_batches)
        self._prompt, self._decodes = sizes.graph_prompt, sizes.decodes
        self._setup = setup
        settings = setup.settings(
            small_model(setup, "graphs"),
            attention=name,
            enforce_eager=enforce_eager,
            kv_blocks=1,
            max_num_seqs=self._most,
            max_num_batched_tokens=self._most * self._prompt,
            max_model_len=self._prompt + self._decodes,
        )
        self._runner = ModelRunner(settings, platform(settings))
        self._block_size = self._runner.info.block_size
        blocks = blocks_needed([self._prompt + self._decodes] * self._most, self._block_size)
        self._num_blocks = blocks + 1
        self._runner.configure(1, self._num_blocks)

    def steps(self, rows: int) -> list[Step]:
        """Row r continues row r, at first; then the order changes from step to step."""
        rng = np.random.default_rng(self._setup.part_seed(f"graphs {rows}"))
        vocab_size = self._runner.info.vocab_size
        lengths = rng.integers(1, self._prompt + 1, size=rows).tolist()
        prompts = texts(self._setup, lengths, vocab_size)
        sequences = Sequences(self._block_size, range(self._num_blocks), self._setup.seed)
        temperatures = np.where(np.arange(rows) % 2, 0.8, 0.0)
        seeds = rng.integers(2**32, size=rows)

        def sampling(order: Int32s) -> tuple[Sequence[float], Sequence[int]]:
            return temperatures[order].tolist(), seeds[order].tolist()

        before = np.arange(rows, dtype=np.int32)
        steps = [sequences.step(dict(enumerate(prompts)), *sampling(before))]
        for _ in range(self._decodes):
            order = rng.permutation(rows).astype(np.int32)
            row_of = np.argsort(before).astype(np.int32)  # where each sequence was
            ids = {int(seq): -1 - row_of[seq : seq + 1] for seq in order}
            steps.append(sequences.step(ids, *sampling(order)))
            before = order
        return steps

    def run(self, steps: Sequence[Step], ahead: int) -> Run:
        """With so many steps launched beyond the one whose tokens are waited for."""
        for cache in self._runner._caches:
            cache.zero_()
        pending, tokens = [], []
        for step in steps:
            pending.append(self._runner.launch(step))
            if len(pending) > ahead:
                tokens.append(pending.pop(0).wait()[0])
        tokens += [each.wait()[0] for each in pending]
        return Run(np.stack(tokens), [cache.clone() for cache in self._runner._caches])
