"""Reads config.json into one frozen dataclass, in the way in which transformers reads it.

Importing transformers would take longer than the worker takes to load a small model.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import torch
from pydantic import BaseModel, PositiveInt, TypeAdapter, ValidationError

from worker_svc.errors import ModelError
from worker_svc.kernels.ops import Activation
from worker_svc.layers.rotary import ROPE_TYPES, RopeConfig
from worker_svc.models.families import Family, read_model_file

# Activations of feed-forward layers by their names in config.json -> in `kernels.ops.Ops`.
_ACTIVATIONS: dict[str, Activation] = {"silu": "silu", "gelu_pytorch_tanh": "gelu_tanh"}
_FULL, _WINDOW = "full_attention", "sliding_attention"  # entries of `layer_types`


class LayerAttention(NamedTuple):
    """The window and the rope of a layer, in which layers of a model may differ."""

    window: int | None  # how many of the last tokens a token sees; None: all
    rope: RopeConfig | None  # None: no rotary embedding


@dataclass(frozen=True)
class ExpertsConfig:
    """The mixtures of experts that take the place of some layers' MLPs.

    Args:
        layers: the numbers of these layers.
        size: the intermediate size of an expert.
        normalized: see `kernels.ops.Experts`.
    """

    layers: frozenset[int]
    count: int
    per_token: int
    size: int
    normalized: bool


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
    activation: Activation
    tie_word_embeddings: bool
    max_model_len: int
    rope: RopeConfig  # of layers that see all tokens
    layers: tuple[LayerAttention, ...]
    attention_multiplier: float | None  # of scores; None: head_dim ** -0.5
    embedding_scale: float
    output_scale: float  # of the head's input
    dtype: torch.dtype
    experts: ExpertsConfig | None = None
    # The file's `quantization_config`, which `worker_svc.weights.quantization` reads.
    quantization: Mapping[str, Any] | None = None

    @property
    def has_mlp(self) -> bool:
        """Whether any layer has an MLP, not a mixture of experts."""
        return self.experts is None or len(self.experts.layers) < self.num_layers

    @property
    def head_weights(self) -> int:
        """The number of weights in the output head."""
        return self.hidden_size * self.vocab_size

    def layer_weights(self, number: int, *, active: bool) -> int:
        """The number of weights in a layer's products, or only of the `active` ones, by which each
        token is multiplied."""
        experts, size = self.experts, 3 * self.intermediate_size
        if experts and number in experts.layers:
            num_experts = experts.per_token if active else experts.count
            size = experts.count + num_experts * 3 * experts.size
        heads = 2 * (self.num_heads + self.num_kv_heads) * self.head_dim
        return self.hidden_size * (heads + size)


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
    hidden_activation: str | None = None  # Gemma's name
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
    rope_local_base_freq: float | None = None  # of layers with windows, if it is another one
    use_sliding_window: bool = False
    sliding_window: PositiveInt | None = None
    sliding_window_pattern: PositiveInt | None = None  # each such layer has no window
    max_window_layers: int = 28  # so many layers have none, the others have
    no_rope_layers: list[int] | None = None  # 0: the layer has no rotary embedding
    no_rope_layer_interval: PositiveInt | None = None  # each such layer has none
    layer_types: list[str] | None = None
    # Of mixtures of experts. transformers 5 writes num_local_experts.
    num_experts: PositiveInt | None = None
    num_local_experts: PositiveInt | None = None
    num_experts_per_tok: PositiveInt | None = None
    moe_intermediate_size: PositiveInt | None = None
    norm_topk_prob: bool = False
    decoder_sparse_step: PositiveInt = 1  # each such layer has experts
    mlp_only_layers: list[int] | None = None  # these have none
    # Of Gemma.
    query_pre_attn_scalar: float | None = None
    attn_logit_softcapping: float | None = None
    final_logit_softcapping: float | None = None
    use_bidirectional_attention: bool | None = None
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
    own = file.hidden_activation if "hidden_activation" in family.defaults else None
    activation = own or file.hidden_act
    if activation not in _ACTIVATIONS:
        served = ", ".join(_ACTIVATIONS)
        raise ModelError(f"hidden_act: {activation} is not implemented; implemented are {served}")
    for name in ("attn_logit_softcapping", "final_logit_softcapping"):
        if getattr(file, name) is not None:
            raise ModelError(f"{name}: capped scores and logits are not implemented")
    if file.use_bidirectional_attention:
        raise ModelError("use_bidirectional_attention: tokens that see later ones are not served")
    if file.num_attention_heads % num_kv_heads:
        raise ModelError(
            f"num_key_value_heads: {num_kv_heads} does not divide num_attention_heads, which is "
            f"{file.num_attention_heads}"
        )
    head_dim = file.head_dim or file.hidden_size // file.num_attention_heads
    rope, window_rope = _ropes(file)
    rotated = rope.rotated_size(head_dim)
    if rotated % 2 or head_dim % 2 or not 0 < rotated <= head_dim:
        raise ModelError(
            f"partial_rotary_factor: {rope.partial_rotary_factor} of {head_dim} channels; must be "
            "an even number of both"
        )
    if window_rope.rotated_size(head_dim) != rotated:
        raise ModelError("partial_rotary_factor: must be the same in all layers")
    frequencies = rotated // 2
    # Hidden states are divided by the multiplier of all that is added to them. A norm with another
    # eps gives the same.
    residual = file.residual_multiplier or 1.0
    names = "frequency_factors", "short_factor", "long_factor"
    for each, name in product((rope, window_rope), names):
        if (factors := len(getattr(each, name))) not in (0, frequencies):
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
        activation=_ACTIVATIONS[activation],
        tie_word_embeddings=file.tie_word_embeddings,
        max_model_len=_max_model_len(file, rope),
        rope=rope,
        layers=_layers(family, file, rope, window_rope),
        attention_multiplier=_attention_multiplier(file),
        embedding_scale=(file.embedding_multiplier or 1.0) / residual,
        output_scale=1.0 / (file.logits_scaling or 1.0),
        dtype=_dtype(file.dtype or file.torch_dtype or "float32"),
        experts=_experts(family, file),
        quantization=file.quantization_config or file.compression_config,
    )


def _experts(family: Family, file: _ConfigFile) -> ExpertsConfig | None:
    if "moe_intermediate_size" not in family.defaults:
        return None
    count = file.num_local_experts or file.num_experts
    size, per_token = file.moe_intermediate_size, file.num_experts_per_tok
    if count is None or size is None or per_token is None:
        raise ModelError("num_experts, num_experts_per_tok, moe_intermediate_size: may not be null")
    if file.use_sliding_window:
        raise ModelError("use_sliding_window: not implemented for mixtures of experts")
    if per_token > count:
        raise ModelError(f"num_experts_per_tok: {per_token} of num_experts = {count}")
    layers = frozenset(
        number
        for number in range(file.num_hidden_layers)
        if (number + 1) % file.decoder_sparse_step == 0
        and number not in (file.mlp_only_layers or [])
    )
    return ExpertsConfig(layers, count, per_token, size, file.norm_topk_prob)


def _dtype(name: str) -> torch.dtype:
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise ModelError(f"dtype: {name} is not one of torch's")
    return dtype


def _attention_multiplier(file: _ConfigFile) -> float | None:
    scalar = file.query_pre_attn_scalar
    return file.attention_multiplier if scalar is None else float(scalar**-0.5)


def _ropes(file: _ConfigFile) -> tuple[RopeConfig, RopeConfig]:
    """The rotary embedding of layers that see all tokens, and that of layers with windows."""
    given = file.rope_parameters or {}
    if {_FULL, _WINDOW} & given.keys():
        full, local = (given.get(name) or {} for name in (_FULL, _WINDOW))
        full = {**full, **(file.rope_scaling or {})}
    else:
        full, local = file.rope_scaling or given, {}
    rope = _rope(_rope_parameters(file, full))
    if file.rope_local_base_freq is None and not local:
        return rope, rope
    theta = file.rope_local_base_freq or file.rope_theta
    return rope, _rope(_rope_parameters(file, {"rope_theta": theta} | local))


def _rope_parameters(file: _ConfigFile, given: dict[str, Any]) -> dict[str, Any]:
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
    if other := [name for name, value in parameters.items() if isinstance(value, dict)]:
        raise ModelError(f"rope_parameters: {other[0]} is not a kind of layer that is implemented")
    rope_type = parameters["rope_type"]
    if rope_type not in ROPE_TYPES:
        served = ", ".join(ROPE_TYPES)
        raise ModelError(f"rope_type: {rope_type} is not implemented; implemented are {served}")
    for name in ROPE_TYPES[rope_type][1]:
        if name not in parameters:
            raise ModelError(f"{name}: missing; rope_type {rope_type} needs it")
    theta = {"theta": parameters["rope_theta"]}
    return TypeAdapter(RopeConfig).validate_python(parameters | theta)


def _max_model_len(file: _ConfigFile, rope: RopeConfig) -> int:
    """The model's limit in tokens. Model cards say to enable yarn in the configuration without
    changing `max_position_embeddings`, so this function computes the extended length. Scales of
    queries that depend on the position are not implemented, but are 1 at first."""
    length = file.max_position_embeddings
    if rope.rope_type == "yarn":
        length = max(length, int(rope.original_max_position_embeddings * rope.factor))
    if rope.llama_4_scaling_beta:
        length = min(length, rope.original_max_position_embeddings)
    return length


def _layers(
    family: Family, file: _ConfigFile, rope: RopeConfig, window_rope: RopeConfig
) -> tuple[LayerAttention, ...]:
    numbers, interval = range(file.num_hidden_layers), file.no_rope_layer_interval
    types = _layer_types(family, file)
    rotated = file.no_rope_layers or [(n + 1) % interval if interval else 1 for n in numbers]
    for name, given in (("layer_types", types), ("no_rope_layers", rotated)):
        if len(given) < len(numbers):
            raise ModelError(f"{name}: {len(given)} entries for {len(numbers)} layers")
    kinds = {_FULL: (None, rope), _WINDOW: (file.sliding_window, window_rope)}
    layers = []
    for number in numbers:
        if (kind := types[number]) not in kinds:
            raise ModelError(f"layer_types: {kind} is not implemented")
        window, own_rope = kinds[kind]
        if kind == _WINDOW and window is None:
            raise ModelError("sliding_window: missing, but layers have windows")
        layers.append(LayerAttention(window, own_rope if rotated[number] else None))
    return tuple(layers)


def _layer_types(family: Family, file: _ConfigFile) -> list[str]:
    numbers, pattern = range(file.num_hidden_layers), file.sliding_window_pattern
    if family.windows == "all":
        return [_WINDOW if file.sliding_window else _FULL for _ in numbers]
    if family.windows == "optional" and not (file.use_sliding_window and file.sliding_window):
        return [_FULL for _ in numbers]
    if file.layer_types:
        return file.layer_types
    if file.no_rope_layer_interval:  # of SmolLM3, which has a rule of its own
        raise ModelError("layer_types: missing, but use_sliding_window is true")
    if family.windows == "optional":
        return [_FULL if n < file.max_window_layers else _WINDOW for n in numbers]
    if pattern:
        return [_WINDOW if (n + 1) % pattern else _FULL for n in numbers]
    return [_WINDOW if file.sliding_window else _FULL for _ in numbers]


def _describe(error: ValidationError) -> str:
    return "; ".join(
        f"{each['loc'][0]}: {each['msg']}, not {each['input']!r}" for each in error.errors()
    )
