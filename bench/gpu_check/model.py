"""The whole model against transformers."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import Qwen3ForCausalLM

from bench.gpu_check.inputs import blocks_needed
from bench.gpu_check.parts import PartPlan
from bench.gpu_check.records import Report
from bench.gpu_check.setup import BACKENDS, QWEN_0_6B, Setup
from bench.gpu_check.steps import Sequences
from tools.make_model import make_model
from worker_svc.model_runner import ModelRunner
from worker_svc.step import Int32s, Step

# Of the error of transformers in the same dtype, the error that ours may have.
SHARE = 2.0


def parts(setup: Setup) -> list[PartPlan[Setup]]:
    oracle = Oracle(setup)
    return [
        PartPlan(name, partial(check_model, name=name, oracle=oracle), limit_s=80)
        for name in BACKENDS
    ]


def small_model(setup: Setup, directory: str) -> Path:
    path = setup.directory / directory
    if not (path / "model.safetensors").exists():
        make_model(path, "tiny", dict(setup.sizes.model), seed=setup.seed, dtype=setup.dtype)
    return path


def texts(setup: Setup, lengths: Sequence[int], vocab_size: int) -> list[Int32s]:
    rng = np.random.default_rng(setup.part_seed("texts"))
    return [rng.integers(vocab_size, size=length, dtype=np.int32) for length in lengths]


class Oracle:
    """transformers on the same texts: the logits after each text and each of its last tokens."""

    def __init__(self, setup: Setup) -> None:
        self._setup = setup
        self.decodes = setup.sizes.decodes
        self.lengths = setup.sizes.texts  # of the prompts

    @cached_property
    def path(self) -> Path:
        return small_model(self._setup, "oracle")

    @cached_property
    def texts(self) -> list[Int32s]:
        vocab_size = dict(self._setup.sizes.model)["vocab_size"]
        return texts(self._setup, [n + self.decodes for n in self.lengths], vocab_size)

    @cached_property
    def exact(self) -> torch.Tensor:
        return self._logits(torch.float32)

    @cached_property
    def rounded_error(self) -> float:
        """Of transformers in half precision."""
        dtype = self._setup.dtype if self._setup.dtype != torch.float32 else torch.bfloat16
        return distance(self._logits(dtype), self.exact)

    def _logits(self, dtype: torch.dtype) -> torch.Tensor:
        """[texts, 1 + decodes, vocab] float32"""
        model: Any = Qwen3ForCausalLM.from_pretrained(self.path, dtype=dtype)
        model = model.to(self._setup.device)
        rows = []
        with torch.inference_mode():
            for text in self.texts:
                ids = torch.from_numpy(text).long().to(self._setup.device)
                logits = model(ids[None], logits_to_keep=self.decodes + 1).logits
                rows.append(logits[0].float())
        return torch.stack(rows)


def check_model(setup: Setup, report: Report, name: str, oracle: Oracle) -> None:
    """Prompts in two steps, so that parts of them are cached, then decodes with given tokens."""
    setup.backend(name, QWEN_0_6B, setup.dtype)  # skips what is not there
    settings = setup.settings(
        oracle.path,
        attention=name,
        enforce_eager=True,
        kv_blocks=1,
        max_num_seqs=len(oracle.texts),
        max_num_batched_tokens=sum(oracle.lengths),
        max_model_len=max(oracle.lengths) + oracle.decodes,
    )
    runner = ModelRunner(settings, setup.platform(settings))
    size, vocab_size = runner.info.block_size, runner.info.vocab_size
    num_blocks = blocks_needed([len(text) for text in oracle.texts], size)
    runner.configure(1, num_blocks)
    sequences = Sequences(size, range(num_blocks), setup.part_seed(name))

    lengths = np.array(oracle.lengths, np.int32)

    def step(begins: Int32s, ends: Int32s) -> Step:
        """The tokens of each text from one place to another."""
        places = zip(oracle.texts, begins, ends, strict=True)
        return sequences.step({i: text[begin:end] for i, (text, begin, end) in enumerate(places)})

    def logits(step: Step) -> torch.Tensor:
        return runner.logits(step)[:, :vocab_size].float()

    runner.run(step(0 * lengths, lengths // 2))
    prompts = logits(step(lengths // 2, lengths))
    decodes = [logits(step(lengths + i, lengths + i + 1)) for i in range(oracle.decodes)]
    for phase, ours, theirs in (
        ("prompts", prompts, oracle.exact[:, 0]),
        ("decodes", torch.stack(decodes, dim=1), oracle.exact[:, 1:]),
    ):
        error = distance(ours, theirs)
        detail = f"transformers: {oracle.rounded_error:.1e}; {runner.info.attention_backend}"
        report.check(f"logits of {phase}", error, SHARE * oracle.rounded_error, detail)


def distance(logits: torch.Tensor, exact: torch.Tensor) -> float:
    return float((logits - exact).norm() / exact.norm())
