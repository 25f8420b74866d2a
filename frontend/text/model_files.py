"""Reads everything but the tokenizer that the frontend needs from a model directory."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from shared.model_directory import (
    MAX_TOKENIZER_BYTES,
    ModelFileError,
    check_file,
    is_plain_name,
    language_model,
    read_text,
)
from shared.sampling_params import DEFAULTS, NUMBERS, Pooling, SamplingNumbers


class ModelFilesError(Exception):
    """The model directory cannot be used; the message names the file and the reason."""


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """A model's name, vocabulary size, end-of-sequence tokens and sampling defaults, and when its
    files were made, in seconds since 1970."""

    name: str
    vocab_size: int
    eos_token_ids: tuple[int, ...]
    defaults: SamplingNumbers = DEFAULTS  # for parameters that a request leaves unset
    created: int = 0
    pooling: Pooling = Pooling.LAST  # how its embeddings are made; NONE: in no way that is served
    hidden_size: int = 0  # of its embeddings
    # The tokens for "yes" and "no" whose logits tell a score, if its files name them.
    answer_ids: tuple[int, int] | None = None

    def ending_with(self, token_ids: Iterable[int]) -> ModelFacts:
        """These facts with further end-of-sequence tokens. Ids outside of the vocabulary are left
        out: no model samples them, and transformers ignores them too."""
        ends = (each for each in (*self.eos_token_ids, *token_ids) if 0 <= each < self.vocab_size)
        return replace(self, eos_token_ids=tuple(dict.fromkeys(ends)))


def read_model_facts(directory: Path, name: str = "") -> ModelFacts:
    """Reads config.json and, if there is one, generation_config.json. The end-of-sequence tokens
    are those of both files.

    Args:
        name: the name of the model for clients; if empty, its directory's name.

    Raises:
        ModelFilesError: a file is missing or unreadable, or a value in it is impossible.
    """
    if not directory.is_dir():
        raise ModelFilesError(f"model: {directory} is not a directory")
    config_path = directory / "config.json"
    config = language_model(_read_json(config_path))
    generation_path = directory / "generation_config.json"
    generation = _read_json(generation_path) if generation_path.exists() else {}
    vocab_size = config.get("vocab_size")
    if not isinstance(vocab_size, int) or vocab_size <= 0:
        raise ModelFilesError(f"{config_path}: vocab_size is {vocab_size!r}")
    facts = ModelFacts(
        name=name or directory.resolve().name,
        vocab_size=vocab_size,
        eos_token_ids=(),
        defaults=_sampling_defaults(generation, generation_path, vocab_size),
        created=int(config_path.stat().st_mtime),
        pooling=_pooling(directory / "1_Pooling" / "config.json"),
        hidden_size=size if isinstance(size := config.get("hidden_size"), int) else 0,
        answer_ids=_answer_ids(directory / "1_LogitScore" / "config.json", vocab_size),
    )
    return facts.ending_with(
        [*_end_tokens(generation, generation_path), *_end_tokens(config, config_path)]
    )


def check_tokenizer_files(directory: Path) -> None:
    """Checks the sizes of the tokenizer's files, and that tokenizer_config.json names only files
    beside it. transformers would read them without these checks.

    Raises:
        ModelFilesError: a check fails. The message names the file, and the entry in it.
    """
    path = directory / "tokenizer_config.json"
    others = _read_json(path).get("fast_tokenizer_files") if path.exists() else None
    for name in others or ():
        if not is_plain_name(name):
            raise ModelFilesError(
                f"{path}: fast_tokenizer_files: {name!r} is not the name of a file beside it"
            )
    try:
        for pattern in ("*.json", "*.jinja", "*.txt", "additional_chat_templates/*.jinja"):
            for path in directory.glob(pattern):
                check_file(path, MAX_TOKENIZER_BYTES)
    except (ModelFileError, OSError) as error:
        raise ModelFilesError(f"{directory}: {error}") from error


def processors_template(directory: Path) -> str | None:
    """The chat template of a model that also takes images, whose files may have it here alone.

    Raises:
        ModelFilesError: the file cannot be read.
    """
    path = directory / "chat_template.json"
    template = _read_json(path).get("chat_template") if path.exists() else None
    return template if isinstance(template, str) else None


def _pooling(path: Path) -> Pooling:
    """The pooling of a model for sentence-transformers, which has this file."""
    if not path.exists():
        return Pooling.LAST
    modes = {name for name, value in _read_json(path).items() if value is True}
    modes = {name for name in modes if name.startswith("pooling_mode_")}
    known = {"pooling_mode_lasttoken": Pooling.LAST, "pooling_mode_mean_tokens": Pooling.MEAN}
    return known.get(modes.pop(), Pooling.NONE) if len(modes) == 1 else Pooling.NONE


def _answer_ids(path: Path, vocab_size: int) -> tuple[int, int] | None:
    """The tokens of a reranker for sentence-transformers, which has this file. If it names only
    one, both are that one, and no request for scores is accepted."""
    if not path.exists():
        return None
    fields = _read_json(path)

    def token_id(name: str, default: int | None = None) -> int:
        value = fields.get(name)
        value = default if value is None else value
        if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value < vocab_size:
            raise ModelFilesError(f"{path}: {name} is {value!r}; must be a token id")
        return value

    yes = token_id("true_token_id")
    return yes, token_id("false_token_id", yes)


def _sampling_defaults(generation: dict[str, Any], path: Path, vocab_size: int) -> SamplingNumbers:
    values: dict[str, Any] = {}
    for name, parameter in NUMBERS.items():
        value = generation.get(name)
        if value is None or not parameter.from_model:  # Hugging Face writes null for "not set"
            continue
        kinds = int if parameter.whole else int | float
        valid = parameter.public
        if not isinstance(value, kinds) or isinstance(value, bool) or value not in valid:
            raise ModelFilesError(f"{path}: {name} is {value!r}; must be {valid}")
        values[name] = value if parameter.whole else float(value)
    if values.get("top_k", 0) >= vocab_size:
        values["top_k"] = 0  # off, and small enough for the contract
    return SamplingNumbers(**values)


def _read_json(path: Path) -> dict[str, Any]:
    try:
        values = json.loads(read_text(path))
    except (OSError, ValueError) as error:
        raise ModelFilesError(f"{path}: {error}") from error
    if not isinstance(values, dict):
        raise ModelFilesError(f"{path}: not a JSON object")
    return values


def _end_tokens(fields: dict[str, Any], path: Path) -> list[int]:
    """The field eos_token_id, which is one id, a list of ids or null."""
    value = fields.get("eos_token_id")
    ids = [each for each in (value if isinstance(value, list) else [value]) if each is not None]
    if any(type(each) is not int for each in ids):
        raise ModelFilesError(f"{path}: eos_token_id is {value!r}; must be token ids")
    return ids
