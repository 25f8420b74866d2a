"""Runs random batches with `BATCH_INVARIANT`. Logits have the same bits as in a sequence that is
alone, however it is cut, and whatever else is in the step.

    TRITON_INTERPRET=1 python -m tests.worker_svc.random_batches --steps 1000
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch

from tests.worker_svc.device import by_device
from tests.worker_svc.harness import batch_for, save_model, worker_settings
from tests.worker_svc.platforms import GpuPlatform
from tests.worker_svc.random_steps import MODEL
from worker_svc.kernels.triton import batch_invariance
from worker_svc.model_runner import ModelRunner

SMALL: dict[str, Any] = {
    **MODEL,
    "intermediate_size": 256,  # so many columns are divided
    "num_hidden_layers": 2,
    "layer_types": MODEL["layer_types"][:2],
    "max_position_embeddings": 128,
    # bfloat16 would hide most differences of so small a model.
    "dtype": by_device(cpu=torch.float32, gpu=torch.bfloat16),
}
NUM_BLOCKS = 900
MAX_NUM_SEQS = by_device(cpu=6, gpu=64)
LONGEST = 100
TEXTS = 8


class Batches:
    """Sequences that grow in random batches, and their logits when each is alone."""

    def __init__(self, model: Path, **options: Any) -> None:
        self._random = np.random.default_rng(0)
        settings = worker_settings(
            model,
            batch_invariant=True,
            enforce_eager=True,
            max_num_seqs=MAX_NUM_SEQS,
            block_size=4,
            kv_blocks=2,
            **options,
        )
        self._runner = runner = ModelRunner(settings, GpuPlatform(settings))
        runner.configure(1, NUM_BLOCKS)
        lens = self._random.integers(1, LONGEST + 1, TEXTS)
        self._texts = [self._random.integers(0, SMALL["vocab_size"], n).tolist() for n in lens]
        batch = batch_for(runner, NUM_BLOCKS)
        self._alone = [
            runner.logits(batch.step([(seq, text)]), every_token=True).clone()
            for seq, text in enumerate(self._texts)
        ]
        self._begin()

    def _begin(self) -> None:
        self._batch = batch_for(self._runner, NUM_BLOCKS)
        self._done = [0] * TEXTS

    def run(self) -> int:
        """Runs a batch, or begins anew if all sequences have ended -> its number of tokens.

        Raises:
            AssertionError: logits differ from those of a sequence alone.
        """
        unfinished = [seq for seq, text in enumerate(self._texts) if self._done[seq] < len(text)]
        if not unfinished:
            self._begin()
            return self.run()
        count = self._random.integers(1, min(len(unfinished), MAX_NUM_SEQS) + 1)
        chunks = []
        for seq in self._random.permutation(unfinished)[:count].tolist():
            size = int(self._random.choice([1, 1, 2, 9, 40]))
            start = self._done[seq]
            chunks.append((seq, self._texts[seq][start : start + size]))
        step = self._batch.step(chunks)
        logits = self._runner.logits(step, every_token=True)
        lens = [len(tokens) for _, tokens in chunks]
        for (seq, tokens), found in zip(chunks, logits.split(lens), strict=True):
            start = self._done[seq]
            self._done[seq] += len(tokens)
            assert torch.equal(found, self._alone[seq][start : self._done[seq]]), (chunks, seq)
        return step.num_tokens


def run_batches(num_steps: int, **options: Any) -> int:
    """Runs batches, in parts that are shorter than the sequences -> the number of tokens."""
    segment = batch_invariance.SEGMENT
    batch_invariance.SEGMENT = by_device(cpu=32, gpu=128)
    try:
        with tempfile.TemporaryDirectory() as directory:
            save_model(Path(directory), **SMALL)
            batches = Batches(Path(directory), **options)
            return sum(batches.run() for _ in range(num_steps))
    finally:
        batch_invariance.SEGMENT = segment
        batch_invariance.switch(False)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=1000)
    steps = parser.parse_args().steps
    for options in ({}, {"kv_dtype": "int8", "quantization": "int8"}, {"quantization": "int4"}):
        print(options, run_batches(steps, **options), "tokens, no bit differs", flush=True)
