"""Reads config.json into one frozen dataclass, in the way in which transformers reads it.

Importing transformers would take longer than the worker takes to load a small model.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from pydantic import BaseModel, PositiveInt, TypeAdapter, ValidationError

from worker_svc.errors import ModelError
from worker_svc.layers.rotary import ROPE_TYPES, RopeConfig
from worker_svc.models.families import Family, read_model_file


@dataclass(frozen=True)
class ModelConfig:
    """The configuration of a model of any family. Sizes are for the whole model, not per rank."""

    family: Family
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    attention_bias: bool
    mlp_bias: bool
    tie_word_embeddings: bool
    max_model_len: int
    rope: RopeConfig
    rotated_layers: tuple[bool, ...]  # whether each layer has a rotary embedding
    attention_multiplier: float | None  # of scores; None: head_dim ** -0.5
    embedding_scale: float
    output_scale: float  # of the head's input
    dtype: torch.dtype
    # The file's `quantization_config`, which `worker_svc.weights.quantization` reads.
    quantization: Mapping[str, Any] | None = None

    @property
    def num_weights(self) -> int:
        """The number of weights by which each token is multiplied."""
        heads = 2 * (self.num_heads + self.num_kv_heads) * self.head_dim
        layer = self.hidden_size * (heads + 3 * self.intermediate_size)
        return self.num_layers * layer + self.vocab_size * self.hidden_size


class _ConfigFile(BaseModel, strict=True):
    """The fields of config.json that the worker uses. A size without a default is in every file, or
    the family has its default."""

    vocab_size: PositiveInt
    hidden_size: PositiveInt
    intermediate_size: PositiveInt
    num_hidden_layers: PositiveInt
    num_attention_heads: PositiveInt
    num_key_value_heads: PositiveInt | None = None  # None: num_attention_heads
    head_dim: PositiveInt | None = None  # None: hidden_size / num_attention_heads
    hidden_act: str = "silu"
    max_position_embeddings: PositiveInt
    original_max_position_embeddings: PositiveInt | None = None
    rms_norm_eps: float = 1e-6
    attention_bias: bool = False
    mlp_bias: bool = False
    tie_word_embeddings: bool = False
    dtype: str | None = None
    torch_dtype: str | None = None  # the name of `dtype` before transformers 5
    rope_parameters: dict[str, Any] | None = None
    # Before transformers 5, the next three fields take the place of `rope_parameters`.
    rope_scaling: dict[str, Any] | None = None
    rope_theta: float = 10000.0
    partial_rotary_factor: float = 1.0
    use_sliding_window: bool = False
    sliding_window: PositiveInt | None = None
    no_rope_layers: list[int] | None = None  # 0: the layer has no rotary embedding
    no_rope_layer_interval: PositiveInt | None = None  # each such layer has none
    layer_types: list[str] | None = None
    # Of Granite. The others leave attention_multiplier to the size of the heads.
    attention_multiplier: float | None = None
    embedding_multiplier: float | None = None
    residual_multiplier: float | None = None
    logits_scaling: float | None = None
    quantization_config: dict[str, Any] | None = None
    compression_config: dict[str, Any] | None = None  # its old name in compressed-tensors


def load_model_config(model_dir: Path) -> ModelConfig:
    """Reads and checks `config.json`.

    Raises:
        ModelError: the file is missing or unreadable, or needs a feature that is not implemented.
            The message names that feature.
    """
    family, fields = read_model_file(model_dir)
    try:
        return _checked(family, _ConfigFile.model_validate(fields))
    except ValidationError as error:
        raise ModelError(f"model: {model_dir / 'config.json'}: {_describe(error)}") from error


def _checked(family: Family, file: _ConfigFile) -> ModelConfig:
    num_kv_heads = file.num_key_value_heads or file.num_attention_heads
    if file.hidden_act != "silu":
        raise ModelError(f"hidden_act: {file.hidden_act} is not implemented; silu is")
    if file.num_attention_heads % num_kv_heads:
        raise ModelError(
            f"num_key_value_heads: {num_kv_heads} does not divide num_attention_heads, which is "
            f"{file.num_attention_heads}"
        )
    head_dim = file.head_dim or file.hidden_size // file.num_attention_heads
    rope = _rope(_rope_parameters(file))
    rotated = rope.rotated_size(head_dim)
    if rotated % 2 or head_dim % 2 or not 0 < rotated <= head_dim:
        raise ModelError(
            f"partial_rotary_factor: {rope.partial_rotary_factor} of {head_dim} channels; must be "
            "an even number of both"
        )
    frequencies = rotated // 2
    # Hidden states are divided by the multiplier of all that is added to them. A norm with another
    # eps gives the same.
    residual = file.residual_multiplier or 1.0
    for name in ("frequency_factors", "short_factor", "long_factor"):
        if (factors := len(getattr(rope, name))) not in (0, frequencies):
            raise ModelError(f"{name}: {factors}, but there are {frequencies} frequencies")
    return ModelConfig(
        family=family,
        vocab_size=file.vocab_size,
        hidden_size=file.hidden_size,
        intermediate_size=file.intermediate_size,
        num_layers=file.num_hidden_layers,
        num_heads=file.num_attention_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        rms_norm_eps=file.rms_norm_eps / residual**2,
        attention_bias=file.attention_bias,
        mlp_bias=file.mlp_bias,
        tie_word_embeddings=file.tie_word_embeddings,
        max_model_len=_max_model_len(family, file, rope),
        rope=rope,
        rotated_layers=_rotated_layers(file),
        attention_multiplier=file.attention_multiplier,
        embedding_scale=(file.embedding_multiplier or 1.0) / residual,
        output_scale=1.0 / (file.logits_scaling or 1.0),
        dtype=_dtype(file.dtype or file.torch_dtype or "float32"),
        quantization=file.quantization_config or file.compression_config,
    )


def _dtype(name: str) -> torch.dtype:
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise ModelError(f"dtype: {name} is not one of torch's")
    return dtype


def _rope_parameters(file: _ConfigFile) -> dict[str, Any]:
    given = file.rope_scaling or file.rope_parameters or {}
    parameters = {
        "rope_type": given.get("type", "default"),
        "rope_theta": file.rope_theta,
        "original_max_position_embeddings": file.max_position_embeddings,
        "partial_rotary_factor": file.partial_rotary_factor,
    } | {name: value for name, value in given.items() if value is not None}
    if file.original_max_position_embeddings:
        parameters["original_max_position_embeddings"] = file.original_max_position_embeddings
    if parameters["rope_type"] in ("longrope", "su"):  # its first name, in files of Phi-3
        extension = file.max_position_embeddings / parameters["original_max_position_embeddings"]
        parameters = {"factor": extension} | parameters | {"rope_type": "longrope"}
    return parameters


def _rope(parameters: dict[str, Any]) -> RopeConfig:
    if any(isinstance(value, dict) for value in parameters.values()):
        raise ModelError("rope_parameters: one per kind of layer is not implemented")
    rope_type = parameters["rope_type"]
    if rope_type not in ROPE_TYPES:
        served = ", ".join(ROPE_TYPES)
        raise ModelError(f"rope_type: {rope_type} is not implemented; implemented are {served}")
    for name in ROPE_TYPES[rope_type]:
        if name not in parameters:
            raise ModelError(f"{name}: missing; rope_type {rope_type} needs it")
    theta = {"theta": parameters["rope_theta"]}
    return TypeAdapter(RopeConfig).validate_python(parameters | theta)


def _max_model_len(family: Family, file: _ConfigFile, rope: RopeConfig) -> int:
    """The model's limit in tokens. Model cards say to enable yarn in the configuration without
    changing `max_position_embeddings`, so this function computes the extended length. A sequence
    that fits into the windows of layers is computed as if there were none."""
    length = file.max_position_embeddings
    if rope.rope_type == "yarn":
        length = max(length, int(rope.original_max_position_embeddings * rope.factor))
    slides = file.use_sliding_window or "sliding_attention" in (file.layer_types or ())
    if slides and not file.sliding_window:
        raise ModelError("sliding_window: missing, but layers have windows")
    if file.sliding_window and (slides or family.has_window):
        length = min(length, file.sliding_window)
    return length


def _rotated_layers(file: _ConfigFile) -> tuple[bool, ...]:
    count, interval = file.num_hidden_layers, file.no_rope_layer_interval
    given = file.no_rope_layers or [(n + 1) % interval if interval else 1 for n in range(count)]
    if len(given) < count:
        raise ModelError(f"no_rope_layers: {len(given)} entries for {count} layers")
    return tuple(each != 0 for each in given[:count])


def _describe(error: ValidationError) -> str:
    return "; ".join(
        f"{each['loc'][0]}: {each['msg']}, not {each['input']!r}" for each in error.errors()
    )
