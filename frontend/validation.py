"""Checks requests, field by field, and fills in defaults. Messages never quote a prompt."""

from __future__ import annotations

import math
import secrets
from collections.abc import Sequence
from dataclasses import dataclass

from frontend.model_files import ModelFacts
from frontend.request import Sampling
from shared.errors import InvalidArgumentError
from shared.pb import frontend_pb2 as pb

ROLES = ("system", "user", "assistant")
MAX_TEMPERATURE = 2.0
MAX_STOP_STRINGS = 16
MAX_STOP_STRING_LENGTH = 1024  # characters
MAX_STOP_TOKEN_IDS = 64
MAX_REQUEST_ID_LENGTH = 256  # characters
MAX_CACHE_SALT_LENGTH = 256  # characters


@dataclass(frozen=True, slots=True)
class _Range:
    """Closed, where not `above`: then `low` itself is outside."""

    low: float
    high: float = math.inf
    above: bool = False

    def __contains__(self, value: float) -> bool:  # NaN is in no range
        return (self.low < value if self.above else self.low <= value) and value <= self.high

    def __str__(self) -> str:
        if self.high == math.inf:
            return f"{'above' if self.above else 'at least'} {self.low:g}"
        return f"in {'(' if self.above else '['}{self.low:g}, {self.high:g}]"


_TEMPERATURE = _Range(0, MAX_TEMPERATURE)
_MAX_TOKENS = _Range(1)

# Fields that this version refuses wherever they would change the outcome: the range that the
# contract gives them, and the value that changes nothing (None: every value does).
_UNSUPPORTED: dict[str, tuple[_Range | None, object]] = {
    "top_k": (_Range(0), 0),
    "top_p": (_Range(0, 1, above=True), 1),
    "min_p": (_Range(0, 1), 0),
    "repetition_penalty": (_Range(0, above=True), 1),
    "presence_penalty": (_Range(-2, 2), 0),
    "frequency_penalty": (_Range(-2, 2), 0),
    "min_tokens": (_Range(0), 0),
    "include_stop_in_output": (None, False),
    "logprobs": (_Range(0), None),
    "prompt_logprobs": (_Range(0), None),
    "n": (_Range(1), 1),
    "skip_special_tokens": (None, True),
}


def check_request(request: pb.GenerateRequest) -> None:
    """What can be told from a request without its prompt or its sampling.

    Raises:
        InvalidArgumentError: `request_id` or `cache_salt` is not acceptable, or a field is not
            supported.
    """
    if len(request.request_id) > MAX_REQUEST_ID_LENGTH or not request.request_id.isprintable():
        raise InvalidArgumentError(
            "request_id", f"must be printable and at most {MAX_REQUEST_ID_LENGTH} characters"
        )
    if len(request.cache_salt) > MAX_CACHE_SALT_LENGTH:
        raise InvalidArgumentError(
            "cache_salt",
            f"{len(request.cache_salt)} characters; the limit is {MAX_CACHE_SALT_LENGTH}",
        )
    if request.resume_token_ids:
        raise _not_supported("resume_token_ids")


def check_sampling(
    sampling: pb.SamplingParams, facts: ModelFacts, room: int, vocab_size: int
) -> Sampling:
    """The sampling of a request, defaults filled in, a random seed among them.

    Args:
        room: tokens that fit the model after the prompt.

    Raises:
        InvalidArgumentError: a field is out of its range, or not supported.
    """
    for name, (valid, neutral) in _UNSUPPORTED.items():
        if sampling.HasField(name):  # type: ignore[arg-type]
            _check_unsupported(f"sampling.{name}", getattr(sampling, name), valid, neutral)
    if sampling.logit_bias:
        raise _not_supported("sampling.logit_bias")
    return Sampling(
        temperature=_temperature(sampling, facts),
        seed=sampling.seed if sampling.HasField("seed") else secrets.randbits(64),
        max_tokens=_max_tokens(sampling, room),
        eos_token_ids=() if sampling.ignore_eos else facts.eos_token_ids,
        stop_token_ids=_stop_token_ids(sampling.stop_token_ids, vocab_size),
        stop=_stop_strings(sampling.stop),
    )


