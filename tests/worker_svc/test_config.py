from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    GraniteConfig,
    LlamaConfig,
    MistralConfig,
    Phi3Config,
    PreTrainedConfig,
    Qwen2Config,
    Qwen3Config,
    SmolLM3Config,
)

from shared.model_directory import MAX_JSON_BYTES
from tests.worker_svc.harness import TINY
from worker_svc.errors import ModelError
from worker_svc.models.config import load_model_config

YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 512}


def write_config(path: Path, **overrides: Any) -> Path:
    config = {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "torch_dtype": "bfloat16",
        **TINY,
        **overrides,
    }
    (path / "config.json").write_text(json.dumps(config))
    return path


def test_reads_sizes_and_dtype(tmp_path: Path) -> None:
    config = load_model_config(write_config(tmp_path))
    assert (config.hidden_size, config.num_kv_heads, config.head_dim) == (64, 2, 16)
    assert config.dtype == torch.bfloat16
    assert config.max_model_len == 512


@pytest.mark.parametrize(
    ("architecture", "oracle"),
    [
        ("Qwen3ForCausalLM", Qwen3Config()),
        ("Qwen2ForCausalLM", Qwen2Config()),
        ("LlamaForCausalLM", LlamaConfig()),
        ("MistralForCausalLM", MistralConfig()),
        ("SmolLM3ForCausalLM", SmolLM3Config()),
        ("Phi3ForCausalLM", Phi3Config()),
        ("GraniteForCausalLM", GraniteConfig()),
    ],
)
def test_assumes_what_transformers_does(
    tmp_path: Path, architecture: str, oracle: PreTrainedConfig
) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"architectures": [architecture]}))
    config = load_model_config(tmp_path)
    for name in (
        "vocab_size",
        "hidden_size",
        "intermediate_size",
        "head_dim",
        "rms_norm_eps",
        "attention_bias",
        "mlp_bias",
        "tie_word_embeddings",
    ):
        if hasattr(oracle, name):
            assert getattr(config, name) == getattr(oracle, name), name
    assert config.num_layers == oracle.num_hidden_layers
    assert config.num_heads == oracle.num_attention_heads
    assert config.num_kv_heads == oracle.num_key_value_heads
    window = getattr(oracle, "sliding_window", None) or oracle.max_position_embeddings
    assert config.max_model_len == min(window, oracle.max_position_embeddings)
    assert config.rope.theta == oracle.rope_parameters["rope_theta"]


@pytest.mark.parametrize(
    "rope",
    [
        {"rope_theta": 5e5, "rope_scaling": {**YARN, "beta_fast": 16.0}},
        {"rope_parameters": {**YARN, "rope_theta": 5e5, "beta_fast": 16.0}},
        {"rope_theta": 5e5, "rope_scaling": {"type": "yarn", **YARN, "beta_fast": 16.0}},
    ],
    ids=["rope_scaling", "rope_parameters", "legacy type key"],
)
def test_reads_both_styles_of_rope(tmp_path: Path, rope: dict[str, Any]) -> None:
    config = load_model_config(write_config(tmp_path, **rope))
    assert (config.rope.rope_type, config.rope.factor, config.rope.theta) == ("yarn", 4.0, 5e5)
    assert config.rope.beta_fast == 16.0
    assert config.max_model_len == 2048  # yarn's four times 512, though max_position says 512


@pytest.mark.parametrize(
    ("overrides", "limit"),
    [
        ({"sliding_window": 64}, 512),
        ({"sliding_window": 64, "use_sliding_window": True}, 64),
        ({"sliding_window": 64, "layer_types": ["full_attention", "sliding_attention"]}, 64),
        ({"sliding_window": 64, "layer_types": ["full_attention"]}, 512),
        ({"sliding_window": 64, "architectures": ["MistralForCausalLM"]}, 64),
        ({"sliding_window": None, "architectures": ["MistralForCausalLM"]}, 512),
        ({"sliding_window": 1024, "architectures": ["Phi3ForCausalLM"]}, 512),
    ],
)
def test_windows_limit_the_length(tmp_path: Path, overrides: dict[str, Any], limit: int) -> None:
    """Where they have no effect, a model is served without them."""
    assert load_model_config(write_config(tmp_path, **overrides)).max_model_len == limit


@pytest.mark.parametrize(
    ("overrides", "reason"),
    [
        ({"partial_rotary_factor": 0.45}, "partial_rotary_factor: 0.45 of 16 channels"),
        ({"rope_scaling": {"rope_type": "longrope", "factor": 2.0}}, "short_factor: missing"),
        (
            {"architectures": ["SmolLM3ForCausalLM"], "no_rope_layers": [1]},
            "no_rope_layers: 1 entries for 3 layers",
        ),
        (
            {"architectures": ["GPT2LMHeadModel"]},
            "architectures: GPT2LMHeadModel is not served; served are Qwen3ForCausalLM, "
            "Qwen2ForCausalLM, LlamaForCausalLM",
        ),
        ({"architectures": None}, "architectures: none is not served"),
        ({"layer_types": ["sliding_attention"]}, "sliding_window: missing"),
        ({"use_sliding_window": True}, "sliding_window: missing"),
        ({"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}, "rope_type: dynamic"),
        ({"rope_scaling": {"rope_type": "yarn"}}, "factor: missing"),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, "low_freq_factor: missing"),
        ({"rope_parameters": {"full_attention": {"rope_theta": 1e4}}}, "rope_parameters: "),
        ({"torch_dtype": "float7"}, "dtype: float7"),
        ({"hidden_act": "gelu"}, "hidden_act: gelu"),
        ({"num_key_value_heads": 3}, "num_key_value_heads: 3"),
    ],
)
def test_refuses_by_name(tmp_path: Path, overrides: dict[str, Any], reason: str) -> None:
    with pytest.raises(ModelError) as error:
        load_model_config(write_config(tmp_path, **overrides))
    assert str(error.value).startswith(reason)


def test_names_a_field_of_the_wrong_type(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"config\.json: hidden_size: .*, not '64'"):
        load_model_config(write_config(tmp_path, hidden_size="64"))


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("{", r"cannot read .*config\.json"),
        *((text, r"config\.json: not a JSON object") for text in ("[]", '"config"', "null")),
    ],
)
def test_names_a_file_of_something_else(text: str, reason: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(ModelError, match=reason):
        load_model_config(tmp_path)


def test_names_a_model_that_is_not_there() -> None:
    with pytest.raises(ModelError, match=r"cannot read no such/dir here/config\.json"):
        load_model_config(Path("no such/dir here"))


def test_names_a_file_that_is_too_large_or_none(tmp_path: Path) -> None:
    config = tmp_path / "config.json"
    with config.open("wb") as file:
        file.truncate(MAX_JSON_BYTES + 1)
    with pytest.raises(ModelError, match=r"config\.json: 16777217 bytes; the limit is 16777216"):
        load_model_config(tmp_path)
    config.unlink()
    config.symlink_to("/dev/zero")
    with pytest.raises(ModelError, match=r"config\.json: not a regular file"):
        load_model_config(tmp_path)
