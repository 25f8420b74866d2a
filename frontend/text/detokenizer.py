"""Decodes token ids to text, a few tokens at a time.

Every token is a string of bytes, so text is decoded by joining bytes and reading them as UTF-8: an
incremental UTF-8 decoder holds back an unfinished character and nothing else.
"""

from __future__ import annotations

import codecs
from collections.abc import Iterable

from shared.vocabulary import Vocabulary

_UTF8 = codecs.getincrementaldecoder("utf-8")


class IncrementalDetokenizer:
    """Decodes one completion as its tokens arrive.

    The joined results of `feed` and `flush` equal the text of all tokens decoded at once, with
    U+FFFD for bytes that are not UTF-8.
    """

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._tokens = vocabulary.tokens
        self._strip = vocabulary.strips_space
        self._decoder = _UTF8(errors="replace")

    def feed(self, token_ids: Iterable[int]) -> str:
        """Returns the characters that `token_ids` complete; unknown ids add nothing."""
        get = self._tokens.get
        text = self._decoder.decode(b"".join([get(token_id, b"") for token_id in token_ids]))
        if self._strip and text:
            self._strip = False
            return text.removeprefix(" ")
        return text

    def flush(self) -> str:
        """Returns U+FFFD if a character was left unfinished, else nothing."""
        return self._decoder.decode(b"", final=True)
