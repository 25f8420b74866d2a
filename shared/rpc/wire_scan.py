"""Scans the bytes of a message before protobuf parses them.

Protobuf holds the interpreter's lock while it parses, and a few bytes may become an object: four
megabytes of empty messages take 0.1 s. The scan counts the fields, and so the objects, before that.
It also finds two fields of one oneof, which a parsed message no longer shows.

The encoding is described at https://protobuf.dev/programming-guides/encoding.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from typing import Any, NamedTuple

from google.protobuf.message import DecodeError

from shared.errors import InvalidArgumentError

# Fields of a message and the messages within it. A packed array of any length is one field.
# Protobuf parses this many in at most 4 ms. They suffice for a long prompt's unpacked token ids.
MAX_FIELDS = 1 << 16
# Fields between two pauses, which take about a millisecond.
_FIELDS_AT_ONCE = 1024
_VARINT, _LENGTH = 0, 2  # wire types
_FIXED_BYTES = {1: 8, 5: 4}  # by wire type
_MAX_VARINT_BYTES = 10


class _Plan(NamedTuple):
    """The fields of a message type that the scan must know, by number."""

    messages: dict[int, Any]  # the fields that are messages
    oneofs: dict[int, Any]  # the oneof that a field belongs to


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
    """Scans a message of the type `descriptor`, but not its values, which protobuf checks. Yields
    the number of fields so far, at least once per millisecond or so.

    Raises:
        DecodeError: a field does not end where it should, or has an unknown wire type.
        InvalidArgumentError: there are more than `MAX_FIELDS` fields, or two fields of a oneof.
    """
    try:
        for num_fields, _ in enumerate(_fields(data, 0, len(data), descriptor, ()), start=1):
            if num_fields % _FIELDS_AT_ONCE == 0:
                if num_fields > MAX_FIELDS:
                    raise InvalidArgumentError("message", f"more than {MAX_FIELDS} fields")
                yield num_fields
    except IndexError as error:
        raise DecodeError("a field is cut short") from error


def _fields(
    data: bytes, position: int, end: int, descriptor: Any, path: tuple[str, ...]
) -> Iterator[None]:
    """Yields once for each field of a message, `data[position:end]`, and of the messages within it.
    `path` names the fields around it. No message type contains itself, so the path is short."""
    plan = _plan(descriptor)
    chosen: dict[Any, int] = {}  # field number by oneof
    while position < end:
        yield
        tag, position = _read_varint(data, position)
        number, wire_type = tag >> 3, tag & 7
        if number in plan.oneofs:
            oneof = plan.oneofs[number]
            if chosen.setdefault(oneof, number) != number:
                raise _conflict(oneof, (chosen[oneof], number), path)
        if wire_type == _LENGTH:
            size, position = _read_varint(data, position)
            if number in plan.messages and position + size <= end:
                field = plan.messages[number]
                inner = (*path, field.name)
                yield from _fields(data, position, position + size, field.message_type, inner)
            position += size
        elif wire_type == _VARINT:
            _, position = _read_varint(data, position)
        elif wire_type in _FIXED_BYTES:
            position += _FIXED_BYTES[wire_type]
        else:  # groups, which proto3 does not have
            raise DecodeError(f"a field of type {wire_type}")
    if position > end:
        raise DecodeError("a field reaches beyond its message")


def _conflict(oneof: Any, numbers: tuple[int, int], path: tuple[str, ...]) -> InvalidArgumentError:
    names = [field.name for field in oneof.fields if field.number in numbers]
    return InvalidArgumentError(
        ".".join((*path, oneof.name)), f"{' and '.join(names)} are set; give one"
    )


def _read_varint(data: bytes, position: int) -> tuple[int, int]:
    """Returns a varint's value and the position of its end."""
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
