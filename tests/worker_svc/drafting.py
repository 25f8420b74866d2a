"""Sequences that a draft model speeds up, with the scheduler's part of the work."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tests.worker_svc.harness import Batch, batch_for, worker_settings
from worker_svc.model_runner import ModelRunner
from worker_svc.step.arrays import DRAFTED

NUM_BLOCKS = 96


def make_runner(model: Path, draft: Path | None = None, **settings: Any) -> ModelRunner:
    """A configured runner, with a draft model if `draft` is its directory."""
    speculation = str(draft) if draft else "none"
    runner = ModelRunner(
        worker_settings(model, max_num_seqs=32, speculation=speculation, **settings)
    )
    runner.configure(1, NUM_BLOCKS)
    return runner


class Speculation:
    """Runs steps in which some sequences have drafted tokens, and accepts those that are right.

    `tokens` has each sequence's prompt and completion. Its last token is not in the cache.
    """

    def __init__(
        self,
        runner: ModelRunner,
        prompts: Sequence[list[int]],
        temperature: float = 0.0,
        batch: Batch | None = None,
    ) -> None:
        self.batch = batch or batch_for(runner, NUM_BLOCKS)
        self.tokens = [list(prompt) for prompt in prompts]
        self.num_drafted = self.num_accepted = 0
        self._runner = runner
        self._temperature = temperature
        self._rows: list[int] | None = None  # in the last step, of each sequence's last token

    def prefill(self) -> None:
        sampled = self._run([(seq, text) for seq, text in enumerate(self.tokens)])[0]
        for text, token in zip(self.tokens, sampled, strict=True):
            text.append(token)
        self._rows = list(range(len(self.tokens)))

    def step(
        self,
        depths: Mapping[int, int],
        others: Sequence[tuple[int, list[int]]] = (),
        *,
        known: bool = True,
        **columns: Any,
    ) -> list[list[int]]:
        """Runs a step of sequences, each with its number of drafted tokens, after `others`.

        Args:
            known: whether the step has the sequences' last tokens. Otherwise it refers to the
                rows of the last step.

        Returns:
            The drafted tokens of each sequence.
        """
        chunks: list[tuple[int, list[int]]] = [*others]
        first_rows = {}
        for seq, depth in depths.items():
            first_rows[seq] = len(chunks)
            assert known or self._rows
            token = self.tokens[seq][-1] if known else -1 - (self._rows or [])[seq]
            chunks += [(seq, [token]), *[(seq, [DRAFTED])] * depth]
        sampled, drafted = self._run(chunks, **columns)
        rows, found = dict(enumerate(self._rows or [])), []
        for seq, depth in depths.items():
            drafts, drafted = drafted[:depth], drafted[depth:]
            row, accepted = first_rows[seq], 0
            while accepted < depth and drafts[accepted] == sampled[row + accepted]:
                accepted += 1
            self.tokens[seq] += sampled[row : row + accepted + 1]
            self.batch.contexts[seq] -= depth - accepted
            self.num_drafted += depth
            self.num_accepted += accepted
            rows[seq] = row + accepted
            found.append(drafts)
        assert not drafted
        self._rows = [rows[seq] for seq in range(len(self.tokens))]
        return found

    def _run(
        self, chunks: Sequence[tuple[int, list[int]]], **columns: Any
    ) -> tuple[list[int], list[int]]:
        """Runs a step -> the token that each row samples, and the drafted tokens."""
        seqs = [seq for seq, _ in chunks]
        step = self.batch.step(
            chunks,
            temperatures=[self._temperature] * len(seqs),
            seeds=[100 + seq for seq in seqs],
            **columns,
        )
        result = self._runner.launch(step).wait()
        assert min([*result.draft_ids, 0]) >= 0
        assert max([*result.draft_ids, 0]) < self.batch.limits.vocab_size
        return result.token_ids.tolist(), result.draft_ids.tolist()


def plain_tokens(
    runner: ModelRunner, prompts: Sequence[list[int]], length: int, temperature: float = 0.0
) -> list[list[int]]:
    """The prompts, each continued by decodes until it has `length` more tokens."""
    plain = Speculation(runner, prompts, temperature)
    plain.prefill()
    for _ in range(length - 1):
        plain.step(dict.fromkeys(range(len(prompts)), 0))
    return plain.tokens


def cut(tokens: Sequence[list[int]], prompts: Sequence[list[int]], length: int) -> list[list[int]]:
    """The same, as long as `plain_tokens`."""
    return [text[: len(prompt) + length] for text, prompt in zip(tokens, prompts, strict=True)]
