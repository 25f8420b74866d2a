"""Translates the keys of a GGUF file to config.json and generation_config.json."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from gguf import GGMLQuantizationType

from worker_svc.gguf.header import GgufError, Header
from worker_svc.models.families import FAMILIES, Family

# Tokens that end a turn. Most files name only one of them by a key (llama.cpp has a similar list,
# `llama_vocab::impl::load`).
_ENDS = frozenset(("<|endoftext|>", "<|im_end|>", "<|end_of_text|>", "<|eot_id|>", "<|eom_id|>"))
_ENDS |= {"<|end|>", "</s>", "<end_of_turn>"}
# Tensors with a factor per frequency, and their parameters in config.json: of llama3, of longrope.
ROPE_FACTORS = {
    "rope_freqs.weight": "frequency_factors",
    "rope_factors_short.weight": "short_factor",
    "rope_factors_long.weight": "long_factor",
}
# Keys that few files have, and their fields in config.json.
_NUMBERS = {
    "rope.scaling.original_context_length": "original_max_position_embeddings",
    "expert_count": "num_experts",
    "expert_used_count": "num_experts_per_tok",
    "expert_feed_forward_length": "moe_intermediate_size",
}
_FACTORS = {
    "attention.scale": "attention_multiplier",
    "embedding_scale": "embedding_multiplier",
    "residual_scale": "residual_multiplier",
    "logit_scale": "logits_scaling",
    "rope.freq_base_swa": "rope_local_base_freq",
    "rope.local.freq_base": "rope_local_base_freq",  # Ollama's name
    "attn_logit_softcapping": "attn_logit_softcapping",
    "final_logit_softcapping": "final_logit_softcapping",
}
_GEMMA3_27B = 62  # layers; its query scale is in no key (llama.cpp's models/gemma3.cpp)
_ADDED = 3, 4  # of tokenizer.ggml.token_type: control and user-defined, as some converters write
_REQUIRED: Any = object()


class Keys:
    """The keys of a file, with checks of their types. Floats become the shortest decimal fraction
    that rounds to their 32 bits."""

    def __init__(self, keys: Mapping[str, Any]) -> None:
        self._keys = keys

    def get(self, name: str, kind: type, default: Any = _REQUIRED) -> Any:
        """The value of a key.

        Raises:
            GgufError: the key is missing and has no default, or is of another type.
        """
        value: Any = self._keys.get(name, default)
        if value is _REQUIRED:
            raise GgufError(f"{name}: missing")
        if value is default:
            return value
        if isinstance(value, np.ndarray):
            value = value.tolist()
        if type(value) is not kind:
            raise GgufError(f"{name}: {str(value)[:50]!r} is not of type {kind.__name__}")
        return float(str(np.float32(value))) if isinstance(value, float) else value

    def has_list(self, name: str) -> bool:
        return isinstance(self._keys.get(name), list | np.ndarray)


def family_of(keys: Keys) -> Family:
    """The family of a file's model.

    Raises:
        GgufError: the model's architecture is not served.
    """
    name = keys.get("general.architecture", str)
    families = {each.gguf: each for each in reversed(FAMILIES.values()) if each.gguf}
    if name not in families:
        served = ", ".join(families)
        raise GgufError(f"general.architecture: {name} is not served; served are {served}")
    return families[name]


def model_config(header: Header, family: Family) -> dict[str, Any]:
    """The fields of config.json.

    Raises:
        GgufError: a key is missing or wrong, or the model needs a feature that is not served.
    """
    keys, arch = Keys(header.keys), family.gguf
    if keys.get(f"{arch}.expert_count", int, 0) and "num_experts" not in family.defaults:
        raise GgufError(f"{arch}.expert_count: mixtures of experts are not served")
    window = keys.get(f"{arch}.attention.sliding_window", int, 0)
    if window and family.windows == "optional":
        raise GgufError(f"{arch}.attention.sliding_window: not served for {family.architecture}")
    embedding = header.tensors.get("token_embd.weight")
    if embedding is None:
        raise GgufError("token_embd.weight: the tensor is missing")
    num_tokens = len(keys.get("tokenizer.ggml.tokens", list))
    if num_tokens > embedding.shape[0]:
        raise GgufError(f"token_embd.weight: {embedding.shape[0]} rows for {num_tokens} tokens")
    heads = keys.get(f"{arch}.attention.head_count", int)
    hidden = keys.get(f"{arch}.embedding_length", int)
    if not heads or hidden < heads:
        raise GgufError(f"{arch}.attention.head_count: {heads} of {hidden} channels")
    head_dim = keys.get(f"{arch}.attention.key_length", int, hidden // heads)
    if (value := keys.get(f"{arch}.attention.value_length", int, head_dim)) != head_dim:
        raise GgufError(f"{arch}.attention.value_length: {value} is not that of keys, {head_dim}")
    rotated = keys.get(f"{arch}.rope.dimension_count", int, head_dim)
    if rotated != head_dim and family.gguf_pairs:
        raise GgufError(
            f"{arch}.rope.dimension_count: {rotated} is not the heads' size, {head_dim}"
        )
    return {
        "architectures": [family.architecture],
        "model_type": arch,
        "vocab_size": embedding.shape[0],
        "hidden_size": hidden,
        "intermediate_size": keys.get(f"{arch}.feed_forward_length", int),
        "num_hidden_layers": keys.get(f"{arch}.block_count", int),
        "num_attention_heads": heads,
        "num_key_value_heads": keys.get(f"{arch}.attention.head_count_kv", int, heads),
        "head_dim": head_dim,
        "rms_norm_eps": keys.get(f"{arch}.attention.layer_norm_rms_epsilon", float),
        "max_position_embeddings": keys.get(f"{arch}.context_length", int),
        **_given(keys, arch, _NUMBERS, int),
        "sliding_window": window or None,
        **_window_layers(keys, f"{arch}.attention.sliding_window_pattern"),
        "rope_parameters": {
            # Its product with the heads' size is cut off.
            "partial_rotary_factor": min((rotated + 0.5) / head_dim, 1.0),
            **_rope(keys, arch, [name for name in ROPE_FACTORS if name in header.tensors]),
        },
        **_given(keys, arch, _FACTORS, float),
        **_in_no_key(keys, arch, head_dim, hidden // heads),
        "attention_bias": "blk.0.attn_output.bias" in header.tensors,
        "mlp_bias": "blk.0.ffn_down.bias" in header.tensors,
        "tie_word_embeddings": "output.weight" not in header.tensors,
        "dtype": _dtype(header),
        "bos_token_id": keys.get("tokenizer.ggml.bos_token_id", int, None),
        "pad_token_id": keys.get("tokenizer.ggml.padding_token_id", int, None),
        "eos_token_id": end_tokens(keys),
    }


def _window_layers(keys: Keys, name: str) -> dict[str, Any]:
    """The layers with windows: in Ollama's files a flag for each layer, in others the distance
    between those without."""
    if not keys.has_list(name):
        pattern = keys.get(name, int, None)
        return {} if pattern is None else {"sliding_window_pattern": pattern}
    names = "full_attention", "sliding_attention"
    return {"layer_types": [names[bool(each)] for each in keys.get(name, list)]}


def _in_no_key(keys: Keys, arch: str, head_dim: int, width: int) -> dict[str, Any]:
    """Facts that llama.cpp knows of an architecture."""
    if arch == "qwen3moe":
        return {"norm_topk_prob": True}
    if arch != "gemma3":
        return {}
    is_27b = keys.get(f"{arch}.block_count", int) == _GEMMA3_27B
    return {"query_pre_attn_scalar": width if is_27b else head_dim}


def _given(keys: Keys, arch: str, names: Mapping[str, str], kind: type) -> dict[str, Any]:
    """The fields that the file has keys for, which `names` gives by key."""
    found = [(field, keys.get(f"{arch}.{key}", kind, None)) for key, field in names.items()]
    return {field: value for field, value in found if value is not None}


def end_tokens(keys: Keys) -> list[int]:
    """The ids of all tokens that end an answer, the file's own first."""
    names = ("eos_token_id", "eot_token_id", "eom_token_id")
    given = [keys.get(f"tokenizer.ggml.{name}", int, None) for name in names]
    tokens = keys.get("tokenizer.ggml.tokens", list)
    types = keys.get("tokenizer.ggml.token_type", list, [])
    known = [
        number
        for number, (token, kind) in enumerate(zip(tokens, types, strict=False))
        if kind in _ADDED and token in _ENDS
    ]
    return list(dict.fromkeys(token for token in (*given, *known) if token is not None))


