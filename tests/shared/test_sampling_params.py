"""Every parameter in the table is in every contract, and vice versa."""

from __future__ import annotations

import re
from dataclasses import fields
from pathlib import Path

import pytest
from google.protobuf.descriptor import Descriptor, FieldDescriptor

from nano_vllm_grpc import SamplingParams
from nano_vllm_grpc.pb import frontend_pb2
from shared.pb import scheduler_pb2, worker_pb2
from shared.sampling_params import BOUNDS, COLUMNS, NUMBERS, SamplingNumbers

PUBLIC = frontend_pb2.SamplingParams.DESCRIPTOR
TO_SCHEDULER = scheduler_pb2.TokenSampling.DESCRIPTOR
TO_WORKERS = worker_pb2.SamplingFeatures.DESCRIPTOR
API_PAGE = Path(__file__).parents[2] / "docs" / "reference" / "sampling.md"

# Numbers in the public contract with a meaning of their own.
OTHER_NUMBERS = {"seed", "min_tokens"}
# Other fields of TokenSampling and SamplingFeatures.
OTHERS_TO_SCHEDULER = {
    *("seed", "max_tokens", "min_tokens", "eos_token_ids", "stop_token_ids", "bias_ids"),
    *("bias_values", "logprobs", "prompt_logprobs", "beam_width", "length_penalty", "grammar"),
    *("bad_words", "pooling", "yes_id", "no_id"),
}
OTHER_COLUMNS = {
    *("rows", "prompt_lens", "num_logprobs", "bias_offsets", "bias_ids", "bias_values"),
    *("masked", "masks"),
}


def names(message: Descriptor, *types: int) -> set[str]:
    return {each.name for each in message.fields if not types or each.type in types}


@pytest.mark.parametrize("name", NUMBERS)
def test_a_parameter_is_a_field_of_its_type_in_each_message(name: str) -> None:
    parameter = NUMBERS[name]
    wanted = FieldDescriptor.TYPE_INT32 if parameter.whole else FieldDescriptor.TYPE_FLOAT
    public = PUBLIC.fields_by_name[name]
    assert public.type == wanted
    assert public.has_presence  # what is not set takes a default
    assert TO_SCHEDULER.fields_by_name[name].type == wanted
    if parameter.column:
        assert TO_WORKERS.fields_by_name[parameter.column].type == FieldDescriptor.TYPE_BYTES
    assert bool(parameter.column) == (parameter.effect is not None)


def test_each_message_has_no_number_that_is_not_defined() -> None:
    numeric = (
        *(FieldDescriptor.TYPE_FLOAT, FieldDescriptor.TYPE_INT32, FieldDescriptor.TYPE_UINT64),
        *(FieldDescriptor.TYPE_DOUBLE, FieldDescriptor.TYPE_UINT32, FieldDescriptor.TYPE_INT64),
    )
    singular = {each.name for each in PUBLIC.fields if each.has_presence}
    assert names(PUBLIC, *numeric) & singular == {*BOUNDS, *OTHER_NUMBERS}
    assert names(TO_SCHEDULER) == {*NUMBERS, *OTHERS_TO_SCHEDULER}
    assert names(TO_WORKERS) == {each.column for each in COLUMNS.values()} | OTHER_COLUMNS


def test_the_client_and_the_page_have_every_field_of_the_contract() -> None:
    assert {each.name for each in fields(SamplingParams)} == names(PUBLIC)
    assert names(PUBLIC) <= set(re.findall(r"^\| `(\w+)` \|", API_PAGE.read_text(), re.MULTILINE))


@pytest.mark.parametrize("name", NUMBERS)
def test_the_engine_accepts_every_public_value(name: str) -> None:
    parameter = NUMBERS[name]
    public, engine = parameter.public, parameter.engine
    assert getattr(SamplingNumbers(), name) == parameter.default
    assert parameter.default in public
    assert parameter.with_beams in public
    assert engine.low <= public.low
    assert public.above >= (engine.above and engine.low == public.low)
    assert min(public.high, 2**31 - 1 if parameter.whole else public.high) <= engine.high
