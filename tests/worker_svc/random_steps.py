"""Runs random mixtures of decodes, chunks, prompts, drafts and copies, and runs of decodes, padded
as for CUDA graphs and as they are. Tokens and caches are the same, bit for bit.

    TRITON_INTERPRET=1 python -m tests.worker_svc.random_steps --steps 10000
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from shared.graph_sizes import graph_size
from tests.worker_svc.harness import Batch, batch_for, save_model, worker_settings
from tests.worker_svc.kernels.cpu.eager_ops import eager
from worker_svc.devices.cpu import CpuPlatform
from worker_svc.kernels.triton.advance import advance
from worker_svc.model_runner import ModelRunner
from worker_svc.ranks.distributed import Ranks
from worker_svc.step.arrays import StepArrays
from worker_svc.step.decode import MAX_RUN, StepLimits, decode_run
from worker_svc.step.tensors import StepTensors

MODEL: dict[str, Any] = {
    "vocab_size": 150,
    "hidden_size": 32,
    "intermediate_size": 40,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 96,
    "use_sliding_window": True,
    "sliding_window": 20,
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
}
NUM_BLOCKS = 400
BLOCK_SIZE = 4
MAX_NUM_SEQS = 80  # graphs for up to 0, 64 and 80 decodes
GRAPH_TOKENS = 200  # and for up to 64, 96, 128, 192 and 200 tokens of prompts


class PaddedPlatform(CpuPlatform):
    """A CPU whose steps are padded; a replay calls the function that would have been captured."""

    captures = True

    def prepare(
        self, hidden_states: Callable[..., torch.Tensor], backend: Any, ranks: Ranks
    ) -> Callable[..., torch.Tensor]:
        def run(
            tensors: StepTensors, last_tokens: torch.Tensor, caches: Any, plans: Any, **named: bool
        ) -> torch.Tensor:
            layers, tables = range(len(caches)), range(len(plans))
            with eager(tensors, last_tokens, map(backend.cache_of, caches), ranks.tensor):
                return hidden_states(tensors, last_tokens, layers, tables, **named)

        return run

    def capture(self, run: Callable[[], None], *_: object) -> Callable[[], None]:
        run()
        return run

    def advance(self, tensors: StepTensors, block_size: int) -> None:
        advance(tensors, block_size)


def make_runners(directory: Path) -> list[ModelRunner]:
    """A runner that pads, and one that does not."""
    save_model(directory, **MODEL)
    runners = []
    for platform in (PaddedPlatform, CpuPlatform):
        settings = worker_settings(
            directory, max_num_seqs=MAX_NUM_SEQS, block_size=BLOCK_SIZE, kv_blocks=2
        )
        runner = ModelRunner(settings, platform(settings))
        runner.configure(1, NUM_BLOCKS, graph_tokens=GRAPH_TOKENS)
        runners.append(runner)
    return runners


class Mixtures:
    """Makes steps of sequences that come and go, in blocks that others have used before."""

    def __init__(self, limits: StepLimits, seed: int) -> None:
        self._rng = np.random.default_rng(seed)
        self._limits = limits
        self._batch = Batch(self._limits)
        self._last: StepArrays | None = None
        self._rows: dict[int, int] = {}  # of the last step, by sequence that sampled there
        self._missing: dict[int, int] = {}  # tokens of prompts, by sequence
        self._num_seqs = 0

    def steps(self) -> list[StepArrays]:
        """Makes a step, or a run of steps if it can. If it has prompts and there is a graph for it,
        it has the graph's size."""
        rng, batch = self._rng, self._batch
        chunks: list[tuple[int, list[int]]] = []
        copies: list[tuple[int, int]] = []
        limits = self._limits
        num_decodes = int(limits.max_num_seqs * rng.choice([0, 0.1, 0.4, 0.9]))
        for seq in [seq for seq, missing in self._missing.items() if not missing][:num_decodes]:
            known = seq not in self._rows or rng.random() < 0.3
            tokens = self._tokens(1) if known else [-1 - self._rows[seq]]
            if rng.random() < 0.1:
                seq, copied = self._fork(seq)
                tokens, copies = self._tokens(1), copies + copied
            drafts = int(rng.integers(1, 4)) if rng.random() < 0.1 else 0
            chunks += [(seq, tokens), *((seq, self._tokens(1)) for _ in range(drafts))]
        del chunks[limits.max_num_seqs :]
        longest = 1 + limits.graph_tokens // 4
        num_tokens = int(limits.graph_tokens * rng.choice([0, 0.15, 0.5, 1.25])) if chunks else 9
        while num_tokens > 0 and len(chunks) < limits.max_num_seqs:
            seq = next((seq for seq, missing in self._missing.items() if missing), None)
            if seq is None or seq in dict(chunks):
                seq = self._new()
            length = min(self._missing[seq], num_tokens, int(rng.integers(1, longest + 1)))
            self._missing[seq] -= length
            chunks.append((seq, self._tokens(length)))
            num_tokens -= length
        if rng.random() < 0.3:  # not the order of a scheduler
            order = rng.permutation([*dict(chunks)]).tolist()
            chunks.sort(key=lambda chunk: order.index(chunk[0]))
        lens = [len(tokens) for _, tokens in chunks if len(tokens) > 1]
        counts = len(chunks) - len(lens), len(lens), sum(lens)
        size = graph_size(*counts, limits.max_num_seqs, limits.graph_tokens)
        num_steps = int(rng.integers(1, MAX_RUN + 1)) if self._may_run(chunks) else 1
        request = batch.request(
            chunks,
            room=num_steps,
            silent=[seq for seq, missing in self._missing.items() if missing],
            temperatures=rng.choice([0.0, 0.8], len(chunks)).tolist(),
            seeds=rng.integers(0, 2**40, len(chunks)).tolist(),
            copies=copies,
            graph=size is not None,
        )
        request.num_steps = num_steps
        run = decode_run(request, limits, self._last)
        self._last = run[-1]
        assert run[0].graph == size
        batch.step_id += num_steps - 1
        for seq, _ in chunks:
            batch.contexts[seq] += num_steps - 1
        self._settle(chunks)
        return run

    def _may_run(self, chunks: list[tuple[int, list[int]]]) -> bool:
        """Whether all rows are decodes of sequences of their own."""
        decodes = [seq for seq, tokens in chunks if len(tokens) == 1 and not self._missing[seq]]
        return len({*decodes}) == len(chunks)

    def _settle(self, chunks: list[tuple[int, list[int]]]) -> None:
        """Accepts no draft, and ends sequences that are long, and all if blocks are scarce."""
        batch, rows = self._batch, {}
        for row, (seq, _) in enumerate(chunks):
            if seq in rows:
                batch.contexts[seq] -= 1
            rows.setdefault(seq, row)
        self._rows = {seq: row for seq, row in rows.items() if not self._missing[seq]}
        if len(batch.free) < self._limits.num_blocks // 2:
            self._batch = Batch(self._limits, batch.step_id)
            self._rows, self._missing = {}, {}
        longest = self._limits.max_model_len * 2 // 3
        for seq in [seq for seq in self._missing if self._batch.contexts.get(seq, 0) > longest]:
            del self._missing[seq]
            self._rows.pop(seq, None)

    def _new(self) -> int:
        self._num_seqs += 1
        self._missing[self._num_seqs] = int(self._rng.integers(1, self._limits.max_model_len // 2))
        return self._num_seqs

    def _fork(self, seq: int) -> tuple[int, list[tuple[int, int]]]:
        """Makes a sequence that shares the full blocks of another, and has a copy of the next one
        -> it, and the copy."""
        batch, new = self._batch, self._new()
        self._missing[new] = 0
        batch.contexts[new] = context = batch.contexts[seq]
        copies = []
        tables = batch.tables, batch.second_tables
        for kind, of_seqs in zip(self._limits.paging.tables, tables, strict=True):
            table, full = of_seqs[seq], context // kind.block_size
            copied = [(block, batch.free.pop()) for block in table[full : full + 1]]
            of_seqs[new] = table[:full] + [copy for _, copy in copied]
            copies += copied
        return new, copies

    def _tokens(self, count: int) -> list[int]:
        return self._rng.integers(0, self._limits.vocab_size, count).tolist()


def compare(num_steps: int, seed: int) -> int:
    """Runs so many steps in both ways -> how many of them had prompts and were padded.

    Raises:
        AssertionError: tokens or caches differ.
    """
    with tempfile.TemporaryDirectory() as directory:
        padding, exact = make_runners(Path(directory))
    for cache in (*padding._model.caches, *exact._model.caches):
        cache.fill_(np.nan)
    mixtures, num_padded = Mixtures(batch_for(padding, NUM_BLOCKS).limits, seed), 0
    steps: list[StepArrays] = []
    for number in range(num_steps):
        step, *steps = steps or mixtures.steps()
        found, expected = (each.launch(step).wait().token_ids for each in (padding, exact))
        same = np.array_equal(found, expected)
        for ours, theirs in zip(padding._model.caches, exact._model.caches, strict=True):
            same &= torch.equal(ours.view(torch.int32), theirs.view(torch.int32))
        assert same, f"step {number} of seed {seed}"
        num_padded += step.graph is not None
    return num_padded


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    print(f"{compare(options.steps, options.seed)} of {options.steps} steps were padded prompts")


if __name__ == "__main__":
    main()
