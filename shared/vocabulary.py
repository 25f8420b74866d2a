"""The bytes that each token of a tokenizer spells.

A text is the bytes of its tokens, read as UTF-8. This holds for decoders that are byte-level (of
GPT-2, Qwen and Llama 3) and for those in SentencePiece's manner (of Llama 2). In these `▁` stands
for a space, and each byte has a token for texts that no other tokens spell.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass

from tokenizers import Tokenizer

_SENTENCE_PIECE = [
    {"type": "Replace", "pattern": {"String": "▁"}, "content": " "},
    {"type": "ByteFallback"},
    {"type": "Fuse"},
]
_STRIP = {"type": "Strip", "content": " ", "start": 1, "stop": 0}
_BYTE = re.compile("<0x([0-9A-Fa-f]{2})>")


@dataclass(frozen=True)
class Vocabulary:
    """The bytes of each token by its id, added tokens included.

    `strips_space`: a space at the beginning of a text is not part of it.
    """

    tokens: Mapping[int, bytes]
    strips_space: bool = False


def read_vocabulary(tokenizer: Tokenizer) -> Vocabulary:
    """Reads the bytes of a tokenizer's tokens.

    Raises:
        ValueError: its decoder is of another kind.
    """
    decoder = json.loads(tokenizer.decoder.__getstate__()) if tokenizer.decoder else {}
    vocabulary = tokenizer.get_vocab(with_added_tokens=True)
    if decoder.get("type") == "ByteLevel":
        return Vocabulary({number: _byte_level(token) for token, number in vocabulary.items()})
    parts = decoder.get("decoders") or ()
    if list(parts[:3]) == _SENTENCE_PIECE and list(parts[3:]) in ([], [_STRIP]):
        tokens = {number: _sentence_piece(token) for token, number in vocabulary.items()}
        return Vocabulary(tokens, strips_space=bool(parts[3:]))
    names = [decoder.get("type", "none"), *(part.get("type") for part in parts)]
    raise ValueError(
        f"decoder {' '.join(names)} is not served; ByteLevel is, and Sequence of Replace, "
        "ByteFallback, Fuse, and Strip or nothing"
    )


def byte_alphabet() -> dict[str, int]:
    """Maps the printable characters of a byte-level vocabulary to the bytes they stand for.

    From GPT-2's encoder.py (`bytes_to_unicode`): printable Latin-1 characters stand for themselves,
    the other bytes are mapped to the characters from U+0100 on.
    """
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = (byte for byte in range(256) if byte not in set(printable))
    alphabet = {chr(byte): byte for byte in printable}
    alphabet.update((chr(0x100 + index), byte) for index, byte in enumerate(others))
    return alphabet


_ALPHABET = byte_alphabet()


def _byte_level(token: str) -> bytes:
    try:
        return bytes([_ALPHABET[character] for character in token])
    except KeyError:  # an added token with a character outside the alphabet is plain text
        return token.encode()


def _sentence_piece(token: str) -> bytes:
    if byte := _BYTE.fullmatch(token):
        return bytes.fromhex(byte[1])
    return token.replace("▁", " ").encode()
