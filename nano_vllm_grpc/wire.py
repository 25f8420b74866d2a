"""Translates between the client's types and the messages of protos/frontend.proto."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import fields
from typing import Any, TypeVar, cast

from nano_vllm_grpc.errors import InvalidRequestError
from nano_vllm_grpc.pb import frontend_pb2 as pb
from nano_vllm_grpc.types import (
    Chat,
    Chunk,
    EngineCapacity,
    FinishReason,
    Message,
    ModelInfo,
    Prompt,
    SamplingParams,
    StructuredOutput,
    Timings,
    Usage,
    is_chat,
)

Decoded = TypeVar("Decoded")

_FINISH_REASONS: dict[int, FinishReason] = {
    pb.FINISH_REASON_EOS: "eos",
    pb.FINISH_REASON_LENGTH: "length",
    pb.FINISH_REASON_STOP: "stop",
}
_REPEATED = ("stop", "stop_token_ids", "bad_words")
_NOT_PLAIN = (*_REPEATED, "logit_bias", "structured_output")


@contextmanager
def encoding() -> Iterator[None]:
    """Translates protobuf's errors about values while a request is encoded.

    Raises:
        InvalidRequestError: a field cannot hold its value, such as a negative token id or a text
            that is not valid Unicode, or a message is malformed.
    """
    try:
        yield
    except (TypeError, ValueError) as error:
        raise InvalidRequestError(f"the request cannot be sent: {error}") from error


@encoding()
def encode_request(
    prompt: Prompt,
    params: SamplingParams,
    priority: int = 0,
    cache_salt: str = "",
    resume_token_ids: Sequence[int] = (),
    *,
    store: bool = True,
) -> pb.GenerateRequest:
    request = pb.GenerateRequest(
        sampling=_encode_sampling(params),
        priority=priority,
        cache_salt=cache_salt,
        store=store,
        resume_token_ids=resume_token_ids,
    )
    if isinstance(prompt, str):
        request.text = prompt
    elif is_chat(prompt):
        request.chat.CopyFrom(_encode_chat(prompt))
    else:
        request.token_ids.CopyFrom(pb.TokenIds(ids=cast(Sequence[int], prompt)))
    return request


def encode_input(prompt: str | Sequence[int]) -> pb.EmbedInput:
    """Encodes a text or token ids to embed."""
    if isinstance(prompt, str):
        return pb.EmbedInput(text=prompt)
    return pb.EmbedInput(token_ids=pb.TokenIds(ids=prompt))


@encoding()
def encode_tokenize(prompt: str | Sequence[Message] | Chat) -> pb.TokenizeRequest:
    """Encodes a text or a chat to tokenize."""
    if isinstance(prompt, str):
        return pb.TokenizeRequest(text=prompt)
    return pb.TokenizeRequest(chat=_encode_chat(prompt))


def decode_chunk(message: pb.GenerateStreamResponse) -> Chunk:
    return Chunk(
        request_id=message.request_id,
        index=message.index,
        text=message.text,
        token_ids=list(message.token_ids),
        token_offset=message.token_offset,
        logprobs=_decode_logprobs(message.logprobs),
        prompt_logprobs=_decode_logprobs(message.prompt_logprobs),
        finish_reason=_FINISH_REASONS.get(message.finish_reason),
        stop_reason=message.stop_reason,
        score=message.score,
        usage=_decode(Usage, message.usage) if message.HasField("usage") else None,
        timings=_decode(Timings, message.timings) if message.HasField("timings") else None,
    )


def decode_model(message: pb.GetModelResponse) -> ModelInfo:
    return ModelInfo(
        model=message.model,
        max_model_len=message.max_model_len,
        vocab_size=message.vocab_size,
        eos_token_ids=list(message.eos_token_ids),
        default_sampling=_decode_sampling(message.default_sampling),
        capacity=_decode(EngineCapacity, message.capacity),
    )


def _decode(kind: type[Decoded], message: Any) -> Decoded:
    """A `kind` with its fields taken from a message that has all of them."""
    return kind(**{name: getattr(message, name) for name in kind.__annotations__})


def _encode_chat(chat: Sequence[Message] | Chat) -> pb.Chat:
    if not isinstance(chat, Chat):
        chat = Chat(chat)
    kwargs = chat.chat_template_kwargs
    return pb.Chat(
        messages=map(_encode_message, chat.messages),
        tools=map(json.dumps, chat.tools),
        chat_template_kwargs=json.dumps(kwargs) if kwargs else "",
        continue_final_message=chat.continue_final_message,
    )


def _encode_message(message: Message) -> pb.ChatMessage:
    calls = map(_encode_tool_call, message.get("tool_calls") or ())
    content = _encode_content(message.get("content"))
    return pb.ChatMessage(**{**message, "content": content, "tool_calls": calls})


def _encode_content(content: object) -> str | None:
    """Joins the text of OpenAI's content parts with newlines, as vLLM does."""
    if content is None or isinstance(content, str):
        return content
    if not isinstance(content, Sequence):
        raise ValueError(f"content: a {type(content).__name__}; must be a text or a list of parts")
    return "\n".join(_text_of(f"content[{i}]", part) for i, part in enumerate(content))


