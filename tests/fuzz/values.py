"""Draws hostile messages: from the descriptor of any message type, and by changing fields or bytes
of valid messages."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from random import Random
from typing import Any

from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message

from tests.fuzz import mutations
from tests.fuzz.corpus import Case

# Occurs in the texts of requests, so that a reply that quotes them can be detected.
CANARY = "canary-of-a-prompt"

_F = FieldDescriptor
_BITS = {
    _F.TYPE_INT32: (-(1 << 31), (1 << 31) - 1),
    _F.TYPE_UINT32: (0, (1 << 32) - 1),
    _F.TYPE_INT64: (-(1 << 63), (1 << 63) - 1),
    _F.TYPE_UINT64: (0, (1 << 64) - 1),
}
_FLOATS = [0.0, -0.0, 0.5, 1.0, 2.0, -1.0, 1e-45, 3.4e38, -3.4e38]
_FLOATS += [float("nan"), float("inf"), float("-inf")]
_TEXTS = ["", CANARY, "\0", "\U0001f937\u0300", "{", "((((", "[" * 9]
_HUGE = 2_000  # entries
_SMALL = 1 << 10  # bytes


def draw_messages(
    kind: type[Message], examples: Sequence[Message], count: int, seed: int
) -> Iterator[bytes]:
    """Draws `count` serialized messages meant to be of `kind`; the same for the same seed."""
    rng = Random(seed)
    recorded = [example.SerializeToString() for example in examples]
    return (_draw(kind, recorded, rng) for _ in range(count))


def draw_cases(shares: Sequence[tuple[str, Sequence[Message], int]], seed: int) -> Iterator[Case]:
    """Draws cases of one message in random order: per method as many as asked for, meant to be like
    its examples; the same for the same seed."""
    order = []
    for i, (method, examples, number) in enumerate(shares):
        drawn = draw_messages(type(examples[0]), examples, number, seed + i)
        order += [(method, drawn)] * number
    Random(seed).shuffle(order)
    return (Case(method, (next(drawn),)) for method, drawn in order)


def _draw(kind: type[Message], recorded: Sequence[bytes], rng: Random) -> bytes:
    """A message that is all drawn, changed in some fields or bytes, spliced, or random bytes."""
    message = kind()
    match rng.randrange(6):
        case 0:
            _fill(message, rng)
        case 1:
            return mutations.mutate(rng.choice(recorded), rng)
        case 2:
            return mutations.splice(rng.choice(recorded), rng.choice(recorded), rng)
        case 3:
            return rng.randbytes(rng.randint(0, 64))
        case _:  # these reach deepest
            message.ParseFromString(rng.choice(recorded))
            for _ in range(rng.choice((1, 1, 2, 3))):
                _twist(message, rng)
    return message.SerializeToString()


def _fill(message: Any, rng: Random) -> None:
    """Sets about half of a message's fields."""
    message.SetInParent()
    for field in message.DESCRIPTOR.fields:
        if rng.random() < 0.5:
            _set(message, field, rng)


def _twist(message: Any, rng: Random) -> None:
    """Changes a field at any depth."""
    if not message.DESCRIPTOR.fields:
        return
    field = rng.choice(message.DESCRIPTOR.fields)
    if field.message_type and not field.is_repeated and rng.random() < 0.75:
        part = getattr(message, field.name)
        part.SetInParent()
        _twist(part, rng)
    elif field.type == _F.TYPE_BYTES and rng.random() < 0.5:
        value = getattr(message, field.name)
        if not field.is_repeated:
            setattr(message, field.name, mutations.change_entry(value, rng))
        elif value:
            index = rng.randrange(len(value))
            value[index] = mutations.change_entry(value[index], rng)
    else:
        _set(message, field, rng)


def _set(message: Any, field: FieldDescriptor, rng: Random) -> None:
    """Gives a field another value, or other values, which now and then are very many."""
    message.ClearField(field.name)
    values = getattr(message, field.name)
    if field.message_type and field.message_type.GetOptions().map_entry:
        key, value = field.message_type.fields_by_name.values()
        for _ in range(rng.randint(0, 4)):
            if value.message_type:
                _fill(values[_scalar(key, rng)], rng)
            else:
                values[_scalar(key, rng)] = _scalar(value, rng)
    elif field.is_repeated:
        times = _HUGE if rng.random() < 0.05 else 1
        for _ in range(rng.randint(0, 4)):
            if field.message_type:
                part = values.add()
                _fill(part, rng)
                if part.ByteSize() < _SMALL:  # else lists in lists fill the memory
                    values.extend([part] * (times // 20))
            else:
                values.extend([_scalar(field, rng)] * times)
    elif field.message_type:
        _fill(values, rng)
    else:
        setattr(message, field.name, _scalar(field, rng))


def _scalar(field: FieldDescriptor, rng: Random) -> Any:
    if field.type in _BITS:
        low, high = _BITS[field.type]
        edges = {low, low + 1, -1, 0, 1, 2, 3, 16, 17, 64, 65, 1 << 16, high - 1, high}
        inside = sorted(value for value in edges if low <= value <= high)
        return rng.choice((rng.choice(inside), rng.randint(low, high), rng.randint(0, 40)))
    match field.type:
        case _F.TYPE_FLOAT | _F.TYPE_DOUBLE:
            return rng.choice((rng.choice(_FLOATS), mutations.number(rng)))
        case _F.TYPE_BOOL:
            return rng.random() < 0.5
        case _F.TYPE_ENUM:
            known = [value.number for value in field.enum_type.values]
            return rng.choice([*known, *known, -1, 99, (1 << 31) - 1])
        case _F.TYPE_STRING:
            text = rng.choice(_TEXTS)
            letters = "".join(chr(rng.randrange(0xD800)) for _ in range(rng.randint(0, 8)))
            return rng.choice((text, letters, text * 1000))
        case _F.TYPE_BYTES:
            return mutations.column(rng)
    raise AssertionError(f"no values for {field.full_name}")
