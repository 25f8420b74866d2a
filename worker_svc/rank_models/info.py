"""The properties of a loaded model that a scheduler needs."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class RunnerInfo:
    """The properties and limits of a loaded model."""

    device: str
    dtype: str
    fingerprint: str  # of the model's files, then the format of its weights
    attention_backend: str
    block_size: int  # tokens
    num_blocks: int  # that fit into free memory
    max_num_blocks: int  # that would fit into empty memory, and whose slots fit into int32
    max_model_len: int  # tokens
    max_num_batched_tokens: int  # in a step
    vocab_size: int
    graph_tokens: int  # the maximum of prompt tokens in a step that runs from a CUDA graph
