"""Checks requests, field by field. Error messages never quote a prompt."""

from __future__ import annotations

from collections.abc import Sequence

from nano_vllm_grpc.pb import frontend_pb2 as pb
from shared.errors import InvalidArgumentError

MAX_REQUEST_ID_LENGTH = 256  # characters
MAX_CACHE_SALT_LENGTH = 256  # characters
MAX_ENGINE_LENGTH = 256
MAX_CHAT_PARTS = 1 << 14  # messages, tools and tool calls
MAX_TOKENIZED = 1 << 17  # tokens per call to Tokenize or Detokenize


def check_request(request: pb.GenerateRequest) -> None:
    """Checks the fields of a request other than its prompt and its sampling.

    Raises:
        InvalidArgumentError: `request_id`, `cache_salt` or `engine` is not acceptable.
    """
    check_request_id("request_id", request.request_id)
    for field, limit in (("cache_salt", MAX_CACHE_SALT_LENGTH), ("engine", MAX_ENGINE_LENGTH)):
        length = len(getattr(request, field))
        if length > limit:
            raise InvalidArgumentError(field, f"{length} characters; the limit is {limit}")


def check_request_id(field: str, request_id: str) -> None:
    """Raises InvalidArgumentError if the id is too long, or not printable."""
    if len(request_id) > MAX_REQUEST_ID_LENGTH or not request_id.isprintable():
        raise InvalidArgumentError(
            field, f"must be printable and at most {MAX_REQUEST_ID_LENGTH} characters"
        )


def check_chat(chat: pb.Chat) -> None:
    """Checks how many parts a chat has. An empty part takes 2 bytes to send and a hundred times as
    many to hold while the request waits for a thread.

    Raises:
        InvalidArgumentError: there are too many.
    """
    count = len(chat.messages) + len(chat.tools)
    if count <= MAX_CHAT_PARTS:
        count += sum(len(message.tool_calls) for message in chat.messages)
    if count > MAX_CHAT_PARTS:
        raise InvalidArgumentError(
            "chat", f"{count} messages, tools and tool calls; the limit is {MAX_CHAT_PARTS}"
        )


def check_priority(priority: int, allowed: tuple[int, int]) -> None:
    """Raises InvalidArgumentError unless a priority is in `allowed`, the first and the last one."""
    low, high = allowed
    if not low <= priority <= high:
        raise InvalidArgumentError(
            "priority", f"{priority}; must be in [{low}, {high}] for this client"
        )


def check_prompt_length(field: str, length: int, max_model_len: int) -> None:
    """Raises InvalidArgumentError if a prompt is empty, or leaves no room for another token."""
    if length == 0:
        raise InvalidArgumentError(field, "empty; a prompt needs at least one token")
    if length >= max_model_len:
        raise InvalidArgumentError(
            field,
            f"{length} tokens; the limit is {max_model_len - 1}, so that one token of "
            f"{max_model_len} can be generated",
        )


def check_truncation(truncate: int, max_tokens: int, max_model_len: int) -> int:
    """The number of a prompt's last tokens to keep. They leave room for `max_tokens` tokens, or for
    one if `max_tokens` is 0. A `truncate` of -1 asks for as many as possible.

    Raises:
        InvalidArgumentError: `truncate` is neither -1 nor above 0.
    """
    field = "truncate_prompt_tokens"
    if truncate != -1 and truncate < 1:
        raise InvalidArgumentError(field, f"{truncate}; must be -1 or above 0")
    room = max_model_len - max(max_tokens, 1)
    return max(room if truncate == -1 else min(truncate, room), 1)


def check_token_ids(field: str, token_ids: Sequence[int], vocab_size: int) -> None:
    """Raises InvalidArgumentError if an id is not in the vocabulary."""
    if token_ids and max(token_ids) >= vocab_size:
        index, value = next((i, t) for i, t in enumerate(token_ids) if t >= vocab_size)
        raise InvalidArgumentError(
            f"{field}[{index}]", f"{value} is not below the vocabulary size, {vocab_size}"
        )
