"""Reading a model directory, and rejecting a bad one."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from frontend.text.model_files import ModelFilesError, read_model_facts
from shared.sampling_params import Pooling, SamplingNumbers

ABSENT: Any = object()


def write(directory: Path, config: Any, generation: Any = None) -> Path:
    (directory / "config.json").write_text(json.dumps(config))
    if generation is not None:
        (directory / "generation_config.json").write_text(json.dumps(generation))
    return directory


def test_defaults_are_those_of_generation_config(tmp_path: Path) -> None:
    directory = tmp_path / "my-model"
    directory.mkdir()
    defaults = {
        **{"temperature": 0.6, "top_k": 20, "top_p": 0.95, "min_p": 0},
        "repetition_penalty": 1.1,
    }
    facts = read_model_facts(write(directory, {"vocab_size": 100}, defaults))
    assert (facts.name, facts.vocab_size) == ("my-model", 100)
    assert facts.defaults == SamplingNumbers(**defaults)


@pytest.mark.parametrize(
    "generation",
    [
        None,
        # Null is not set, and a top_k over the vocabulary is off.
        {"temperature": None, "top_p": None, "top_k": 10**30},
    ],
)
def test_other_defaults_change_nothing(tmp_path: Path, generation: Any) -> None:
    facts = read_model_facts(write(tmp_path, {"vocab_size": 100}, generation))
    assert facts.defaults == SamplingNumbers(
        temperature=1.0, top_k=0, top_p=1.0, min_p=0.0, repetition_penalty=1.0
    )


def test_a_language_model_beside_images(tmp_path: Path) -> None:
    """Published files of Gemma 3 leave out its vocabulary size."""
    text = {"model_type": "gemma3_text", "hidden_size": 64, "eos_token_id": 1}
    facts = read_model_facts(write(tmp_path, {"text_config": text, "eos_token_id": [1, 106]}))
    assert (facts.vocab_size, facts.hidden_size) == (262208, 64)
    assert facts.eos_token_ids == (1, 106)
    facts = read_model_facts(write(tmp_path, {"text_config": {"vocab_size": 100}}))
    assert facts.vocab_size == 100


@pytest.mark.parametrize(
    ("generation", "config", "expected"),
    [
        (8, 7, (8, 7)),
        ([7, 8], [8, 9], (7, 8, 9)),
        (None, 7, (7,)),
        (ABSENT, 7, (7,)),
        (ABSENT, None, ()),
        ([None, 8], None, (8,)),
        ([], [], ()),
        # As transformers does: no model samples an id that is outside of its vocabulary.
        ([100, 99], [-1, 1 << 70], (99,)),
    ],
)
def test_end_tokens_are_those_of_both_files(
    tmp_path: Path, generation: Any, config: Any, expected: tuple[int, ...]
) -> None:
    files = {"eos_token_id": generation} if generation is not ABSENT else None
    facts = read_model_facts(write(tmp_path, {"vocab_size": 100, "eos_token_id": config}, files))
    assert facts.eos_token_ids == expected
    assert facts.ending_with([99, 100, 5]).eos_token_ids == tuple(dict.fromkeys([*expected, 99, 5]))


@pytest.mark.parametrize(
    ("config", "generation", "named"),
    [
        ({"vocab_size": 9, "eos_token_id": "2"}, None, r"config.json: eos_token_id is '2'"),
        ({"vocab_size": 9, "eos_token_id": True}, None, r"config.json: eos_token_id is True"),
        (
            {"vocab_size": 9},
            {"eos_token_id": [2, 2.0]},
            r"generation_.*: eos_token_id is \[2, 2.0\]",
        ),
        ({"vocab_size": 9}, {"eos_token_id": {"a": 2}}, r"eos_token_id is {'a': 2}; must be token"),
        ({}, None, "vocab_size"),
        ({"vocab_size": 0}, None, "vocab_size"),
        ([], None, "config.json"),
        ({"vocab_size": 9}, {"temperature": "hot"}, "temperature"),
        ({"vocab_size": 9}, {"temperature": -1}, r"temperature is -1; must be in \[0, 2\]"),
        ({"vocab_size": 9}, {"temperature": True}, "temperature is True"),
        ({"vocab_size": 9}, {"temperature": float("nan")}, "temperature is nan"),
        ({"vocab_size": 9}, {"top_k": -1}, "generation_config.json: top_k is -1; .* at least 0"),
        ({"vocab_size": 9}, {"top_k": 2.5}, "top_k is 2.5"),
        ({"vocab_size": 9}, {"top_p": 0}, r"top_p is 0; must be in \(0, 1\]"),
        ({"vocab_size": 9}, {"min_p": 1.5}, r"min_p is 1.5; must be in \[0, 1\]"),
        (
            {"vocab_size": 9},
            {"repetition_penalty": 0},
            r"repetition_penalty is 0; must be in \[1e-30, 1e\+30\]",
        ),
        ({"vocab_size": 9}, {"repetition_penalty": 10**400}, "repetition_penalty is 1000"),
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


@pytest.mark.parametrize(
    ("modes", "pooling"),
    [
        (None, Pooling.LAST),
        ({"pooling_mode_lasttoken": True, "pooling_mode_mean_tokens": False}, Pooling.LAST),
        ({"pooling_mode_mean_tokens": True, "include_prompt": True}, Pooling.MEAN),
        ({"pooling_mode_cls_token": True}, Pooling.NONE),
        ({"pooling_mode_lasttoken": True, "pooling_mode_mean_tokens": True}, Pooling.NONE),
    ],
)
def test_pooling_is_that_of_sentence_transformers(
    tmp_path: Path, modes: Any, pooling: Pooling
) -> None:
    write(tmp_path, {"vocab_size": 100})
    if modes:
        (tmp_path / "1_Pooling").mkdir()
        write(tmp_path / "1_Pooling", modes)
    assert read_model_facts(tmp_path).pooling is pooling


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"true_token_id": 7, "false_token_id": 99}, (7, 99)),
        ({"true_token_id": 7, "false_token_id": None}, (7, 7)),
        ({"true_token_id": 7}, (7, 7)),
        ({"true_token_id": 100}, "true_token_id is 100; must be a token id"),
        ({"true_token_id": 7, "false_token_id": "no"}, "false_token_id is 'no'"),
        ({"false_token_id": 7}, "true_token_id is None"),
    ],
)
def test_tokens_of_scores_are_those_of_sentence_transformers(
    tmp_path: Path, fields: Any, expected: Any
) -> None:
    write(tmp_path, {"vocab_size": 100})
    assert read_model_facts(tmp_path).answer_ids is None
    (tmp_path / "1_LogitScore").mkdir()
    write(tmp_path / "1_LogitScore", fields)
    if isinstance(expected, tuple):
        assert read_model_facts(tmp_path).answer_ids == expected
    else:
        with pytest.raises(ModelFilesError, match=expected):
            read_model_facts(tmp_path)
