from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    Gemma3TextConfig,
    GraniteConfig,
    LlamaConfig,
    Ministral3Config,
    MinistralConfig,
    MistralConfig,
    Olmo2Config,
    Olmo3Config,
    Phi3Config,
    PreTrainedConfig,
    Qwen2Config,
    Qwen3Config,
    Qwen3MoeConfig,
    SmolLM3Config,
)

from shared.model_directory import MAX_JSON_BYTES
from tests.worker_svc.harness import TINY
from worker_svc.errors import ModelError
from worker_svc.models.config import load_model_config

FULL, WINDOW = "full_attention", "sliding_attention"
GEMMA = {"architectures": ["Gemma3ForCausalLM"]}
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
        ("Qwen3MoeForCausalLM", Qwen3MoeConfig()),
        ("Qwen2ForCausalLM", Qwen2Config()),
        ("LlamaForCausalLM", LlamaConfig()),
        ("MistralForCausalLM", MistralConfig()),
        ("MinistralForCausalLM", MinistralConfig(head_dim=128)),
        ("SmolLM3ForCausalLM", SmolLM3Config()),
        ("Phi3ForCausalLM", Phi3Config()),
        ("GraniteForCausalLM", GraniteConfig()),
        ("Gemma3ForCausalLM", Gemma3TextConfig()),
        ("Olmo2ForCausalLM", Olmo2Config()),
        ("Olmo3ForCausalLM", Olmo3Config()),
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
    assert config.max_model_len == oracle.max_position_embeddings
    ropes, window = oracle.rope_parameters, getattr(oracle, "sliding_window", None)
    types = getattr(oracle, "layer_types", None)
    if types is None:
        types = ["sliding_attention" if window else "full_attention"] * config.num_layers
    assert config.rope.theta == ropes.get("full_attention", ropes)["rope_theta"]
    for layer, kind in zip(config.layers, types, strict=True):
        assert layer.window == (window if kind == "sliding_attention" else None)
        if layer.rope:  # not in each fourth layer of SmolLM3
            assert layer.rope.theta == ropes.get(kind, ropes)["rope_theta"]


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
    ("overrides", "windows"),
    [
        ({}, [None, None, None]),
        ({"use_sliding_window": True, "max_window_layers": 1}, [None, 64, 64]),
        ({"use_sliding_window": True}, [None, None, None]),
        ({"layer_types": [FULL, WINDOW, FULL], "use_sliding_window": True}, [None, 64, None]),
        ({"layer_types": [FULL, WINDOW, FULL]}, [None, None, None]),
        (
            {"architectures": ["MistralForCausalLM"], "layer_types": [FULL, WINDOW, FULL]},
            [64, 64, 64],
        ),
        (
            {"architectures": ["MinistralForCausalLM"], "layer_types": [FULL, WINDOW, FULL]},
            [None, 64, None],
        ),
        ({"architectures": ["MistralForCausalLM"]}, [64, 64, 64]),
        ({"architectures": ["MistralForCausalLM"], "sliding_window": None}, [None, None, None]),
        ({"architectures": ["Phi3ForCausalLM"]}, [64, 64, 64]),
        ({"architectures": ["Gemma3ForCausalLM"]}, [64, 64, 64]),
        ({"architectures": ["Gemma3ForCausalLM"], "sliding_window_pattern": 2}, [64, None, 64]),
    ],
)
def test_windows_of_layers(
    tmp_path: Path, overrides: dict[str, Any], windows: list[int | None]
) -> None:
    config = load_model_config(write_config(tmp_path, **{"sliding_window": 64, **overrides}))
    assert [layer.window for layer in config.layers] == windows
    assert config.max_model_len == 512


def test_scales_of_queries_limit_the_length(tmp_path: Path) -> None:
    rope = {**YARN, "original_max_position_embeddings": 100, "llama_4_scaling_beta": 0.1}
    config = write_config(tmp_path, rope_parameters=rope)
    assert load_model_config(config).max_model_len == 100


