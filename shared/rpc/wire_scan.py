"""Looks at the bytes of a message before protobuf parses them.

Parsing holds the interpreter's lock, and a few bytes may make an object: four megabytes of empty
messages take protobuf 0.1 s. Walking over the fields first tells how many objects there will be. It
also sees what a parsed message no longer shows: two fields of one oneof.

After https://protobuf.dev/programming-guides/encoding.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from typing import Any, NamedTuple

from google.protobuf.message import DecodeError

from shared.errors import InvalidArgumentError

# In a message and the messages within it. A packed array is one field, however long. Protobuf takes
# 4 ms at most for so many, and they are enough for every token id of a long prompt unpacked.
MAX_FIELDS = 1 << 16
# Fields between two pauses: a millisecond or so.
_FIELDS_AT_ONCE = 1024
_VARINT, _FIXED64, _LENGTH, _FIXED32 = 0, 1, 2, 5
_MAX_VARINT_BYTES = 10


class _Plan(NamedTuple):
    """The fields of a message type that a walk must know, by number."""

    messages: dict[int, Any]
    oneofs: dict[int, Any]  # of which a field is a member


@cache
def _plan(descriptor: Any) -> _Plan:
    return _Plan(
        {field.number: field for field in descriptor.fields if field.message_type},
        {
            field.number: oneof
            for oneof in descriptor.oneofs
            if len(oneof.fields) > 1  # an optional field is a oneof of its own
            for field in oneof.fields
        },
    )


def scan(data: bytes, descriptor: Any) -> Iterator[int]:
    """Walks over a message of the type `descriptor`. Pauses so often that none of its steps takes
    longer than a millisecond or so, and yields the number of fields so far.

    Raises:
        DecodeError: a field does not end where it should; the values are left to protobuf.
        InvalidArgumentError: there are more than `MAX_FIELDS` fields, or two of a oneof.
    """
    try:
        yield from _walk(data, descriptor)
    except IndexError as error:
        raise DecodeError("a field is cut short") from error


def _walk(data: bytes, descriptor: Any) -> Iterator[int]:
    plan, position, end = _plan(descriptor), 0, len(data)
    chosen: dict[Any, int] = {}  # field number by oneof, of the message being walked over
    # The messages around it: plan, end, oneofs, and the name of the field in between.
    outer: list[tuple[_Plan, int, dict[Any, int], str]] = []
    num_fields = 0
    while True:
        while position == end and outer:
            plan, end, chosen, _ = outer.pop()
        if position >= end:
            if position > end:
                raise DecodeError("a field reaches beyond its message")
            return
        num_fields += 1
        if num_fields % _FIELDS_AT_ONCE == 0:
            if num_fields > MAX_FIELDS:
                raise InvalidArgumentError("message", f"more than {MAX_FIELDS} fields")
            yield num_fields
        tag, position = _read_varint(data, position)
        number, wire_type = tag >> 3, tag & 7
        if number in plan.oneofs:
            oneof = plan.oneofs[number]
            if chosen.setdefault(oneof, number) != number:
                raise _conflict(oneof, (chosen[oneof], number), [each[3] for each in outer])
        if wire_type == _LENGTH:
            size, position = _read_varint(data, position)
            if number in plan.messages and position + size <= end:
                field = plan.messages[number]
                outer.append((plan, end, chosen, field.name))
                plan, end, chosen = _plan(field.message_type), position + size, {}
            else:
                position += size
        elif wire_type == _VARINT:
            _, position = _read_varint(data, position)
        elif wire_type == _FIXED32:
            position += 4
        elif wire_type == _FIXED64:
            position += 8
        else:  # groups, which proto3 does not have
            raise DecodeError(f"a field of type {wire_type}")


def _conflict(oneof: Any, numbers: tuple[int, int], outer: list[str]) -> InvalidArgumentError:
    names = [field.name for field in oneof.fields if field.number in numbers]
    path = ".".join((*outer, oneof.name))
    return InvalidArgumentError(path, f"{' and '.join(names)} are set; give one")


def _read_varint(data: bytes, position: int) -> tuple[int, int]:
    """Returns a varint's value and where it ends."""
    value = data[position]
    if value < 0x80:
        return value, position + 1
    value = 0
    for shift in range(0, 7 * _MAX_VARINT_BYTES, 7):
        byte = data[position]
        position += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, position
    raise DecodeError(f"a varint of more than {_MAX_VARINT_BYTES} bytes")