def _rope(keys: Keys, arch: str, factors: list[str]) -> dict[str, Any]:
    """
    Args:
        factors: those of `ROPE_FACTORS` that the file has. The caller adds their values.
    """
    names = {"rope.global.freq_base": "rope_theta", "rope.freq_base": "rope_theta"}  # or Ollama's
    theta = _given(keys, arch, names, float)
    kind = keys.get(f"{arch}.rope.scaling.type", str, "none")
    if factors:
        found = "longrope" if len(factors) == 2 else "factors"
        kind = found if kind in ("none", "llama3", "longrope") else f"{kind} with {factors[0]}"
    if kind in ("none", "factors"):
        return {"rope_type": "default" if kind == "none" else kind, **theta}
    if kind not in ("linear", "yarn") and not (kind == "longrope" and factors):
        raise GgufError(f"{arch}.rope.scaling.type: {kind} is not served; linear and yarn are")
    if kind == "longrope":
        attention = keys.get(f"{arch}.rope.scaling.attn_factor", float, None)
        return {"rope_type": kind, **theta, "attention_factor": attention}
    factor = keys.get(f"{arch}.rope.scaling.factor", float)
    return {"rope_type": kind, **theta, "factor": factor}


def _dtype(header: Header) -> str:
    """The dtype to compute in, unless the user sets one."""
    types = {tensor.type for tensor in header.tensors.values() if len(tensor.shape) > 1}
    if types <= {GGMLQuantizationType.F32}:
        return "float32"
    return "float16" if types <= {GGMLQuantizationType.F16} else "bfloat16"
