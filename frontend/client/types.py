"""What goes in and comes out of the client, free of protobuf."""

from __future__ import annotations

import numbers
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, TypedDict, TypeGuard, cast

FinishReason = Literal["eos", "length", "stop", "aborted"]


# A turn of a chat: {"role": "system", "user" or "assistant", "content": its text}.
Message = Mapping[str, str]

# A text, token ids, or a chat.
Prompt = str | Sequence[int] | Sequence[Message]


@dataclass(frozen=True)
class SamplingParams:
    """How to choose tokens and when to stop; None is the server's default, the model's own."""

    temperature: float | None = None  # 0 is greedy
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    seed: int | None = None  # same request and seed, same tokens
    max_tokens: int | None = None
    min_tokens: int | None = None
    stop: str | Sequence[str] = ()
    stop_token_ids: Sequence[int] = ()
    include_stop_in_output: bool | None = None
    ignore_eos: bool | None = None
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    n: int | None = None
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    skip_special_tokens: bool | None = None


class Usage(TypedDict):
    prompt_tokens: int
    cached_prompt_tokens: int
    completion_tokens: int


class Timings(TypedDict):
    """Seconds since the server received the request."""

    queue_s: float
    first_token_s: float
    total_s: float


@dataclass(frozen=True)
class Chunk:
    """A piece of a completion. The fields from `finish_reason` on are set on the last one only."""

    request_id: str
    index: int  # which of the request's n completions
    text: str
    token_ids: list[int]
    token_offset: int  # index in the completion of the first of token_ids
    logprobs: list[dict[int, float]]  # per token, by token id, the chosen one first
    finish_reason: FinishReason | None = None
    stop_reason: str = ""
    usage: Usage | None = None
    timings: Timings | None = None


class Completion(TypedDict):
    """A whole completion, the joined chunks of its stream."""

    text: str
    token_ids: list[int]
    finish_reason: FinishReason | None
    stop_reason: str
    usage: Usage | None
    timings: Timings | None
    logprobs: list[dict[int, float]]
    index: int
    request_id: str


@dataclass(frozen=True)
class EngineCapacity:
    num_blocks: int
    block_size: int  # tokens
    max_num_seqs: int
    max_num_batched_tokens: int
    max_waiting: int
    tensor_parallel_size: int


@dataclass(frozen=True)
class ModelInfo:
    """What a server serves."""

    model: str
    max_model_len: int  # prompt and completion together, tokens
    vocab_size: int
    eos_token_ids: list[int]
    default_sampling: SamplingParams
    capacity: EngineCapacity


def is_chat(prompt: object) -> TypeGuard[Sequence[Message]]:
    return (
        isinstance(prompt, Sequence)
        and not isinstance(prompt, str)
        and len(prompt) > 0
        and isinstance(prompt[0], Mapping)
    )


def as_prompts(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """A list of prompts from one or several: ids alone, or messages alone, are one prompt."""
    if isinstance(prompts, str):
        return [prompts]
    items: list[Any] = list(prompts)
    if items and isinstance(items[0], numbers.Integral | Mapping):
        return [cast(Prompt, items)]
    return items


def as_sampling_params(
    params: SamplingParams | Sequence[SamplingParams] | None, count: int
) -> list[SamplingParams]:
    """One set of parameters per prompt.

    Raises:
        ValueError: a list that is not as long as the prompts'.
    """
    if params is None or isinstance(params, SamplingParams):
        return [params or SamplingParams()] * count
    if len(params) != count:
        raise ValueError(f"{len(params)} sampling_params for {count} prompts")
    return list(params)
