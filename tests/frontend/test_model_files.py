"""What is read from a model directory, and how a bad one is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from frontend.model_files import ModelFilesError, read_model_facts


def write(directory: Path, config: Any, generation: Any = None) -> Path:
    (directory / "config.json").write_text(json.dumps(config))
    if generation is not None:
        (directory / "generation_config.json").write_text(json.dumps(generation))
    return directory


def test_generation_config_goes_before_config(tmp_path: Path) -> None:
    directory = tmp_path / "my-model"
    directory.mkdir()
    write(
        directory,
        {"vocab_size": 100, "eos_token_id": 7},
        {"eos_token_id": [8, 9], "temperature": 0.6},
    )
    facts = read_model_facts(directory)
    assert facts.name == "my-model"
    assert facts.vocab_size == 100
    assert facts.eos_token_ids == (8, 9)
    assert facts.temperature == 0.6


@pytest.mark.parametrize(("config_eos", "expected"), [(7, (7,)), ([7, 8], (7, 8)), (None, ())])
def test_defaults_without_generation_config(
    tmp_path: Path, config_eos: Any, expected: tuple[int, ...]
) -> None:
    facts = read_model_facts(write(tmp_path, {"vocab_size": 100, "eos_token_id": config_eos}))
    assert facts.eos_token_ids == expected
    assert facts.temperature == 1.0


@pytest.mark.parametrize(
    ("config", "generation", "named"),
    [
        ({}, None, "vocab_size"),
        ({"vocab_size": 0}, None, "vocab_size"),
        ([], None, "config.json"),
        ({"vocab_size": 9}, {"temperature": "hot"}, "temperature"),
        ({"vocab_size": 9}, {"temperature": -1}, "temperature"),
        ({"vocab_size": 9}, [], "generation_config.json"),
    ],
)
def test_bad_files_are_named(tmp_path: Path, config: Any, generation: Any, named: str) -> None:
    with pytest.raises(ModelFilesError, match=named):
        read_model_facts(write(tmp_path, config, generation))


def test_missing_and_unreadable_files_are_named(tmp_path: Path) -> None:
    with pytest.raises(ModelFilesError, match="is not a directory"):
        read_model_facts(tmp_path / "nowhere")
    with pytest.raises(ModelFilesError, match=r"config\.json"):
        read_model_facts(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ModelFilesError, match=r"config\.json"):
        read_model_facts(tmp_path)
