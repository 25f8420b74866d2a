"""Reads the bytes that each token of a byte-level BPE vocabulary spells."""

from __future__ import annotations

import json
from pathlib import Path

from tokenizers import Tokenizer

from scheduler_svc.grammar.errors import VocabularyError


def read_vocabulary(model: Path) -> list[bytes]:
    """The bytes of each id below the vocabulary size of `model`, the directory of config.json and
    tokenizer.json. Special tokens and ids that the tokenizer does not know spell nothing.

    Raises:
        VocabularyError: a file is missing or unreadable.
    """
    config, path = model / "config.json", model / "tokenizer.json"
    try:
        vocab_size = json.loads(config.read_text(encoding="utf-8"))["vocab_size"]
        vocabulary = [b""] * vocab_size
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise VocabularyError(f"{config}: {error!r}") from error
    try:
        tokenizer = Tokenizer.from_file(str(path))
    except Exception as error:  # tokenizers raises nothing more specific
        raise VocabularyError(f"{path}: {error}") from error
    added = tokenizer.get_added_tokens_decoder()
    for token, token_id in tokenizer.get_vocab(with_added_tokens=True).items():
        if token_id < vocab_size and not (token_id in added and added[token_id].special):
            vocabulary[token_id] = _spelled(token)
    return vocabulary


def _spelled(token: str) -> bytes:
    """The bytes that a token's characters stand for, or its plain text if it is an added token with
    other characters."""
    try:
        return bytes([_BYTES[character] for character in token])
    except KeyError:
        return token.encode()


def _byte_alphabet() -> dict[str, int]:
    """The printable character that stands for each byte: GPT-2's `bytes_to_unicode`."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = sorted(set(range(256)) - set(printable))
    return {chr(byte): byte for byte in printable} | {
        chr(0x100 + index): byte for index, byte in enumerate(others)
    }


_BYTES = _byte_alphabet()
