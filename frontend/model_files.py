"""What the frontend reads from a model directory besides its tokenizer."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any


class ModelFilesError(Exception):
    """The model directory cannot be used; the message names the file and the reason."""


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """Facts about a model; `temperature` is the default of requests that give none."""

    name: str
    vocab_size: int
    eos_token_ids: tuple[int, ...]
    temperature: float


def read_model_facts(directory: Path) -> ModelFacts:
    """Reads config.json and, where there is one, generation_config.json.

    Raises:
        ModelFilesError: a file is missing or unreadable, or a value in it is impossible.
    """
    if not directory.is_dir():
        raise ModelFilesError(f"model: {directory} is not a directory")
    config = _read_json(directory / "config.json")
    generation_path = directory / "generation_config.json"
    generation = _read_json(generation_path) if generation_path.exists() else {}
    vocab_size = config.get("vocab_size")
    if not isinstance(vocab_size, int) or vocab_size <= 0:
        raise ModelFilesError(f"{directory / 'config.json'}: vocab_size is {vocab_size!r}")
    temperature = generation.get("temperature", 1.0)
    if not isinstance(temperature, int | float) or not 0 <= temperature < math.inf:
        raise ModelFilesError(f"{generation_path}: temperature is {temperature!r}")
    return ModelFacts(
        name=directory.resolve().name,
        vocab_size=vocab_size,
        eos_token_ids=_token_ids(generation.get("eos_token_id", config.get("eos_token_id"))),
        temperature=float(temperature),
    )


def _read_json(path: Path) -> dict[str, Any]:
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ModelFilesError(f"{path}: {error}") from error
    if not isinstance(values, dict):
        raise ModelFilesError(f"{path}: not a JSON object")
    return values


def _token_ids(value: int | list[int] | None) -> tuple[int, ...]:
    """Hugging Face writes one id, a list of them, or null."""
    if value is None:
        return ()
    return (value,) if isinstance(value, int) else tuple(value)
