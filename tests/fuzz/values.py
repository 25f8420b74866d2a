"""Draws hostile messages with hypothesis: from the descriptor of any message type, and by changing
fields or bytes of valid messages."""

from __future__ import annotations

import functools
import random
from collections.abc import Sequence
from typing import Any

from google.protobuf.descriptor import Descriptor, FieldDescriptor
from google.protobuf.message import Message
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st

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
_HUGE = 2_000  # entries
_AT_ONCE = 250  # messages; the more hypothesis has drawn, the longer the next one takes


def draw_messages(
    kind: type[Message], examples: Sequence[Message], count: int, first_seed: int
) -> list[bytes]:
    """Draws `count` serialized messages meant to be of `kind`; the same for the same seed."""
    drawn: list[bytes] = []
    while len(drawn) < count:  # hypothesis omits duplicates, and gives up on some

        @seed(first_seed + len(drawn))
        @settings(
            max_examples=min(_AT_ONCE, count - len(drawn)),
            database=None,
            deadline=None,
            phases=[Phase.generate],
            suppress_health_check=list(HealthCheck),
        )
        @given(hostile(kind, examples))
        def collect(message: bytes) -> None:
            drawn.append(message)

        collect()
    return drawn[:count]


def draw_cases(shares: Sequence[tuple[str, Sequence[Message], int]], seed: int) -> list[Case]:
    """Draws cases of one message in random order: per method as many as asked for, meant to be like
    its examples; the same for the same seed."""
    count = sum(number for _, _, number in shares)
    cases = []
    for i, (method, examples, number) in enumerate(shares):
        drawn = draw_messages(type(examples[0]), examples, number, seed + i * count)
        cases += [Case(method, (message,)) for message in drawn]
    random.Random(seed).shuffle(cases)
    return cases


def hostile(kind: type[Message], examples: Sequence[Message]) -> st.SearchStrategy[bytes]:
    """Hostile messages of all sorts: drawn, twisted, mutated, spliced, and random bytes."""
    recorded = [example.SerializeToString() for example in examples]
    return st.one_of(
        generated(kind.DESCRIPTOR).map(lambda fields: _build(kind, fields)),
        *[twisted(recorded, kind)] * (2 if kind.DESCRIPTOR.fields else 0),  # these reach deepest
        st.builds(mutations.mutate, st.sampled_from(recorded), st.integers(0, 1 << 32)),
        st.builds(
            mutations.splice,
            st.sampled_from(recorded),
            st.sampled_from(recorded),
            st.integers(0, 1 << 32),
        ),
        st.binary(max_size=64),
    )


def generated(descriptor: Descriptor) -> st.SearchStrategy[dict[str, Any]]:
    """Values for some fields, by name, with at most one of each oneof."""
    return st.fixed_dictionaries(
        {}, optional={field.name: _field_values(field) for field in descriptor.fields}
    ).map(lambda values: _one_of_each(descriptor, values))


@st.composite
def twisted(draw: st.DrawFn, examples: Sequence[bytes], kind: type[Message]) -> bytes:
    """A valid message with other values in one to three fields, at any depth."""
    message: Any = kind.FromString(draw(st.sampled_from(examples)))
    for _ in range(draw(st.sampled_from([1, 1, 2, 3]))):
        target = message
        field = draw(_fields(target.DESCRIPTOR))
        while _is_message(field) and not field.is_repeated and draw(st.integers(0, 3)):
            target = getattr(target, field.name)
            target.SetInParent()
            if not target.DESCRIPTOR.fields:
                break
            field = draw(_fields(target.DESCRIPTOR))
        if field.containing_type is not target.DESCRIPTOR:
            continue  # a message without fields
        if field.type == _F.TYPE_BYTES and draw(st.booleans()):
            old = getattr(target, field.name)
            value: Any = mutations.change_entry(old, draw(st.integers(0, 1 << 32)))
        else:
            value = draw(_field_values(field))
        _assign(target, field, value)
    return message.SerializeToString()


