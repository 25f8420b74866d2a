"""The types of the client's arguments and results, which need no protobuf."""

from __future__ import annotations

import numbers
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, TypedDict, TypeGuard, cast

FinishReason = Literal["eos", "length", "stop"]

# A turn of a chat: "role" and "content", a text or OpenAI's parts [{"type": "text", "text": ...}],
# whose texts are joined with newlines. An assistant's turn may have "reasoning_content", and
# "tool_calls": [{"id": ..., "type": "function", "function": {"name": ..., "arguments": ...}}], with
# the arguments as a mapping or JSON. A turn of the role "tool" has a "tool_call_id", and the call's
# result as its content.
Message = Mapping[str, Any]


@dataclass(frozen=True)
class Chat:
    """Messages, and the other inputs of the model's chat template."""

    messages: Sequence[Message]
    # Each {"type": "function", "function": {"name": ..., "description": ..., "parameters": ...}}.
    tools: Sequence[Mapping[str, Any]] = ()
    # The template's variables.
    chat_template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    continue_final_message: bool = False  # continue the last message instead of answering it


# A text, token ids, or a chat.
Prompt = str | Sequence[int] | Sequence[Message] | Chat


@dataclass(frozen=True)
class StructuredOutput:
    """A constraint that the completion must match. Set exactly one field."""

    json_schema: Mapping[str, Any] | str | None = None  # as a mapping, or as JSON text
    regex: str | None = None
    grammar: str | None = None  # EBNF, starting at the rule `root`
    choice: Sequence[str] | None = None
    json_object: bool | None = None  # True: any JSON, an object or an array
    structural_tag: str | None = None  # text with constrained parts, as xgrammar's JSON


@dataclass(frozen=True)
class SamplingParams:
    """Says how to choose tokens and when to stop; None means the server's default."""

    temperature: float | None = None  # 0 is greedy
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    seed: int | None = None  # equal requests with equal seeds get equal tokens
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
    bad_words: Sequence[str] = ()
    skip_special_tokens: bool | None = None
    beam_width: int | None = None  # 0: sample; else beam search, all beams returned, best first
    length_penalty: float | None = None  # for beam search
    structured_output: StructuredOutput | None = None


class RequestOptions(TypedDict, total=False):
    """The options of a request besides its prompt and its sampling parameters."""

    timeout_s: float | None  # from when the request is sent to its deadline; None: no deadline
    priority: int  # lower goes first, default 0
    cache_salt: str  # cached prefixes are shared only among requests with equal salts


class GenerateOptions(RequestOptions, total=False):
    """The options of a request for completions."""

    store: bool  # whether workers may keep its blocks in their directory, default True


class Usage(TypedDict):
    prompt_tokens: int
    cached_prompt_tokens: int
    completion_tokens: int


class Timings(TypedDict):
    """Seconds since the server received the request, except `queue_s`."""

    queue_s: float  # spent waiting in the scheduler for its first step
    first_token_s: float
    total_s: float


@dataclass(frozen=True)
class Chunk:
    """A piece of a completion. The fields from `finish_reason` on are set on a completion's last
    chunk only. If a request has several completions, `usage` and `timings` are on the request's
    last chunk."""

    request_id: str
    index: int  # which of the request's n completions
    text: str
    token_ids: list[int]
    token_offset: int  # index in the completion of the first of token_ids
    logprobs: list[dict[int, float]]  # per token, by token id, the chosen one first
    # Like `logprobs`, per token of the prompt, on the request's first chunk. The first is empty.
    prompt_logprobs: list[dict[int, float]] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    stop_reason: str = ""
    score: float = 0.0  # for beam search
    usage: Usage | None = None
    timings: Timings | None = None


class Completion(TypedDict):
    """A whole completion, joined from the chunks of its stream, without its `resume_token_ids`.

    If a request has several completions, `usage` counts the tokens of this completion alone. It
    includes the tokens after which the completion resumed.
    """

    text: str
    token_ids: list[int]
    finish_reason: FinishReason | None
    stop_reason: str
    usage: Usage | None
    timings: Timings | None
    logprobs: list[dict[int, float]]
    prompt_logprobs: list[dict[int, float]]
    score: float  # for beam search
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
    pipeline_parallel_size: int = 1


@dataclass(frozen=True)
class ModelInfo:
    """The model that a server serves, and its limits."""

    model: str
    max_model_len: int  # prompt and completion together, tokens
    vocab_size: int
    eos_token_ids: list[int]
    default_sampling: SamplingParams
    capacity: EngineCapacity


def is_chat(prompt: object) -> TypeGuard[Sequence[Message] | Chat]:
    return isinstance(prompt, Chat) or (
        isinstance(prompt, Sequence)
        and not isinstance(prompt, str)
        and len(prompt) > 0
        and isinstance(prompt[0], Mapping)
    )


def as_prompts(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """Makes a list of one or several prompts. A flat list of ids or of messages is one prompt."""
    if isinstance(prompts, str | Chat):
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
        ValueError: the list's length differs from the number of prompts.
    """
    if params is None or isinstance(params, SamplingParams):
        return [params or SamplingParams()] * count
    if len(params) != count:
        raise ValueError(f"{len(params)} sampling_params for {count} prompts")
    return list(params)


def as_resume_ids(
    resume_token_ids: Sequence[int] | Sequence[Sequence[int]], count: int
) -> list[Sequence[int]]:
    """The tokens to resume after for each prompt, empty for all if none are given.

    Raises:
        ValueError: the list's length differs from the number of prompts.
    """
    items: list[Any] = list(resume_token_ids)
    if not items:
        return [()] * count
    if isinstance(items[0], numbers.Integral):
        items = [items]
    if len(items) != count:
        raise ValueError(f"{len(items)} resume_token_ids for {count} prompts")
    return items


def join(
    chunks: list[Chunk], last_of_all: Chunk, prompt_logprobs: list[dict[int, float]]
) -> Completion:
    """Joins the chunks of one completion of a request, whose last chunk is `last_of_all`."""
    last, usage = chunks[-1], last_of_all.usage
    if usage is not None:
        count = last.token_offset + len(last.token_ids)
        usage = {**usage, "completion_tokens": count}
    return Completion(
        text="".join(chunk.text for chunk in chunks),
        token_ids=[token for chunk in chunks for token in chunk.token_ids],
        finish_reason=last.finish_reason,
        stop_reason=last.stop_reason,
        usage=usage,
        timings=last_of_all.timings,
        logprobs=[row for chunk in chunks for row in chunk.logprobs],
        prompt_logprobs=prompt_logprobs,
        score=last.score,
        index=last.index,
        request_id=last.request_id,
    )