@pytest.mark.parametrize("oracle", [Gemma3TextConfig(), MistralConfig(), Ministral3Config()])
def test_assumes_what_transformers_does_of_text_parts(
    tmp_path: Path, oracle: PreTrainedConfig
) -> None:
    """The language model of a model that also takes images."""
    name = {"gemma3_text": "Gemma3"}.get(oracle.model_type, "Mistral3")
    fields = {
        "architectures": [f"{name}ForConditionalGeneration"],
        "text_config": {"model_type": oracle.model_type, "num_hidden_layers": 7},
    }
    (tmp_path / "config.json").write_text(json.dumps(fields))
    config = load_model_config(tmp_path)
    ropes = oracle.rope_parameters
    rope = ropes.get("full_attention", ropes)
    assert (config.rope.theta, config.rope.rope_type) == (rope["rope_theta"], rope["rope_type"])
    assert config.rope.factor == rope.get("factor", 1.0)
    assert config.layers[0].window == oracle.sliding_window
    for ours in ("vocab_size", "hidden_size", "rms_norm_eps"):
        assert getattr(config, ours) == getattr(oracle, ours)
    assert config.num_layers == 7
    assert config.num_kv_heads == oracle.num_key_value_heads


def test_windows_have_a_rope_of_their_own(tmp_path: Path) -> None:
    """Gemma 3 4B has such a file, in the form before transformers 5."""
    scaling = {"rope_type": "linear", "factor": 8.0}
    text = {"architectures": None, "sliding_window_pattern": 2, "rope_scaling": scaling, **TINY}
    config = {"architectures": ["Gemma3ForConditionalGeneration"], "text_config": text}
    (tmp_path / "config.json").write_text(json.dumps(config))
    ropes = [layer.rope for layer in load_model_config(tmp_path).layers]
    assert [each and (each.rope_type, each.theta, each.factor) for each in ropes] == [
        ("default", 1e4, 1.0),
        ("linear", 1e6, 8.0),
        ("default", 1e4, 1.0),
    ]


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
            "Qwen3MoeForCausalLM, Qwen2ForCausalLM",
        ),
        (
            {"architectures": ["Qwen3MoeForCausalLM"], "num_experts": 4},
            "num_experts_per_tok: 8 of num_experts = 4",
        ),
        (
            {"architectures": ["Qwen3MoeForCausalLM"], "use_sliding_window": True},
            "use_sliding_window: not implemented",
        ),
        ({"architectures": None}, "architectures: none is not served"),
        ({**GEMMA, "sliding_window": None}, "sliding_window: missing"),
        ({**GEMMA, "layer_types": [FULL]}, "layer_types: 1 entries for 3 layers"),
        ({**GEMMA, "layer_types": ["chunked_attention"] * 3}, "layer_types: chunked_attention"),
        (
            {
                "architectures": ["SmolLM3ForCausalLM"],
                "use_sliding_window": True,
                "sliding_window": 8,
            },
            "layer_types: missing",
        ),
        (
            {
                "architectures": ["Mistral3ForConditionalGeneration"],
                "text_config": {"model_type": "mistral4"},
            },
            "text_config: model_type mistral4 is not served; served are mistral, ministral3",
        ),
        ({"final_logit_softcapping": 30.0}, "final_logit_softcapping: "),
        ({"attn_logit_softcapping": 30.0}, "attn_logit_softcapping: "),
        ({"use_bidirectional_attention": True}, "use_bidirectional_attention: "),
        (
            {"rope_parameters": {FULL: {}, WINDOW: {"partial_rotary_factor": 0.5}}},
            "partial_rotary_factor: must be the same",
        ),
        ({"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}, "rope_type: dynamic"),
        ({"rope_scaling": {"rope_type": "yarn"}}, "factor: missing"),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, "low_freq_factor: missing"),
        ({"rope_parameters": {"linear_attention": {}}}, "rope_parameters: linear_attention"),
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
