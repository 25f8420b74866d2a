"""The page of sampling parameters."""

from __future__ import annotations

from collections.abc import Iterator

from frontend.sampling_checks import check_sampling
from frontend.text.model_files import ModelFacts
from nano_vllm_grpc.pb import frontend_pb2 as pb
from shared.sampling_params import (
    BOUNDS,
    FILTERS,
    LOGIT_BIAS,
    MAX_ITEMS,
    MAX_STOP_LENGTH,
    NUMBERS,
    PENALTIES,
    WITH_BEAMS,
    Range,
)
from tools.reference import markdown
from tools.reference.markdown import code, codes, described, number, prose, table
from tools.reference.protos import Part, contract

_ROOM = 1000
# What the values of parameters without a range are. The frontend checks them by the model.
_VALUES = {
    "seed": "any",
    "min_tokens": "0 to `max_tokens`",
    "stop": f"{{}} strings of 1 to {number(MAX_STOP_LENGTH)} characters",
    "stop_token_ids": "{} ids of the vocabulary",
    "logit_bias": f"{{}} ids of the vocabulary, with {LOGIT_BIAS.low} to {LOGIT_BIAS.high}",
    "structured_output": "one of its kinds",
    "bad_words": f"{{}} texts of 1 to {number(MAX_STOP_LENGTH)} characters",
}
_DEFAULTS = {"seed": "random", "max_tokens": "what fits the model"}


def page() -> str:
    limited = {name: each.with_beams for name, each in BOUNDS.items() if name not in WITH_BEAMS}
    neutral = [(code(name), number(value)) for name, value in limited.items() if value is not None]
    excluded = [name for name, value in limited.items() if value is None]
    return markdown.page(
        "Sampling parameters",
        "This page lists the parameters of a request's completions, with their types, defaults "
        "and ranges.",
        "They are the fields of [`SamplingParams`](grpc.md#samplingparams) in the gRPC API, and "
        "the arguments of `SamplingParams` in the Python client. Where a default begins with "
        "\"model's\", the model's `generation_config.json` may have another one, which `GetModel` "
        "returns. The frontend rejects a value that is out of its range, infinite or not a number.",
        described(("Parameter", "Type", "Default", "Values", "Meaning"), _rows()),
        "## Filters and penalties",
        f"Logits change in this order: `logit_bias`, penalties ({codes(PENALTIES)}), "
        f"`structured_output`, `temperature`, filters ({codes(FILTERS)}). With `temperature` 0, "
        "filters have no effect.",
        "## Beam search",
        f"With `beam_width` above 0, requests must leave out {codes(excluded)}, `seed`, `stop`, "
        "`logit_bias`, `bad_words` and `structured_output`. These parameters may have one value "
        "only.",
        table(("Parameter", "Value"), neutral),
        "Without `beam_width`, `length_penalty` must be 1.",
    )


def _rows() -> Iterator[tuple[str, ...]]:
    (message,) = (each for each in contract("frontend").types if each.name == "SamplingParams")
    defaults = _defaults()
    for field in message.parts:
        default = defaults.get(field.name, "none")
        yield code(field.name), code(_type(field)), default, _values(field), prose(field.comment)


def _type(field: Part) -> str:
    return field.types[0].removeprefix("optional ")


def _values(field: Part) -> str:
    if field.name in BOUNDS:
        return _range(BOUNDS[field.name].public)
    if _type(field) == "bool":
        return "true, false"
    count = MAX_ITEMS.get(field.name)
    return _VALUES[field.name].format(f"at most {number(count)}" if count else "")


def _range(valid: Range) -> str:
    if str(valid).startswith("at least"):
        return f"at least {valid.low}"
    return f"{'above ' if valid.above else ''}{valid.low:g} to {valid.high:g}"


def _defaults() -> dict[str, str]:
    """The values that the frontend gives to parameters that a request leaves unset."""
    facts = ModelFacts("", vocab_size=1, eos_token_ids=(0,))
    made = check_sampling(pb.SamplingParams(), facts, _ROOM, facts.vocab_size)
    beams = check_sampling(pb.SamplingParams(beam_width=1), facts, _ROOM, facts.vocab_size)
    found = {
        **{name: getattr(made, name) for name in BOUNDS if hasattr(made, name)},
        "min_tokens": made.min_tokens,
        "length_penalty": beams.length_penalty,
        "include_stop_in_output": made.include_stop,
        "ignore_eos": not made.eos_token_ids,
        "skip_special_tokens": not made.show_special,
    }
    shown = {name: _shown(value) for name, value in found.items()}
    for name, parameter in NUMBERS.items():
        if parameter.from_model:
            shown[name] = f"model's, {shown[name]}"
    return shown | _DEFAULTS


def _shown(value: float | None) -> str:
    if value is None:
        return "none"
    return str(value).lower() if isinstance(value, bool) else number(value)
