"""Checks sampling parameters, field by field and against each other, and fills in defaults."""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from frontend.request import Sampling
from frontend.text.model_files import ModelFacts
from frontend.text.structured_output import check_structured_output
from frontend.validation import check_token_ids
from nano_vllm_grpc.pb import frontend_pb2 as pb
from shared.errors import InvalidArgumentError
from shared.sampling_params import (
    BOUNDS,
    FILTERS,
    LOGIT_BIAS,
    MAX_ITEMS,
    MAX_STOP_LENGTH,
    NUMBERS,
    WITH_BEAMS,
    Range,
    SamplingNumbers,
)

# Log-probabilities of several completions. The model's length bounds those of a single one.
MAX_LOGPROB_ENTRIES = 1 << 20


def check_sampling(
    sampling: pb.SamplingParams, facts: ModelFacts, room: int, vocab_size: int
) -> Sampling:
    """Checks a request's sampling and fills in defaults, including a random seed. Leaves out the
    bad words.

    Args:
        room: tokens that fit into the model after the prompt.

    Raises:
        InvalidArgumentError: a field is out of range, or two contradict each other.
    """
    _check_by_table(sampling)
    logit_bias = _logit_bias(sampling.logit_bias, vocab_size)
    _check_contradictions(sampling, logit_bias)
    max_tokens = _max_tokens(sampling, room)
    ends = Sampling(
        temperature=0,
        seed=0,
        max_tokens=max_tokens,
        min_tokens=_min_tokens(sampling.min_tokens, max_tokens),
        eos_token_ids=() if sampling.ignore_eos else facts.eos_token_ids,
        stop_token_ids=tuple(sampling.stop_token_ids),
        stop=tuple(sampling.stop),
        include_stop=sampling.include_stop_in_output,
        show_special=not _value(sampling, "skip_special_tokens", True),
    )
    check_token_ids("sampling.stop_token_ids", ends.stop_token_ids, vocab_size)
    if sampling.beam_width:
        penalty = _value(sampling, "length_penalty", 1.0)
        return replace(ends, beam_width=sampling.beam_width, length_penalty=penalty)
    checked = replace(
        ends,
        **_numbers(sampling, facts.defaults, vocab_size),
        seed=_value(sampling, "seed", secrets.randbits(64)),
        logit_bias=logit_bias,
        logprobs=_value(sampling, "logprobs", None),
        prompt_logprobs=_value(sampling, "prompt_logprobs", None),
        n=sampling.n or 1,
        grammar=(
            check_structured_output(sampling.structured_output)
            if _is_set(sampling, "structured_output")
            else None
        ),
    )
    _check_logprob_entries(checked)
    return checked


def check_resume(token_ids: Sequence[int], sampling: Sampling, vocab_size: int) -> list[int]:
    """Returns the tokens that a completion already has, up to the one that ends it, if any.

    Raises:
        InvalidArgumentError: an id is not in the vocabulary, there are more tokens than the
            completion may have, or the request asks for several completions or beam search.
    """
    field = "resume_token_ids"
    if not token_ids:
        return []
    if sampling.beam_width:
        raise InvalidArgumentError(field, "cannot be used with sampling.beam_width")
    if sampling.n > 1:
        raise InvalidArgumentError(
            field,
            f"cannot be used with sampling.n {sampling.n}: resume each completion alone, "
            "completion i with sampling.seed + i",
        )
    if len(token_ids) > sampling.max_tokens:
        raise InvalidArgumentError(
            field,
            f"{len(token_ids)} tokens; the limit is {sampling.max_tokens}, sampling.max_tokens or "
            "what fits the model",
        )
    token_ids = list(token_ids)  # faster than iterating over a message's field even once
    check_token_ids(field, token_ids, vocab_size)
    ends = {*sampling.eos_token_ids, *sampling.stop_token_ids}
    count = next((i for i, t in enumerate(token_ids, start=1) if t in ends), len(token_ids))
    return token_ids[:count]


def _is_set(sampling: pb.SamplingParams, name: str) -> bool:
    return sampling.HasField(name)  # type: ignore[arg-type]  # the stubs want a literal


def _value(sampling: pb.SamplingParams, name: str, default: Any) -> Any:
    return getattr(sampling, name) if _is_set(sampling, name) else default