def check_messages(chat: pb.Chat) -> list[dict[str, str]]:
    """The messages of a chat, as chat templates take them.

    Raises:
        InvalidArgumentError: there are none, or a role is unknown.
    """
    if not chat.messages:
        raise InvalidArgumentError("chat.messages", "empty; give at least one message")
    for index, message in enumerate(chat.messages):
        if message.role not in ROLES:
            raise InvalidArgumentError(
                f"chat.messages[{index}].role", f"unknown; must be one of {', '.join(ROLES)}"
            )
    return [{"role": message.role, "content": message.content} for message in chat.messages]


def check_prompt_length(field: str, length: int, max_model_len: int) -> None:
    """A prompt has at least one token and leaves room for another.

    Raises:
        InvalidArgumentError: it does not.
    """
    if length == 0:
        raise InvalidArgumentError(field, "empty; a prompt needs at least one token")
    if length >= max_model_len:
        raise InvalidArgumentError(
            field,
            f"{length} tokens; the limit is {max_model_len - 1}, {max_model_len} that the engine "
            "holds less one to generate",
        )


def check_token_ids(field: str, token_ids: Sequence[int], vocab_size: int) -> None:
    """All ids are in the vocabulary.

    Raises:
        InvalidArgumentError: one is not.
    """
    if token_ids and max(token_ids) >= vocab_size:
        index, value = next((i, t) for i, t in enumerate(token_ids) if t >= vocab_size)
        raise InvalidArgumentError(
            f"{field}[{index}]", f"{value} is not below the vocabulary's size, {vocab_size}"
        )


def _check_unsupported(
    field: str, value: float | bool, valid: _Range | None, neutral: object
) -> None:
    if valid is not None and value not in valid:
        raise _out_of_range(field, value, valid)
    if neutral is None or value != neutral:
        raise _not_supported(field)


def _temperature(sampling: pb.SamplingParams, facts: ModelFacts) -> float:
    if not sampling.HasField("temperature"):
        return facts.temperature
    if sampling.temperature not in _TEMPERATURE:
        raise _out_of_range("sampling.temperature", sampling.temperature, _TEMPERATURE)
    return sampling.temperature


def _max_tokens(sampling: pb.SamplingParams, room: int) -> int:
    if not sampling.HasField("max_tokens"):
        return room
    if sampling.max_tokens not in _MAX_TOKENS:
        raise _out_of_range("sampling.max_tokens", sampling.max_tokens, _MAX_TOKENS)
    if sampling.max_tokens > room:
        raise InvalidArgumentError(
            "sampling.max_tokens",
            f"{sampling.max_tokens}; after this prompt the engine has room for {room}",
        )
    return sampling.max_tokens


def _stop_token_ids(token_ids: Sequence[int], vocab_size: int) -> tuple[int, ...]:
    field = "sampling.stop_token_ids"
    _check_count(field, token_ids, MAX_STOP_TOKEN_IDS)
    check_token_ids(field, token_ids, vocab_size)
    return tuple(token_ids)


def _stop_strings(stops: Sequence[str]) -> tuple[str, ...]:
    _check_count("sampling.stop", stops, MAX_STOP_STRINGS)
    for index, stop in enumerate(stops):
        if not 0 < len(stop) <= MAX_STOP_STRING_LENGTH:
            raise InvalidArgumentError(
                f"sampling.stop[{index}]",
                f"{len(stop)} characters; must be 1 to {MAX_STOP_STRING_LENGTH}",
            )
    return tuple(stops)


def _check_count(field: str, values: Sequence[object], limit: int) -> None:
    if len(values) > limit:
        raise InvalidArgumentError(field, f"{len(values)} given; the limit is {limit}")


def _out_of_range(field: str, value: float, valid: _Range) -> InvalidArgumentError:
    return InvalidArgumentError(field, f"{value} is out of range; must be {valid}")


def _not_supported(field: str) -> InvalidArgumentError:
    return InvalidArgumentError(field, "not supported by this version")
