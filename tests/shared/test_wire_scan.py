"""`scan`: agrees with protobuf about what is a message, and bounds what a walk costs."""

from __future__ import annotations

import random

import pytest
from google.protobuf.message import DecodeError

from nano_vllm_grpc.pb import frontend_pb2 as pb
from shared.errors import InvalidArgumentError
from shared.rpc import wire_scan
from shared.rpc.wire_scan import scan

GENERATE = pb.GenerateRequest.DESCRIPTOR
# Four megabytes of the least that makes a field, and of what is slow to walk over.
MANY = 2_000_000
FLOODS = {
    "empty chat messages": pb.GenerateRequest(
        chat=pb.Chat(messages=[pb.ChatMessage()] * MANY)
    ).SerializeToString(),
    "unknown fields in a chat": b"\x22\x80\x92\xf4\x01" + b"\x78\x00" * MANY,
    "unknown varints": b"\x78\x00" * MANY,
    "empty stop strings": b"\x2a\x80\x92\xf4\x01" + b"\x5a\x00" * MANY,
    "unpacked ids": b"\x38\x01" * MANY,
    "long varints": (b"\xf8\xff\xff\xff\x0f" + b"\xff" * 9 + b"\x01") * 270_000,
}


def steps(data: bytes) -> int:
    """The number of pauses of a whole walk."""
    return sum(1 for _ in scan(data, GENERATE))


def test_a_long_prompt_may_be_packed_or_not() -> None:
    packed = pb.GenerateRequest(token_ids=pb.TokenIds(ids=range(40_960)))
    assert steps(packed.SerializeToString()) == 0
    ids = b"".join(b"\x08" + pb.TokenIds(ids=[i]).SerializeToString()[2:] for i in range(40_960))
    unpacked = b"\x1a" + pb.TokenIds(ids=[len(ids)]).SerializeToString()[2:] + ids
    assert pb.GenerateRequest.FromString(unpacked) == packed
    assert steps(unpacked) == 40_961 // wire_scan._FIELDS_AT_ONCE


def test_oneofs_are_checked_at_every_level() -> None:
    both = pb.StructuredOutput(regex="a").SerializeToString() + b"\x28\x01"
    sampling = b"\xb2\x01" + bytes([len(both)]) + both
    with pytest.raises(InvalidArgumentError) as raised:
        steps(b"\x2a" + bytes([len(sampling)]) + sampling)
    assert raised.value.field == "sampling.structured_output.kind"
    assert raised.value.reason == "regex and json_object are set; give one"
    steps(b"\x12\x01a\x12\x01b")  # one field, twice: the last counts


def test_a_walk_accepts_what_protobuf_accepts(seed: int) -> None:
    rng = random.Random(seed)
    whole = pb.GenerateRequest(
        request_id="r",
        chat=pb.Chat(messages=[pb.ChatMessage(role="user", content="x" * 200)] * 3),
        sampling=pb.SamplingParams(
            temperature=0.5, seed=1 << 63, stop=["a", "b"], logit_bias={7: 1.5}
        ),
        priority=-1,
        resume_token_ids=[1, 300, 70_000],
    ).SerializeToString()
    refused = 0
    for _ in range(20_000):
        data = bytearray(whole)
        for _ in range(rng.randint(1, 2)):
            data[rng.randrange(len(data))] = rng.randrange(256)
        try:
            pb.GenerateRequest.FromString(bytes(data))
        except DecodeError:
            refused += 1
            continue
        try:
            steps(bytes(data))
        except (InvalidArgumentError, DecodeError) as error:
            # All that it refuses beyond what protobuf does: two of a oneof, and groups.
            if "give one" not in str(error) and "of type 3" not in str(error):
                raise
    assert 1000 < refused < 19_000
