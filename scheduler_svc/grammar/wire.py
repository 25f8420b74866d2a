"""Messages between the scheduler and a grammar's process, over a stream of bytes.

    scheduler: a grammar's kind and text          process: its size, or why it cannot be used
    scheduler: a batch of matchers and tokens     process: an answer per matcher, in their order
               ...                                         ...

Each message is a little-endian frame: the length of its contents as uint32, its type as a byte, and
its contents. This module also has the limits of such a process. docs/architecture.md, structured
output, says how they were found.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from enum import IntEnum
from itertools import chain

import numpy as np

from scheduler_svc.core.sampling import GrammarKind

# Limits of processor time, by the kernel's clock. The process is killed when it reaches one.
COMPILE_CPU_S = 20.0
MASK_CPU_S = 2.0  # for one mask, ...
TOKEN_CPU_S = 0.001  # ... and for each token that its matcher is told
# Limit of address space, in addition to the host's. Allocations fail beyond it.
MEMORY_BYTES = 512 << 20

OUT_OF_MEMORY = 3  # the exit status of a process that could not get more memory
HEADER = struct.Struct("<IB")
_SIZE = struct.Struct("<Q")
_INDEX = struct.Struct("<I")


class Request(IntEnum):
    """The types of the scheduler's frames."""

    COMPILE = 1
    BATCH = 2
    CAREFUL_BATCH = 3  # each answer must be sent before the next is begun: the process may die


class Answer(IntEnum):
    """The types of a process's frames."""

    COMPILED = 1  # with its private memory, bytes
    MASK = 2  # uint32[ceil(vocab / 32)], lowest bit first
    SAME_MASK = 3  # the mask of an earlier row of the batch, by its index
    COMPLETE = 4  # nothing more can follow
    ERROR = 5  # with a reason, UTF-8


@dataclass(slots=True)
class Row:
    """New tokens of a matcher, which the process answers with the mask of the next token.
    `end_token_ids` is None unless the process must open the matcher."""

    matcher: int
    end_token_ids: Seq[int] | None
    tokens: Seq[int]


def frame(kind: int, contents: bytes = b"") -> bytes:
    return HEADER.pack(len(contents), kind) + contents


def compile_request(kind: GrammarKind, text: str) -> bytes:
    return frame(Request.COMPILE, bytes([kind]) + text.encode())


def read_compile_request(contents: bytes) -> tuple[GrammarKind, str]:
    return GrammarKind(contents[0]), contents[1:].decode()


def compiled_answer(num_bytes: int) -> bytes:
    return frame(Answer.COMPILED, _SIZE.pack(num_bytes))


def read_size(contents: bytes) -> int:
    (size,) = _SIZE.unpack(contents)
    return int(size)


def same_mask(row: int) -> bytes:
    return frame(Answer.SAME_MASK, _INDEX.pack(row))


def read_index(contents: bytes) -> int:
    (index,) = _INDEX.unpack(contents)
    return int(index)


def batch_request(rows: Seq[Row], closed: Seq[int], *, careful: bool) -> bytes:
    """Encodes a batch as int32 columns. The first holds the numbers of closed matchers and of rows,
    the second the closed matchers. Three columns follow that hold, per row, its matcher, its number
    of end tokens (-1: the matcher is open already) and its number of tokens. The last two columns
    hold the end tokens of all rows and the tokens of all rows."""
    opened = [row.end_token_ids for row in rows if row.end_token_ids is not None]
    numbers = chain(
        (len(closed), len(rows)),
        closed,
        (row.matcher for row in rows),
        (-1 if row.end_token_ids is None else len(row.end_token_ids) for row in rows),
        (len(row.tokens) for row in rows),
        *opened,
        *(row.tokens for row in rows),
    )
    kind = Request.CAREFUL_BATCH if careful else Request.BATCH
    return frame(kind, np.fromiter(numbers, np.int32).tobytes())


def read_batch_request(contents: bytes) -> tuple[list[int], list[Row]]:
    """The closed matchers, and the rows."""
    numbers = iter(np.frombuffer(contents, np.int32).tolist())
    num_closed, num_rows = next(numbers), next(numbers)
    closed = _take(numbers, num_closed)
    matchers = _take(numbers, num_rows)
    num_ends = _take(numbers, num_rows)
    num_tokens = _take(numbers, num_rows)
    ends = [None if count < 0 else _take(numbers, count) for count in num_ends]
    tokens = [_take(numbers, count) for count in num_tokens]
    return closed, [Row(*row) for row in zip(matchers, ends, tokens, strict=True)]


def _take(numbers: Iterator[int], count: int) -> list[int]:
    return [next(numbers) for _ in range(count)]
