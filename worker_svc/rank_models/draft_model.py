"""A small model that drafts tokens for a large one to verify.

Leviathan, Kalman and Matias, "Fast Inference from Transformers via Speculative Decoding", 2023,
with another rule: a draft is accepted if it is the token that the target samples. Both models
sample with the same random numbers, so equal models draft equal tokens at any temperature.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from shared.model_directory import MAX_TOKENIZER_BYTES, ModelFileError, check_file
from worker_svc.devices.base import Platform
from worker_svc.errors import ModelError, StartError
from worker_svc.kept_memory.weights import WeightMemory
from worker_svc.layers.embedding import VocabPartition
from worker_svc.rank_models.draft_passes import passes, with_places
from worker_svc.rank_models.rank_model import RankModel
from worker_svc.ranks.distributed import Ranks
from worker_svc.sampling.sampler import Sampler
from worker_svc.settings import WorkerSettings
from worker_svc.step.arrays import StepArrays
from worker_svc.step.tensors import StepTensors


class DraftModel(RankModel):
    """A draft model on one rank. Its cache has the blocks of the target's cache.

    Both caches hold the same tokens, unless a new process has kept the target's cache. Then drafts
    are bad until sequences end, but no token is wrong.

    Args:
        settings: the worker's.
        target: the model whose tokens are drafted.
        last_tokens: int32 [2 * max_num_seqs], the tokens that the target sampled in the previous
            step. The second half gets the drafted tokens of a step, in order.

    Raises:
        StartError: the setting `speculation` names no model that can draft for the target.
    """

    def __init__(
        self,
        settings: WorkerSettings,
        platform: Platform,
        ranks: Ranks,
        target: RankModel,
        last_tokens: torch.Tensor,
    ) -> None:
        updates = {
            "model": settings.draft_model,
            "quantization": settings.draft_quantization,
            "block_size": target.backend.block_size,
        }
        with _naming_the_setting():
            super().__init__(settings.model_copy(update=updates), platform, ranks)
            size, expected = self.config.vocab_size, target.config.vocab_size
            if size != expected:
                raise ModelError(f"vocab_size: {size}, but the model's is {expected}")
        tp = ranks.tensor
        self._sampler = Sampler(VocabPartition(size, tp.rank, tp.size), tp, platform.ops)
        self._last_tokens = last_tokens
        self._first_place = settings.max_num_seqs
        self._target_dir = Path(settings.model)

    def load(self, max_model_len: int, memory: WeightMemory | None = None) -> str:
        with _naming_the_setting():
            _check_tokenizers(Path(self._settings.model), self._target_dir)
            return super().load(max_model_len, memory)

    def draft(self, step: StepArrays, superseded: Callable[[], bool]) -> tuple[StepArrays, int]:
        """Runs all tokens of a step, and drafts those whose ids are DRAFTED -> the step, with
        references to the drafted tokens in place of these ids, and the number of drafted tokens.
        It never waits for the device.

        Args:
            superseded: see `StepGraphs.replay`.
        """
        drafted = step.drafted_rows
        step = with_places(step, self._first_place)
        for each in passes(step, drafted, self._first_place):
            if self.graphs and (each.graph or each.decodes_only):
                self.graphs.replay(each, superseded)
            else:
                self._run(each)
        return step, len(drafted)

    def run_padded(
        self, step: StepArrays, tensors: StepTensors, max_context_len: int
    ) -> torch.Tensor:
        """Runs a padded pass whose columns on the device are `tensors` -> the token of each row."""
        hidden = self.hidden_states(step, tensors, self._last_tokens, max_context_len)
        return self._sample(hidden, tensors)

    def _run(self, step: StepArrays) -> None:
        tensors, longest = self.to_device(step), int(step.context_lens.max())
        hidden = self.hidden_states(step, tensors, self._last_tokens, longest)
        if (step.places >= 0).any():
            self._sample(hidden, tensors)

    def _sample(self, hidden: torch.Tensor, tensors: StepTensors) -> torch.Tensor:
        assert self.decoder.lm_head
        logits = self.decoder.lm_head(hidden)
        tokens = self._sampler(logits, tensors.temperatures, tensors.uniforms)
        last_tokens = self._last_tokens
        self._platform.ops.store_tokens(last_tokens, tensors.places, tokens, last_tokens)
        return tokens


@contextmanager
def _naming_the_setting() -> Iterator[None]:
    try:
        yield
    except StartError as error:
        raise StartError(f"speculation: {error}") from error


def _check_tokenizers(draft: Path, target: Path) -> None:
    """Checks that tokenizers, if both models have them, have equal vocabularies. Added tokens may
    differ, because models of one family name them differently.

    Raises:
        ModelError: they differ, or cannot be read.
    """
    files = [directory / "tokenizer.json" for directory in (draft, target)]
    if not all(file.is_file() for file in files):
        return
    try:
        for file in files:
            check_file(file, MAX_TOKENIZER_BYTES)
        contents = [file.read_bytes() for file in files]
        if contents[0] == contents[1]:
            return
        ours, theirs = (json.loads(content)["model"]["vocab"] for content in contents)
    except (ModelFileError, OSError, ValueError, KeyError, TypeError) as error:
        raise ModelError(f"tokenizer.json: cannot be read: {error}") from error
    if ours != theirs:
        raise ModelError("tokenizer.json: not the vocabulary of the model's tokenizer")
