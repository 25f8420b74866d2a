"""Translates requests of `vllm_engine.proto` into requests of protos/frontend.proto, which are then
checked like any other. Fields for other kinds of models, and for engines that share a request, are
rejected if they ask for something."""

from __future__ import annotations

from smg_grpc_proto.generated import vllm_engine_pb2 as vllm

from nano_vllm_grpc.pb import frontend_pb2 as pb
from shared.errors import InvalidArgumentError

_TEXT_ONLY, _ONE_ENGINE = "the model takes only text", "one engine runs the whole request"
_UNSUPPORTED = {
    "mm_inputs": _TEXT_ONLY,
    "extra_mm_inputs": _TEXT_ONLY,
    "media_refs": _TEXT_ONLY,
    "kv_transfer_params": _ONE_ENGINE,
    "kv_transfer_params_json": _ONE_ENGINE,
}
# For these fields, zero means that the field is unset.
_UNSET_IS_ZERO = ("top_p", "repetition_penalty", "n")
# For these fields, zero is a value, and an unset field means zero.
_ALWAYS_SET = ("top_k", "min_p", "presence_penalty", "frequency_penalty", "min_tokens")
_OPTIONAL = ("temperature", "max_tokens", "logprobs", "prompt_logprobs")


def generate_request(message: vllm.GenerateRequest) -> pb.GenerateRequest:
    """The request that a client of the public service would send instead of `message`.

    Raises:
        InvalidArgumentError: `message` asks for something that no single engine of a text model
            does.
    """
    _check_for_others(message)
    request = pb.GenerateRequest(request_id=message.request_id)
    if message.HasField("tokenized"):
        request.token_ids.ids.extend(message.tokenized.input_ids)
    elif message.HasField("text"):
        request.text = message.text
    _set_sampling(message.sampling_params, request.sampling)
    return request


def _check_for_others(message: vllm.GenerateRequest) -> None:
    for field, _ in message.ListFields():
        if reason := _UNSUPPORTED.get(field.name):
            raise InvalidArgumentError(field.name, f"not supported: {reason}")
    if message.data_parallel_rank:
        raise InvalidArgumentError(
            "data_parallel_rank", f"{message.data_parallel_rank}; the only rank is 0"
        )


def _set_sampling(given: vllm.SamplingParams, sampling: pb.SamplingParams) -> None:
    for name in _OPTIONAL:
        if given.HasField(name):
            setattr(sampling, name, _in_int32(name, getattr(given, name)))
    for name in _UNSET_IS_ZERO:
        if value := getattr(given, name):
            setattr(sampling, name, _in_int32(name, value))
    for name in _ALWAYS_SET:
        setattr(sampling, name, _in_int32(name, getattr(given, name)))
    if given.HasField("seed"):
        sampling.seed = given.seed % (1 << 64)  # the protocol allows negative seeds, ours does not
    sampling.stop.extend(given.stop)
    sampling.stop_token_ids.extend(given.stop_token_ids)
    sampling.ignore_eos = given.ignore_eos
    sampling.include_stop_in_output = given.include_stop_str_in_output
    # The setting also changes the text that is searched for stop strings.
    sampling.skip_special_tokens = given.skip_special_tokens
    for token_id, bias in given.logit_bias.items():
        if token_id < 0:
            raise InvalidArgumentError("sampling.logit_bias", f"{token_id} is not a token id")
        sampling.logit_bias[token_id] = bias
    _set_constraint(given, sampling)


def _set_constraint(given: vllm.SamplingParams, sampling: pb.SamplingParams) -> None:
    kind = given.WhichOneof("constraint")
    if kind is None:
        return
    structured = sampling.structured_output
    if kind == "choice":
        structured.choice.options.extend(given.choice.choices)
        structured.choice.SetInParent()
    else:
        setattr(structured, kind, getattr(given, kind))


def _in_int32(name: str, value: float) -> float:
    """Returns `value`, whose type may be wider than our field's, if it fits in an int32."""
    if value >= 1 << 31:
        raise InvalidArgumentError(f"sampling.{name}", f"{value} is too large")
    return value
