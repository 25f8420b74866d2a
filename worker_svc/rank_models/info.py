"""The properties of a loaded model that a scheduler needs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from shared.paging import Paging


@dataclass(frozen=True)
class RunnerInfo:
    """The properties and limits of a loaded model."""

    device: str
    dtype: str
    fingerprint: str  # of the model's files, then the format of its weights
    attention_backend: str
    paging: Paging
    num_blocks: int  # that fit into free memory
    max_num_blocks: int  # that would fit into empty memory, and whose slots fit into int32
    max_model_len: int  # tokens
    max_num_batched_tokens: int  # in a step
    vocab_size: int
    graph_tokens: int  # the maximum of prompt tokens in a step that runs from a CUDA graph

    @staticmethod
    def kept(notes: Mapping[str, Any]) -> RunnerInfo:
        """Undoes `dataclasses.asdict`."""
        return RunnerInfo(**{**notes, "paging": Paging(**notes["paging"])})
