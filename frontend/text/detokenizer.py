"""Decodes token ids to text, a few tokens at a time, for byte-level BPE.

In byte-level BPE every token is a string of bytes, so text is decoded by joining bytes and reading
them as UTF-8: an incremental UTF-8 decoder holds back an unfinished character and nothing else.
"""

from __future__ import annotations

import codecs
from collections.abc import Iterable, Mapping

_UTF8 = codecs.getincrementaldecoder("utf-8")


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


def token_bytes(vocabulary: Mapping[str, int]) -> dict[int, bytes]:
    """The bytes of each token.

    Args:
        vocabulary: token to id, added tokens included.
    """
    alphabet = byte_alphabet()
    table = {}
    for token, token_id in vocabulary.items():
        try:
            table[token_id] = bytes([alphabet[character] for character in token])
        except KeyError:  # an added token with a character outside the alphabet is plain text
            table[token_id] = token.encode()
    return table


class IncrementalDetokenizer:
    """Decodes one completion as its tokens arrive.

    The joined results of `feed` and `flush` equal the text of all tokens decoded at once, with
    U+FFFD for bytes that are not UTF-8.
    """

    def __init__(self, table: Mapping[int, bytes]) -> None:
        self._table = table
        self._decoder = _UTF8(errors="replace")

    def feed(self, token_ids: Iterable[int]) -> str:
        """Returns the characters that `token_ids` complete; unknown ids add nothing."""
        get = self._table.get
        return self._decoder.decode(b"".join([get(token_id, b"") for token_id in token_ids]))

    def flush(self) -> str:
        """Returns U+FFFD if a character was left unfinished, else nothing."""
        return self._decoder.decode(b"", final=True)
