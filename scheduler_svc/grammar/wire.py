"""Messages to and from a grammar's process, over a socket that only this process and the host have.

    host:      the process's id, or why there is none
    scheduler: a grammar's kind and text          process: an answer
    scheduler: a batch of matchers and tokens     process: an answer per matcher, in their order
               ...                                         ...
    host:      how the process died

The host's first message and all requests are lines of text; requests are JSON. An answer is a
little-endian uint32, the length of its contents, then the contents, then its type as a byte. The
host's last message is a `Death`, a byte that is no answer's type, so it cannot complete an answer
that the process began.

This module also has the limits of such a process (docs/internals/structured-output.md).
"""

from __future__ import annotations

import json
import struct
from array import array
from collections.abc import Sequence as Seq
from enum import IntEnum
from typing import NamedTuple

from shared.sampling_params import GrammarKind

# Limits of processor time, by the kernel's clock. The process is killed when it reaches one.
COMPILE_CPU_S = 20.0
MASK_CPU_S = 2.0  # for one mask, ...
TOKEN_CPU_S = 0.001  # ... and for each token that its matcher is told
# Limit of address space, in addition to the host's. Allocations fail beyond it.
MEMORY_BYTES = 512 << 20

MAX_DRAFTS = 8  # tokens that are drafted after a completion; a mask of 20 KB comes with each

OUT_OF_MEMORY = 3  # the exit status of a process that could not get more memory
LENGTH = struct.Struct("<I")
INDEX = struct.Struct("<I")


class AnswerType(IntEnum):
    """The types of a process's answers."""

    DONE = 1  # the grammar is compiled; or nothing can follow the completion
    MASK = 2  # uint32[ceil(vocab / 32)], lowest bit first
    SAME_MASK = 3  # the mask of an earlier row of the batch, by its index
    ERROR = 4  # with a reason, UTF-8
    DRAFT = 5  # drafted tokens, the mask of the first, and the mask that follows each of them


class MaskRow(NamedTuple):
    """New tokens of a matcher, which the process answers with the mask of the next token.
    `end_token_ids` is None unless the process must open the matcher. Unless `guess` is None, the
    answer may have a draft: tokens of the guess, or others that the grammar forces."""

    matcher: int
    end_token_ids: Seq[int] | None
    tokens: Seq[int]
    guess: Seq[int] | None = None


class MaskedDraft(NamedTuple):
    """Drafted tokens, and the masks of each of them and of the token after them."""

    tokens: Seq[int]
    masks: Seq[bytes]


def answer(kind: AnswerType, contents: bytes = b"") -> bytes:
    return LENGTH.pack(len(contents)) + contents + bytes([kind])


def draft_answer(draft: MaskedDraft) -> bytes:
    tokens = array("i", [len(draft.tokens), *draft.tokens]).tobytes()
    return answer(AnswerType.DRAFT, tokens + b"".join(draft.masks))


def read_draft(contents: bytes) -> MaskedDraft:
    """Reads a draft.

    Raises:
        struct.error, ValueError: it is malformed.
    """
    (count,) = INDEX.unpack_from(contents)
    end = (1 + count) * INDEX.size
    tokens, masks = array("i", contents[INDEX.size : end]), contents[end:]
    size, rest = divmod(len(masks), 1 + count)
    if rest or not size or len(tokens) != count:
        raise ValueError("a draft of another size")
    return MaskedDraft(tokens, [masks[i : i + size] for i in range(0, len(masks), size)])


def compile_request(kind: GrammarKind, text: str) -> bytes:
    return _line((kind, text))


def read_compile_request(line: bytes) -> tuple[GrammarKind, str]:
    kind, text = json.loads(line)
    return GrammarKind(kind), text


def batch_request(rows: Seq[MaskRow], closed: Seq[int], *, careful: bool) -> bytes:
    """Encodes a batch. `closed` are matchers to drop first. `careful`: each answer must be sent
    before the next is begun, because the process may die."""
    return _line((rows, closed, careful))


def read_batch_request(line: bytes) -> tuple[list[MaskRow], list[int], bool]:
    """The rows, the closed matchers, and whether to be careful."""
    rows, closed, careful = json.loads(line)
    return [MaskRow(*row) for row in rows], closed, careful


def _line(request: object) -> bytes:
    return json.dumps(request).encode() + b"\n"
