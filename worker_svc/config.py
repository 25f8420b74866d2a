"""The model's configuration: config.json, as transformers reads it, in one frozen dataclass."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from transformers import AutoConfig, PretrainedConfig

from worker_svc.errors import ModelError

ARCHITECTURE = "Qwen3ForCausalLM"


@dataclass(frozen=True)
class RopeConfig:
    """Rotary embedding. The fields after `factor` are for yarn only; None takes yarn's default."""

    rope_type: Literal["default", "linear", "yarn"]
    theta: float
    factor: float = 1.0
    original_max_position_embeddings: int = 0
    attention_factor: float | None = None
    mscale: float | None = None
    mscale_all_dim: float | None = None
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True


@dataclass(frozen=True)
class ModelConfig:
    """A Qwen3 model. Sizes are the whole model's, not a rank's."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    attention_bias: bool
    tie_word_embeddings: bool
    max_model_len: int
    rope: RopeConfig
    dtype: torch.dtype
    # `quantization_config` as it is in the file, for `worker_svc.quantization`.
    quantization: Mapping[str, Any] | None = None


def find_model_dir(model: str) -> Path:
    """`model` if it is a directory, else the snapshot of that name on the Hugging Face hub.

    Raises:
        ModelError: neither exists, or the hub cannot be reached.
    """
    path = Path(model)
    if path.is_dir():
        return path
    # Imported only when needed: it takes a while.
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    try:
        return Path(snapshot_download(model, allow_patterns=["*.json", "*.safetensors"]))
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OSError) as error:
        raise ModelError(f"model: {model} is not a directory, and not found on the hub") from error


def load_model_config(model_dir: Path) -> ModelConfig:
    """Reads and checks `config.json`.

    Raises:
        ModelError: the file is missing or unreadable, or asks for something that is not
            implemented; the message names it.
    """
    path = model_dir / "config.json"
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ModelError(f"model: cannot read {path}: {error}") from error
    architectures = raw.get("architectures") or ["none"]
    if architectures != [ARCHITECTURE]:
        raise ModelError(
            f"architectures: {', '.join(architectures)} is not implemented; {ARCHITECTURE} is"
        )
    try:
        config = AutoConfig.from_pretrained(model_dir, local_files_only=True)
    except Exception as error:  # transformers raises many kinds, each with a message of its own
        raise ModelError(f"model: {path}: {error}") from error
    _refuse_unimplemented(config)
    return ModelConfig(
        vocab_size=config.vocab_size,
        hidden_size=config.hidden_size,
        intermediate_size=config.intermediate_size,
        num_layers=config.num_hidden_layers,
        num_heads=config.num_attention_heads,
        num_kv_heads=config.num_key_value_heads,
        head_dim=config.head_dim or config.hidden_size // config.num_attention_heads,
        rms_norm_eps=config.rms_norm_eps,
        attention_bias=config.attention_bias,
        tie_word_embeddings=config.tie_word_embeddings,
        max_model_len=_max_model_len(config),
        rope=_rope(config.rope_parameters),
        dtype=config.dtype or torch.float32,
        quantization=raw.get("quantization_config") or raw.get("compression_config"),
    )


def _refuse_unimplemented(config: PretrainedConfig) -> None:
    if config.use_sliding_window or "sliding_attention" in (config.layer_types or ()):
        raise ModelError("use_sliding_window: sliding window attention is not implemented")
    if config.hidden_act != "silu":
        raise ModelError(f"hidden_act: {config.hidden_act} is not implemented; silu is")
    if config.num_attention_heads % config.num_key_value_heads:
        raise ModelError(
            f"num_key_value_heads: {config.num_key_value_heads} does not divide "
            f"num_attention_heads, which is {config.num_attention_heads}"
        )


def _rope(parameters: dict[str, Any]) -> RopeConfig:
    rope_type = parameters["rope_type"]
    if rope_type not in ("default", "linear", "yarn"):
        raise ModelError(f"rope_type: {rope_type} is not implemented; default, linear and yarn are")
    if parameters.get("partial_rotary_factor", 1.0) != 1.0:
        raise ModelError("partial_rotary_factor: only 1.0 is implemented")
    theta = float(parameters["rope_theta"])
    if rope_type == "default":
        return RopeConfig("default", theta)
    factor = float(parameters["factor"])
    if rope_type == "linear":
        return RopeConfig("linear", theta, factor)
    return RopeConfig(
        "yarn",
        theta,
        factor,
        original_max_position_embeddings=parameters["original_max_position_embeddings"],
        attention_factor=parameters.get("attention_factor"),
        mscale=parameters.get("mscale"),
        mscale_all_dim=parameters.get("mscale_all_dim"),
        beta_fast=parameters.get("beta_fast") or 32.0,
        beta_slow=parameters.get("beta_slow") or 1.0,
        truncate=parameters.get("truncate", True),
    )


def _max_model_len(config: PretrainedConfig) -> int:
    """The model's limit in tokens. Qwen3's model cards enable yarn by adding it to the
    configuration without changing `max_position_embeddings`, so the extended length is worked out
    here."""
    rope = config.rope_parameters
    extended = 0
    if rope["rope_type"] == "yarn":
        extended = int(rope["original_max_position_embeddings"] * rope["factor"])
    return max(int(config.max_position_embeddings), extended)