def _check_by_table(sampling: pb.SamplingParams) -> None:
    for name, bounds in BOUNDS.items():
        if _is_set(sampling, name):
            _check_range(f"sampling.{name}", getattr(sampling, name), bounds.public)
    for name, limit in MAX_ITEMS.items():
        count = len(getattr(sampling, name))
        if count > limit:
            raise InvalidArgumentError(f"sampling.{name}", f"{count} given; the limit is {limit}")
    for name in ("stop", "bad_words"):
        for index, text in enumerate(getattr(sampling, name)):
            if not 0 < len(text) <= MAX_STOP_LENGTH:
                raise InvalidArgumentError(
                    f"sampling.{name}[{index}]",
                    f"{len(text)} characters; must be 1 to {MAX_STOP_LENGTH}",
                )


def _check_contradictions(
    sampling: pb.SamplingParams, logit_bias: Sequence[tuple[int, float]]
) -> None:
    structured = _is_set(sampling, "structured_output")
    if structured and sampling.ignore_eos:
        raise InvalidArgumentError(
            "sampling.structured_output",
            "cannot be used with sampling.ignore_eos: a match ends with the end of sequence",
        )
    if not sampling.beam_width:
        if _is_set(sampling, "length_penalty") and sampling.length_penalty != 1:
            raise InvalidArgumentError(
                "sampling.length_penalty",
                f"{sampling.length_penalty:g} requires sampling.beam_width",
            )
        return
    excluded = {
        "structured_output": structured,
        "logit_bias": bool(logit_bias),
        "bad_words": bool(sampling.bad_words),
        "stop": bool(sampling.stop),
        "seed": _is_set(sampling, "seed"),
    }
    for name, given in excluded.items():
        if given:
            raise _not_with_beams(sampling, name)
    for name, bounds in BOUNDS.items():
        neutral = bounds.with_beams
        if name not in WITH_BEAMS and _value(sampling, name, neutral) != neutral:
            instead = "" if neutral is None else f" or give {neutral:g}"
            raise _not_with_beams(sampling, name, instead)


def _not_with_beams(
    sampling: pb.SamplingParams, name: str, instead: str = ""
) -> InvalidArgumentError:
    return InvalidArgumentError(
        "sampling.beam_width",
        f"{sampling.beam_width} cannot be used with sampling.{name}; omit it{instead}",
    )


def _numbers(
    sampling: pb.SamplingParams, defaults: SamplingNumbers, vocab_size: int
) -> dict[str, Any]:
    """The numeric parameters. Defaults replace values without effect, because a step is faster if
    no row needs a filter."""
    values = {name: _value(sampling, name, getattr(defaults, name)) for name in NUMBERS}
    if values["temperature"] == 0:
        values |= {name: NUMBERS[name].default for name in FILTERS}
    if values["top_k"] >= vocab_size:
        values["top_k"] = 0
    return values


def _logit_bias(biases: Mapping[int, float], vocab_size: int) -> tuple[tuple[int, float], ...]:
    """The nonzero biases, ascending by id."""
    field = "sampling.logit_bias"
    for token_id, value in sorted(biases.items()):
        if token_id >= vocab_size:
            raise InvalidArgumentError(
                field, f"{token_id} is not below the vocabulary size, {vocab_size}"
            )
        _check_range(f"{field}[{token_id}]", value, LOGIT_BIAS)
    return tuple((token_id, value) for token_id, value in sorted(biases.items()) if value)


def _max_tokens(sampling: pb.SamplingParams, room: int) -> int:
    if not _is_set(sampling, "max_tokens"):
        return room
    if sampling.max_tokens > room:
        raise InvalidArgumentError(
            "sampling.max_tokens",
            f"{sampling.max_tokens}; this prompt leaves room for {room} tokens",
        )
    return sampling.max_tokens


def _min_tokens(min_tokens: int, max_tokens: int) -> int:
    if not 0 <= min_tokens <= max_tokens:
        raise InvalidArgumentError(
            "sampling.min_tokens",
            f"{min_tokens} is out of range; must be in [0, {max_tokens}], up to max_tokens or what "
            "fits the model",
        )
    return min_tokens


def _check_logprob_entries(sampling: Sampling) -> None:
    """Checks that log-probabilities of several completions can be held until they are read."""
    if sampling.logprobs is None or sampling.n == 1:
        return
    num_entries = sampling.n * sampling.max_tokens * (1 + sampling.logprobs)
    if num_entries > MAX_LOGPROB_ENTRIES:
        raise InvalidArgumentError(
            "sampling.logprobs",
            f"{sampling.n} completions of up to {sampling.max_tokens} tokens, "
            f"{1 + sampling.logprobs} each, have {num_entries} entries; the limit is "
            f"{MAX_LOGPROB_ENTRIES}: lower n, max_tokens or logprobs",
        )


def _check_range(field: str, value: float, valid: Range) -> None:
    if value not in valid:
        raise InvalidArgumentError(field, f"{value} is out of range; must be {valid}")
