"""The sampling parameters, each defined once: name, default, ranges, column of a step.

A field of `SamplingNumbers` is a numeric parameter. It has the same name in `SamplingParams` of
frontend.proto and in `TokenSampling` of scheduler.proto. Its column is one of `SamplingFeatures` in
worker.proto. The frontend takes its defaults and checks from these definitions. The scheduler takes
its checks and columns from them, and the workers take their checks. Each service checks the values
that it receives once, at its interface.
"""

from __future__ import annotations

import enum
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any

_MAX = sys.float_info.max
_MAX_FLOAT32 = 3.4028234663852886e38
_MAX_INT32 = 2**31 - 1


@dataclass(frozen=True, slots=True)
class Range:
    """A closed range of finite numbers; with `above`, `low` itself is excluded."""

    low: float
    high: float = _MAX
    above: bool = False

    def __contains__(self, value: float) -> bool:  # NaN is in no range
        return (self.low < value if self.above else self.low <= value) and value <= self.high

    def __str__(self) -> str:
        if self.high == _MAX:
            return f"at least {self.low}"
        if self.high == _MAX_FLOAT32:
            if self.low == -self.high:
                return "finite"
            return f"finite and {'above' if self.above else 'at least'} {self.low}"
        return f"in {'(' if self.above else '['}{self.low}, {self.high}]"


@dataclass(frozen=True, slots=True, kw_only=True)
class Bounds:
    """The values that a parameter may have."""

    public: Range  # values that the frontend accepts from clients
    engine: Range  # values that the scheduler and the workers can run; contains `public`
    with_beams: float | None = None  # the only value allowed with beam search; None: none is


class Effect(enum.Enum):
    """The kinds of change that a column makes to logits."""

    PENALTY = enum.auto()  # depends on the tokens of the context
    FILTER = enum.auto()  # excludes unlikely tokens, in rows that are not greedy


@dataclass(frozen=True, slots=True, kw_only=True)
class Parameter(Bounds):
    """A number that shapes the distribution of the next token."""

    default: float  # this value leaves the distribution unchanged
    column: str  # of SamplingFeatures, int32 if the default is an int, else float32; empty: none
    effect: Effect | None  # how the column changes logits
    from_model: bool  # generation_config.json may set another default

    @property
    def whole(self) -> bool:
        return isinstance(self.default, int)

    @property
    def zero(self) -> float:
        """The value that a zero in TokenSampling stands for; an unset field also reads as zero."""
        return 0 if 0 in self.engine else self.default


def _number(
    default: float,
    public: Range,
    *,
    engine: Range | None = None,
    column: str = "",
    effect: Effect | None = None,
    from_model: bool = False,
    with_beams: float | None = None,
) -> Any:
    parameter = Parameter(
        public=public,
        engine=engine or public,
        default=default,
        column=column,
        effect=effect,
        from_model=from_model,
        with_beams=default if with_beams is None else with_beams,
    )
    return field(default=default, metadata={"parameter": parameter})


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingNumbers:
    """Values of the numeric sampling parameters."""

    temperature: float = _number(  # 0 is greedy
        1.0, Range(0, 2), engine=Range(0, _MAX_FLOAT32), from_model=True, with_beams=0
    )
    top_k: int = _number(  # 0: off
        0,
        Range(0),
        engine=Range(0, _MAX_INT32),
        column="top_k",
        effect=Effect.FILTER,
        from_model=True,
    )
    top_p: float = _number(
        1.0, Range(0, 1, above=True), column="top_p", effect=Effect.FILTER, from_model=True
    )
    min_p: float = _number(0.0, Range(0, 1), column="min_p", effect=Effect.FILTER, from_model=True)
    repetition_penalty: float = _number(
        1.0,
        Range(1e-30, 1e30),  # beyond it, logits overflow
        engine=Range(0, _MAX_FLOAT32, above=True),
        column="repetition_penalties",
        effect=Effect.PENALTY,
        from_model=True,
    )
    presence_penalty: float = _number(
        0.0,
        Range(-2, 2),
        engine=Range(-_MAX_FLOAT32, _MAX_FLOAT32),
        column="presence_penalties",
        effect=Effect.PENALTY,
    )
    frequency_penalty: float = _number(
        0.0,
        Range(-2, 2),
        engine=Range(-_MAX_FLOAT32, _MAX_FLOAT32),
        column="frequency_penalties",
        effect=Effect.PENALTY,
    )


class GrammarKind(enum.IntEnum):
    """The language that a grammar is written in; the numbers are those of `scheduler.proto`."""

    JSON_SCHEMA = 1
    REGEX = 2
    EBNF = 3
    JSON = 4  # any object or array; no text
    STRUCTURAL_TAG = 5


class Pooling(enum.IntEnum):
    """How an embedding, or a score, is made of a prompt's hidden states. A score is the difference
    of two logits. The numbers are those of `scheduler.proto`."""

    NONE = 0
    LAST = 1
    MEAN = 2
    SCORE = 3


@dataclass(frozen=True, slots=True)
class Grammar:
    """A language that a completion must belong to; `kind` is a `GrammarKind`, once checked."""

    kind: int
    text: str = ""


DEFAULTS = SamplingNumbers()
NUMBERS: Mapping[str, Parameter] = {
    each.name: each.metadata["parameter"] for each in fields(SamplingNumbers)
}
COLUMNS: Mapping[str, Parameter] = {name: each for name, each in NUMBERS.items() if each.column}
FILTERS = tuple(name for name, each in COLUMNS.items() if each.effect is Effect.FILTER)
PENALTIES = tuple(name for name, each in COLUMNS.items() if each.effect is Effect.PENALTY)

# Includes the parameters that say how much to compute and to return.
BOUNDS: Mapping[str, Bounds] = {
    **NUMBERS,
    "max_tokens": Bounds(public=Range(1), engine=Range(1, _MAX_INT32)),
    "logprobs": Bounds(public=Range(0, 20), engine=Range(0, 1000)),
    "prompt_logprobs": Bounds(public=Range(0, 20), engine=Range(0, 1000)),
    "n": Bounds(public=Range(1, 16), engine=Range(1, 64), with_beams=1),
    "beam_width": Bounds(public=Range(0, 16), engine=Range(0, 64)),
    # Within this range, a length raised to the power of `length_penalty` is finite.
    "length_penalty": Bounds(public=Range(-10, 10), engine=Range(-10, 10)),
}
# Beam search accepts any value of these parameters.
WITH_BEAMS = ("max_tokens", "beam_width", "length_penalty")

# The maximum number of items in parameters that are lists or maps.
MAX_ITEMS: Mapping[str, int] = {
    "stop": 16,
    "stop_token_ids": 64,
    "logit_bias": 1024,
    "bad_words": 128,
}
MAX_STOP_LENGTH = 1024  # characters; also of bad words
LOGIT_BIAS = Range(-100, 100)
BANNED = -1e9  # the bias of a token that is sampled only if no other may be
