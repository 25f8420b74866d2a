"""Reads the vocabulary over which grammars are compiled."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

from tokenizers import Tokenizer

from scheduler_svc.grammar.errors import VocabularyError
from shared import vocabulary
from shared.model_directory import language_model
from shared.vocabulary import Vocabulary


def read_vocabulary(model: Path) -> Vocabulary:
    """The bytes of each id below the vocabulary size of `model`, the directory of config.json and
    tokenizer.json. Special tokens and ids that the tokenizer does not know spell nothing.

    Raises:
        VocabularyError: a file is missing or unreadable, or the tokenizer is of another kind.
    """
    config, path = model / "config.json", model / "tokenizer.json"
    try:
        fields = language_model(json.loads(config.read_text(encoding="utf-8")))
        vocab_size = range(fields["vocab_size"])
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise VocabularyError(f"{config}: {error!r}") from error
    try:
        tokenizer = Tokenizer.from_file(str(path))
        known = vocabulary.read_vocabulary(tokenizer)
    except Exception as error:  # tokenizers raises nothing more specific
        raise VocabularyError(f"{path}: {error}") from error
    added = tokenizer.get_added_tokens_decoder()
    special = {token_id for token_id, token in added.items() if token.special}
    spelled = known.tokens.keys() - special
    return replace(known, tokens={i: known.tokens[i] if i in spelled else b"" for i in vocab_size})
