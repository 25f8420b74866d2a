"""A request's fields other than its sampling, at and beyond their limits."""

from __future__ import annotations

from typing import Any

import pytest

from frontend.api.validation import check_prompt_length, check_request, check_token_ids
from nano_vllm_grpc.pb import frontend_pb2 as pb
from shared.errors import InvalidArgumentError


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"request_id": "x" * 257}, "request_id"),
        ({"request_id": "a\nb"}, "request_id"),
        ({"cache_salt": "x" * 257}, "cache_salt"),
        ({"engine": "x" * 257}, "engine"),
    ],
)
def test_bad_request_fields_are_refused_by_name(fields: dict[str, Any], field: str) -> None:
    with pytest.raises(InvalidArgumentError, match=f"^{field}: "):
        check_request(pb.GenerateRequest(**fields))


def test_request_ids_may_have_256_printable_characters() -> None:
    check_request(pb.GenerateRequest(request_id="é" * 256))


def test_a_prompt_leaves_room_for_a_token() -> None:
    check_prompt_length("text", 1, max_model_len=10)
    check_prompt_length("text", 9, max_model_len=10)
    with pytest.raises(InvalidArgumentError, match=r"^text: 10 tokens; the limit is 9"):
        check_prompt_length("text", 10, max_model_len=10)
    with pytest.raises(InvalidArgumentError, match=r"^text: empty"):
        check_prompt_length("text", 0, max_model_len=10)


def test_token_ids_are_below_the_vocabulary_size() -> None:
    check_token_ids("token_ids", [], vocab_size=10)
    check_token_ids("token_ids", [0, 9], vocab_size=10)
    with pytest.raises(InvalidArgumentError, match=r"^token_ids\[1\]: 10 is not below .* 10"):
        check_token_ids("token_ids", [0, 10, 11], vocab_size=10)
