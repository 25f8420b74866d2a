"""Makes valid messages hostile, byte by byte, in ways that no protobuf library would send."""

from __future__ import annotations

import random
import struct
from collections.abc import Callable

_EDGES = (0, 1, -1, 2, -2, 255, 1 << 16, (1 << 31) - 1, -(1 << 31))
_MANY_BYTES = 100_000  # less than what services of a campaign accept
_NAN, _INF = 0x7FC00000, 0x7F800000  # the bits of these as float32


def mutate(message: bytes, rng: random.Random) -> bytes:
    """Applies one to four changes of any kind."""
    for _ in range(rng.randint(1, 4)):
        message = rng.choice(_MUTATIONS)(message, rng)
    return message


def splice(first: bytes, second: bytes, rng: random.Random) -> bytes:
    """Joins the beginning of one message to the end of another, or both as a whole."""
    if rng.random() < 0.3:
        return first + second
    return first[: rng.randint(0, len(first))] + second[rng.randint(0, len(second)) :]


def column(rng: random.Random) -> bytes:
    """Draws a column: an array of some kind, or bytes that need not be whole entries."""
    match rng.randrange(6):
        case 0:
            return rng.randbytes(rng.randint(0, 33))
        case 1:
            return struct.pack("<i", rng.randint(-1, 9)) * rng.choice((100, 3_000, 20_000))
        case 2:
            values = [rng.choice(_EDGES) for _ in range(rng.randint(1, 4))]
        case 3:
            return struct.pack("<ff", number(rng), rng.uniform(0, 2))
        case _:
            values = [rng.randint(-1, rng.choice((8, 1200))) for _ in range(rng.randint(0, 12))]
    return struct.pack(f"<{len(values)}i", *values)


def number(rng: random.Random) -> float:
    """Draws any float32, mostly one of a usual size."""
    if rng.random() < 0.7:
        return rng.uniform(-1, 2)
    value: float = struct.unpack("<f", rng.randbytes(4))[0]
    return value


def change_entry(column: bytes, rng: random.Random) -> bytes:
    """Changes, drops or repeats one entry of an array of 4-byte entries."""
    entries = [column[i : i + 4] for i in range(0, len(column), 4)]
    if not entries:
        return struct.pack("<i", rng.choice(_EDGES))
    place = rng.randrange(len(entries))
    kind = rng.randrange(5)
    if kind == 0:
        del entries[place]
    elif kind == 1:
        entries.insert(place, entries[place])
    elif kind == 2:
        entries[place] = struct.pack("<I", rng.choice((_NAN, _INF, 1, 0x7F7FFFFF, 0x80000000)))
    elif kind == 3:
        entries[place] = struct.pack("<i", rng.choice(_EDGES))
    else:
        entries[place] = struct.pack("<i", rng.randint(-3, 1100))
    return b"".join(entries)


def _flip(message: bytes, rng: random.Random) -> bytes:
    flipped = bytearray(message)
    for _ in range(rng.randint(1, 8) if flipped else 0):
        flipped[rng.randrange(len(flipped))] ^= 1 << rng.randrange(8)
    return bytes(flipped)


def _truncate(message: bytes, rng: random.Random) -> bytes:
    return message[: rng.randint(0, len(message))]


def _repeat(message: bytes, rng: random.Random) -> bytes:
    begin = rng.randint(0, len(message))
    end = rng.randint(begin, len(message))
    return message[:end] + message[begin:end] * rng.choice((1, 2, 100)) + message[end:]


def _insert(message: bytes, rng: random.Random) -> bytes:
    place = rng.randint(0, len(message))
    return message[:place] + rng.randbytes(rng.randint(1, 16)) + message[place:]


def _unknown_field(message: bytes, rng: random.Random) -> bytes:
    """Appends a field of any number and wire type, including 6 and 7, which do not exist."""
    number = rng.choice((0, 1, 2, 3, 5, 19, 1000, (1 << 29) - 1))
    key = _varint(number << 3 | rng.randrange(8))
    value = rng.choice(
        (b"", b"\x00", _varint(rng.getrandbits(64)), rng.randbytes(8), b"\x02\xff\xfe")
    )
    return message + key + value


def _many_fields(message: bytes, rng: random.Random) -> bytes:
    """Appends the same small field as often as fits: one that is known and repeated, or unknown."""
    key = _varint(rng.randint(1, 22) << 3 | rng.choice((0, 2)))
    entry = key + rng.choice((b"\x00", b"\x01a", b"\x02\x0a\x00") if key[0] & 7 else (b"\x01",))
    return message + entry * (rng.choice((1_000, 10_000, _MANY_BYTES)) // len(entry))


def _groups(message: bytes, rng: random.Random) -> bytes:
    """Appends groups, which only old versions of protobuf still write: one or many, or nested."""
    number, depth = rng.choice((1, 3, 4, 15, 1000)), rng.choice((1, 20, 50, 99, 101, 10_000))
    group = _varint(number << 3 | 3) * depth + _varint(number << 3 | 4) * depth
    return message + group * max(1, rng.choice((1, 1_000, 10_000)) // len(group))


def _invalid_utf8(message: bytes, rng: random.Random) -> bytes:
    number = rng.randint(1, 9)
    return message + _varint(number << 3 | 2) + b"\x03\xff\xfe\xc0"


def _overlong_length(message: bytes, rng: random.Random) -> bytes:
    """Appends a field that claims to be longer than the message, or than anything could be."""
    length = rng.choice((1 << 10, (1 << 31) - 1, 1 << 32, (1 << 64) - 1))
    return message + _varint(rng.randint(1, 20) << 3 | 2) + _varint(length) + b"x"


def _endless_varint(message: bytes, rng: random.Random) -> bytes:
    return message + _varint(rng.randint(1, 20) << 3) + b"\xff" * rng.randint(10, 30)


def _varint(value: int) -> bytes:
    encoded = bytearray()
    while value > 0x7F:
        encoded.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes([*encoded, value])


_MUTATIONS: tuple[Callable[[bytes, random.Random], bytes], ...] = (
    _flip,
    _truncate,
    _repeat,
    _insert,
    _unknown_field,
    _many_fields,
    _groups,
    _invalid_utf8,
    _overlong_length,
    _endless_varint,
)