@functools.cache
def _fields(descriptor: Descriptor) -> st.SearchStrategy[FieldDescriptor]:
    return st.sampled_from(list(descriptor.fields))


@functools.cache
def _field_values(field: FieldDescriptor) -> st.SearchStrategy[Any]:
    if _is_map(field):
        entry = field.message_type.fields_by_name
        return st.dictionaries(_scalars(entry["key"]), _single(entry["value"]), max_size=4)
    one = _single(field)
    if not field.is_repeated:
        return one
    huge = _HUGE if not _is_message(field) else _HUGE // 20
    times = st.sampled_from([1] * 19 + [huge])
    return st.builds(lambda values, n: values * n, st.lists(one, max_size=4), times)


def _single(field: FieldDescriptor) -> st.SearchStrategy[Any]:
    return generated(field.message_type) if _is_message(field) else _scalars(field)


def _scalars(field: FieldDescriptor) -> st.SearchStrategy[Any]:
    if field.type in _BITS:
        low, high = _BITS[field.type]
        edges = {low, low + 1, -1, 0, 1, 2, 3, 16, 17, 64, 65, 1 << 16, high - 1, high}
        inside = sorted(value for value in edges if low <= value <= high)
        return st.one_of(st.sampled_from(inside), st.integers(low, high), st.integers(0, 40))
    match field.type:
        case _F.TYPE_FLOAT | _F.TYPE_DOUBLE:
            edges = [0.0, -0.0, 0.5, 1.0, 2.0, -1.0, 1e-45, 3.4e38, -3.4e38]
            edges += [float("nan"), float("inf"), float("-inf")]
            return st.one_of(st.sampled_from(edges), st.integers(0, 1 << 32).map(mutations.number))
        case _F.TYPE_BOOL:
            return st.booleans()
        case _F.TYPE_ENUM:
            known = [value.number for value in field.enum_type.values]
            return st.sampled_from([*known, *known, -1, 99, (1 << 31) - 1])
        case _F.TYPE_STRING:
            texts = ["", CANARY, "\0", "\U0001f937\u0300", "{", "((((", "[" * 9]
            long = st.sampled_from(texts).map(lambda text: text * 1000)
            return st.one_of(st.sampled_from(texts), st.text(max_size=8), long)
        case _F.TYPE_BYTES:
            return st.integers(0, 1 << 32).map(mutations.column)
    raise AssertionError(f"no values for {field.full_name}")


def _build(kind: type[Message], values: dict[str, Any]) -> bytes:
    message = kind()
    _fill(message, values)
    return message.SerializeToString()


def _fill(message: Any, values: dict[str, Any]) -> None:
    message.SetInParent()
    for name, value in values.items():
        _assign(message, message.DESCRIPTOR.fields_by_name[name], value)


def _assign(message: Any, field: FieldDescriptor, value: Any) -> None:
    message.ClearField(field.name)
    if _is_map(field) and _is_message(field.message_type.fields_by_name["value"]):
        for key, each in value.items():
            _fill(getattr(message, field.name)[key], each)
    elif _is_map(field):
        getattr(message, field.name).update(value)
    elif field.is_repeated and _is_message(field):
        for each in value:
            _fill(getattr(message, field.name).add(), each)
    elif field.is_repeated:
        getattr(message, field.name).extend(value)
    elif _is_message(field):
        _fill(getattr(message, field.name), value)
    else:
        setattr(message, field.name, value)


def _one_of_each(descriptor: Descriptor, values: dict[str, Any]) -> dict[str, Any]:
    """Keeps the first field that is set of each oneof; splices cover the fault of setting more."""
    taken: set[str] = set()
    kept = {}
    for name, value in values.items():
        oneof = descriptor.fields_by_name[name].containing_oneof
        if oneof is None or oneof.name not in taken:
            kept[name] = value
        if oneof is not None:
            taken.add(oneof.name)
    return kept


def _is_message(field: FieldDescriptor) -> bool:
    return field.message_type is not None


def _is_map(field: FieldDescriptor) -> bool:
    return _is_message(field) and bool(field.message_type.GetOptions().map_entry)
