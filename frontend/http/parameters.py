"""The parameters that all APIs share, under the names that vLLM gives them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Literal, TypeVar

import orjson
from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError

from frontend.http.errors import ParameterError
from nano_vllm_grpc.pb import frontend_pb2 as pb

Item = TypeVar("Item")
Int32 = Annotated[int, Field(ge=-(1 << 31), lt=1 << 31)]
TokenId = Annotated[int, Field(ge=0, lt=1 << 32)]
# Only the first wrong item is reported, because a hostile body may have a million of them.
Items = Annotated[list[Item], Field(fail_fast=True)]
_Seed = Annotated[int, Field(ge=-(1 << 63), lt=1 << 64)]
MAX_DEPTH = 64  # of the values in a request that have no form of their own


def _check_depth(value: Any, levels: int = MAX_DEPTH) -> Any:
    if isinstance(value, dict | list):
        if not levels:
            raise ValueError(f"nests deeper than {MAX_DEPTH} levels")
        for each in value.values() if isinstance(value, dict) else value:
            _check_depth(each, levels - 1)
    return value


Object = Annotated[dict[str, Any], AfterValidator(_check_depth)]


class Body(BaseModel):
    """A part of a request. Clients send further keys in nested parts, such as those of an earlier
    answer, so only unknown parameters of the whole request are errors."""

    model_config = ConfigDict(extra="ignore", strict=True, frozen=True)


class JsonSchema(Body):
    """A schema, its name and its description, of which only the schema counts."""

    name: str = ""
    json_schema: Object | None = Field(None, alias="schema")


class ResponseFormat(Body):
    """`response_format` of OpenAI, and the structural tags of vLLM."""

    type: Literal["text", "json_object", "json_schema", "structural_tag"]
    json_schema: JsonSchema | None = None
    format: Object | None = None
    structures: Items[Object] | None = None
    triggers: Items[str] | None = None


class StructuredOutputs(Body):
    """`structured_outputs` of vLLM: exactly one constraint."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)

    json_schema: str | Object | None = Field(None, alias="json")
    regex: str | None = None
    choice: Items[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None
    structural_tag: str | None = None


class ModelFields(Body):
    """The model that a request is for."""

    model: str | None = None


class RequestFields(ModelFields):
    """The parameters of all requests to the model, whatever it makes of a prompt."""

    priority: Int32 | None = None
    cache_salt: str | None = None
    request_id: str | None = None
    engine: str | None = None
    user: str | None = None  # without effect

    @property
    def common(self) -> dict[str, Any]:
        """The fields that the messages of all these requests have."""
        return self.model_dump(include={"priority", "cache_salt", "engine"})


class SamplingFields(RequestFields):
    """Sampling parameters. None is an unset parameter, in JSON as well."""

    store: bool | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: Int32 | None = None  # -1: off, as for vLLM
    min_p: float | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    seed: _Seed | None = None  # a negative one means its two's complement
    min_tokens: Int32 | None = None
    stop: str | Items[str] | None = None
    stop_token_ids: Items[TokenId] | None = None
    include_stop_str_in_output: bool | None = None
    ignore_eos: bool | None = None
    logit_bias: dict[str, float] | None = None
    bad_words: Items[str] | None = None
    skip_special_tokens: bool | None = None
    truncate_prompt_tokens: Int32 | None = None
    structured_outputs: StructuredOutputs | None = None
    regex: str | None = None
    ebnf: str | None = None
    # These parameters have no effect on the answer.
    metadata: Object | None = None
    service_tier: Literal["auto", "default"] | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    prompt_cache_retention: str | None = None
    spaces_between_special_tokens: Literal[True] | None = None


class StreamOptions(Body):
    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class CompletionFields(SamplingFields):
    """The parameters that only completions of chats and of texts have."""

    stream: bool | None = None
    stream_options: StreamOptions | None = None
    n: Int32 | None = None
    use_beam_search: bool | None = None  # then `n` is the number of beams
    length_penalty: float | None = None
    prompt_logprobs: Int32 | None = None
    response_format: ResponseFormat | None = None
    resume_token_ids: Items[TokenId] | None = None
    return_token_ids: bool | None = None
    return_tokens_as_token_ids: bool | None = None


Parameters = TypeVar("Parameters", bound=ModelFields)


def read_body(model: type[Parameters], value: object) -> Parameters:
    """Reads a request's JSON value.

    Raises:
        ParameterError: a parameter is unknown, or has a value of the wrong kind.
    """
    if not isinstance(value, dict):
        raise ParameterError("body", "must be a JSON object")
    known = {field.alias or name for name, field in model.model_fields.items()}
    for name in value:
        if name not in known and value[name] is not None:
            raise ParameterError(name[:64], "not a parameter of this server")
    try:
        return model.model_validate(value)
    except ValidationError as error:
        errors = error.errors(include_url=False, include_context=False, include_input=False)
        first = max(errors, key=lambda each: len(each["loc"]))
        message = first["msg"].removeprefix("Value error, ")
        raise ParameterError(_path(first["loc"]), message) from None


def _path(loc: Sequence[int | str]) -> str:
    """`messages[0].content` without the names that pydantic gives the members of unions."""
    path = ""
    for part in loc:
        if isinstance(part, int):
            path += f"[{part}]"
        elif part.isidentifier() and part.islower() and part not in ("str", "int", "float", "bool"):
            path += f".{part}" if path else part
    return path or "body"


def generate_request(fields: SamplingFields) -> pb.GenerateRequest:
    """A request without its id and its prompt.

    Raises:
        ParameterError: a value is out of range, or two parameters contradict each other.
    """
    message = pb.GenerateRequest(sampling=_sampling(fields), store=fields.store, **fields.common)
    if isinstance(fields, CompletionFields):
        message.resume_token_ids.extend(fields.resume_token_ids or ())
    return message


# Parameters that gRPC has under the same name and with the same meaning.
_OTHERWISE = ("bad_words", "logit_bias", "seed", "stop", "stop_token_ids", "top_k")
_SAME = [
    name
    for name in pb.SamplingParams.DESCRIPTOR.fields_by_name
    if name in CompletionFields.model_fields and name not in _OTHERWISE
]


def _sampling(fields: SamplingFields) -> pb.SamplingParams:
    sampling = pb.SamplingParams()
    for name in _SAME:
        if (value := getattr(fields, name, None)) is not None:
            setattr(sampling, name, value)
    if fields.top_k is not None:
        sampling.top_k = 0 if fields.top_k == -1 else fields.top_k
    if fields.seed is not None:
        sampling.seed = fields.seed % (1 << 64)
    if fields.include_stop_str_in_output is not None:
        sampling.include_stop_in_output = fields.include_stop_str_in_output
    sampling.stop.extend([fields.stop] if isinstance(fields.stop, str) else fields.stop or [])
    sampling.stop_token_ids.extend(fields.stop_token_ids or [])
    sampling.bad_words.extend(fields.bad_words or [])
    for key, bias in (fields.logit_bias or {}).items():
        if not (key.isdecimal() and key.isascii() and len(key) < 11 and int(key) < 1 << 32):
            raise ParameterError("logit_bias", "a key is not a token id")
        sampling.logit_bias[int(key)] = bias
    if isinstance(fields, CompletionFields) and fields.use_beam_search:
        sampling.beam_width = 1 if fields.n is None else fields.n
        if sampling.beam_width < 1:
            raise ParameterError("n", f"{fields.n}; must be at least 1")
        sampling.ClearField("n")
    _set_constraint(fields, sampling)
    return sampling


def _set_constraint(fields: SamplingFields, sampling: pb.SamplingParams) -> None:
    """Raises ParameterError if there are two constraints, or one is incomplete."""
    given: dict[str, tuple[str, Any]] = {}
    form = fields.response_format if isinstance(fields, CompletionFields) else None
    if form and form.type != "text":
        given["response_format"] = _of_response_format(form)
    if fields.structured_outputs:
        found = fields.structured_outputs.model_dump(exclude_none=True)
        for name, value in found.items():
            given[f"structured_outputs.{name}"] = name, value
        if not found:
            raise ParameterError("structured_outputs", "empty; must have one constraint")
    if fields.regex is not None:
        given["regex"] = "regex", fields.regex
    if fields.ebnf is not None:
        given["ebnf"] = "grammar", fields.ebnf
    if len(given) > 1:
        raise ParameterError(
            "structured_outputs", f"give one constraint, not {len(given)}: {', '.join(given)}"
        )
    for kind, value in given.values():
        set_constraint(sampling, kind, value)


def set_constraint(sampling: pb.SamplingParams, kind: str, value: Any) -> None:
    """Sets a constraint, a field of `StructuredOutput`. JSON may be a text or a value."""
    if kind == "choice":
        sampling.structured_output.choice.options.extend(value)
        sampling.structured_output.choice.SetInParent()
    else:
        value = value if isinstance(value, str | bool) else orjson.dumps(value).decode()
        setattr(sampling.structured_output, kind, value)


def _of_response_format(form: ResponseFormat) -> tuple[str, Any]:
    if form.type == "json_object":
        return "json_object", True
    if form.type == "structural_tag":
        tag = form.model_dump(include={"type", "format", "structures", "triggers"})
        return "structural_tag", {key: value for key, value in tag.items() if value is not None}
    if form.json_schema is None or form.json_schema.json_schema is None:
        raise ParameterError("response_format.json_schema.schema", "missing")
    return "json_schema", form.json_schema.json_schema