def _text_of(field: str, part: object) -> str:
    if not isinstance(part, Mapping):
        raise ValueError(f"{field}: a {type(part).__name__}; must be a part with a type")
    if (kind := part.get("type")) != "text":
        raise ValueError(f"{field}.type: {kind!r} is not supported; must be 'text'")
    if not isinstance(text := part.get("text"), str):
        raise ValueError(f"{field}.text: a {type(text).__name__}; must be a text")
    return text


def _encode_tool_call(call: Mapping[str, Any]) -> pb.ToolCall:
    fields = {"type": "function", "function": {}, **call}
    if (kind := fields.pop("type")) != "function":
        raise ValueError(f"tool_calls: type is {kind!r}; must be 'function'")
    arguments = fields["function"].get("arguments", "")
    if not isinstance(arguments, str):
        arguments = json.dumps(arguments)
    fields["function"] = pb.FunctionCall(**{**fields["function"], "arguments": arguments})
    return pb.ToolCall(**fields)


def _encode_sampling(params: SamplingParams) -> pb.SamplingParams:
    message = pb.SamplingParams(
        stop=[params.stop] if isinstance(params.stop, str) else params.stop,
        stop_token_ids=params.stop_token_ids,
        bad_words=params.bad_words,
        logit_bias=params.logit_bias,
        structured_output=_encode_structured_output(params.structured_output),
    )
    for each in fields(params):
        value = getattr(params, each.name)
        if value is not None and each.name not in _NOT_PLAIN:
            setattr(message, each.name, value)
    return message


def _encode_structured_output(wanted: StructuredOutput | None) -> pb.StructuredOutput | None:
    if wanted is None:
        return None
    given = {
        f.name: value for f in fields(wanted) if (value := getattr(wanted, f.name)) is not None
    }
    if len(given) != 1:  # protobuf would silently keep the last
        names = " and ".join(given) or "nothing"
        raise ValueError(f"structured_output: {names} given; give one")
    ((name, value),) = given.items()
    if name == "choice":
        value = pb.Choice(options=value)
    elif name == "json_schema" and not isinstance(value, str):
        value = json.dumps(value)
    return pb.StructuredOutput(**{name: value})


def _decode_logprobs(rows: Iterable[pb.Logprobs]) -> list[dict[int, float]]:
    return [{entry.token_id: entry.logprob for entry in row.entries} for row in rows]


def _decode_sampling(message: pb.SamplingParams) -> SamplingParams:
    values: dict[str, Any] = {}
    for each in fields(SamplingParams):
        if each.name in _REPEATED:
            values[each.name] = tuple(getattr(message, each.name))
        elif each.name == "logit_bias":
            values[each.name] = dict(message.logit_bias)
        elif each.name not in _NOT_PLAIN and message.HasField(cast(Any, each.name)):
            values[each.name] = getattr(message, each.name)
    return SamplingParams(**values)
