"""The model families that are served, by their name in `architectures` of config.json.

This module does not import torch, because the launcher uses it too.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from shared.model_directory import language_model, read_text
from worker_svc.errors import ModelError


@dataclass(frozen=True)
class Family:
    """The facts about a family that are not in its layers.

    Args:
        architecture: the family's name in config.json.
        models: the models that have it, for people.
        module: the name of its module in this folder, whose `build` makes a model of `Parts`.
        defaults: transformers' defaults for fields that config.json may leave out.
        gguf: the family's `general.architecture` in GGUF files, if they are read. Of several
            families with one name, the first one reads the files.
        gguf_pairs: whether GGUF files interleave the two halves of each head's rows of q and k.
        gguf_names: names of its tensors, where GGUF files call other tensors of other families so.
        gguf_norm_offset: what GGUF files add to the weights of norms.
        windows: which layers have the `sliding_window` of config.json: "all" of them, those that
            are "listed" in `layer_types`, or if "optional" these, but only if `use_sliding_window`.
        texts: of a model that also takes images, defaults by the type of its language model.
        tested: which published weights tests load.
    """

    architecture: str
    models: str
    module: str
    defaults: Mapping[str, Any]
    gguf: str = ""
    gguf_pairs: bool = False
    gguf_names: Mapping[str, str] = field(default_factory=dict)
    gguf_norm_offset: int = 0
    windows: Literal["optional", "all", "listed"] = "optional"
    texts: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    tested: str = ""


_QWEN_DEFAULTS = {
    "vocab_size": 151936,
    "hidden_size": 4096,
    "intermediate_size": 22016,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 32,
    "max_position_embeddings": 32768,
    "sliding_window": 4096,
}
_QWEN_MOE_DEFAULTS = {
    **_QWEN_DEFAULTS,
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "num_hidden_layers": 24,
    "num_key_value_heads": 4,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 768,
}
_LLAMA_DEFAULTS = {
    "vocab_size": 32000,
    "hidden_size": 4096,
    "intermediate_size": 11008,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "max_position_embeddings": 2048,
}
_MISTRAL_DEFAULTS = {
    **_LLAMA_DEFAULTS,
    "intermediate_size": 14336,
    "num_key_value_heads": 8,
    "max_position_embeddings": 131072,
    "sliding_window": 4096,
}
_OLMO_DEFAULTS = {
    **_LLAMA_DEFAULTS,
    "vocab_size": 50304,
    "rms_norm_eps": 1e-5,
}
_MINISTRAL3_DEFAULTS = {
    **_MISTRAL_DEFAULTS,
    "vocab_size": 131072,
    "num_hidden_layers": 34,
    "head_dim": 128,
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 262144,
    "sliding_window": None,
    "rope_parameters": {
        "rope_type": "yarn",
        "rope_theta": 1e6,
        "factor": 16.0,
        "original_max_position_embeddings": 16384,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
        "llama_4_scaling_beta": 0.1,
    },
}
_GEMMA3_DEFAULTS = {
    "vocab_size": 262208,
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "num_hidden_layers": 26,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "hidden_activation": "gelu_pytorch_tanh",
    "max_position_embeddings": 131072,
    "rope_theta": 1e6,
    "rope_local_base_freq": 1e4,
    "query_pre_attn_scalar": 256,
    "sliding_window": 4096,
    "sliding_window_pattern": 6,
    "tie_word_embeddings": True,
}
_SERVED = (
    Family(
        architecture="Qwen3ForCausalLM",
        models="Qwen3, dense: 0.6B to 32B",
        module="qwen3",
        defaults={**_QWEN_DEFAULTS, "head_dim": 128},
        gguf="qwen3",
    ),
    Family(
        architecture="Qwen3MoeForCausalLM",
        models="Qwen3, mixtures of experts (Coder, Thinking): 30B-A3B to 480B-A35B",
        module="qwen3",
        defaults=_QWEN_MOE_DEFAULTS,
        gguf="qwen3moe",
    ),
    Family(
        architecture="Qwen2ForCausalLM",
        models="Qwen2, Qwen2.5 and versions of them (Coder, Math, R1-Distill): 0.5B to 72B",
        module="qwen2",
        defaults=_QWEN_DEFAULTS,
        gguf="qwen2",
    ),
    Family(
        architecture="LlamaForCausalLM",
        models="Llama 2, 3, 3.1, 3.2 and 3.3 (text), SmolLM2, TinyLlama: 135M to 70B",
        module="llama",
        defaults=_LLAMA_DEFAULTS,
        gguf="llama",
        gguf_pairs=True,
        tested="SmolLM2-135M-Instruct",
    ),
    Family(
        architecture="MistralForCausalLM",
        models="Mistral 7B, Nemo and Small 3: 7B to 24B",
        module="llama",
        defaults=_MISTRAL_DEFAULTS,
        gguf="llama",
        windows="all",
    ),
    Family(
        architecture="MinistralForCausalLM",
        models="Ministral 8B",
        module="llama",
        defaults=_MISTRAL_DEFAULTS,
        gguf="llama",
        windows="listed",
    ),
    Family(
        architecture="Mistral3ForConditionalGeneration",
        models="Mistral Small 3.1 and 3.2, Ministral 3 (text): 3B to 24B",
        module="llama",
        defaults={"tie_word_embeddings": True},
        gguf="llama",
        windows="all",
        texts={"mistral": _MISTRAL_DEFAULTS, "ministral3": _MINISTRAL3_DEFAULTS},
    ),
    Family(
        architecture="SmolLM3ForCausalLM",
        models="SmolLM3: 3B",
        module="llama",
        defaults={
            "vocab_size": 128256,
            "hidden_size": 2048,
            "intermediate_size": 11008,
            "num_hidden_layers": 36,
            "num_attention_heads": 16,
            "num_key_value_heads": 4,
            "max_position_embeddings": 32768,
            "rope_theta": 2e6,
            "no_rope_layer_interval": 4,
            "tie_word_embeddings": True,
        },
        gguf="smollm3",
        gguf_pairs=True,
    ),
    Family(
        architecture="GraniteForCausalLM",
        models="Granite 3, dense: 2B and 8B",
        module="llama",
        defaults={**_LLAMA_DEFAULTS, "attention_multiplier": 1.0},
        gguf="granite",
        gguf_pairs=True,
    ),
    Family(
        architecture="Phi3ForCausalLM",
        models="Phi-3 and 3.5 (mini, medium), Phi-4, Phi-4-mini: 3.8B to 14B",
        module="phi3",
        defaults={
            "vocab_size": 32064,
            "hidden_size": 3072,
            "intermediate_size": 8192,
            "num_hidden_layers": 32,
            "num_attention_heads": 32,
            "max_position_embeddings": 4096,
            "original_max_position_embeddings": 4096,
            "rms_norm_eps": 1e-5,
        },
        gguf="phi3",
        gguf_names={"attn_qkv": "self_attn.qkv_proj", "ffn_up": "mlp.gate_up_proj"},
        windows="all",
    ),
    Family(
        architecture="Olmo2ForCausalLM",
        models="OLMo 2: 1B to 32B",
        module="olmo2",
        defaults=_OLMO_DEFAULTS,
    ),
    Family(
        architecture="Olmo3ForCausalLM",
        models="Olmo 3: 7B and 32B",
        module="olmo2",
        defaults={
            **_OLMO_DEFAULTS,
            "rope_theta": 5e5,
            "rope_local_base_freq": 5e5,
            "sliding_window": 4096,
            "sliding_window_pattern": 4,
        },
        windows="listed",
    ),
    Family(
        architecture="Gemma3ForCausalLM",
        models="Gemma 3: 270M and 1B",
        module="gemma3",
        defaults=_GEMMA3_DEFAULTS,
        gguf="gemma3",
        gguf_names={
            "post_attention_norm": "post_attention_layernorm",
            "ffn_norm": "pre_feedforward_layernorm",
            "post_ffw_norm": "post_feedforward_layernorm",
        },
        gguf_norm_offset=1,
        windows="listed",
        tested="Gemma 3 270M",
    ),
    Family(
        architecture="Gemma3ForConditionalGeneration",
        models="Gemma 3 (text): 4B to 27B",
        module="gemma3",
        defaults=_GEMMA3_DEFAULTS,
        gguf="gemma3",
        windows="listed",
        texts={"gemma3_text": {}},
    ),
)
FAMILIES = {family.architecture: family for family in _SERVED}


def read_model_file(model_dir: Path) -> tuple[Family, dict[str, Any]]:
    """Reads config.json -> the model's family, and the file's fields with the family's defaults.

    Raises:
        ModelError: the file is missing or unreadable, or names no family that is served.
    """
    path = model_dir / "config.json"
    try:
        fields = json.loads(read_text(path))
    except (OSError, ValueError, RecursionError) as error:
        raise ModelError(f"model: cannot read {path}: {error}") from error
    if not isinstance(fields, dict):
        raise ModelError(f"model: {path}: not a JSON object")
    given = fields.get("architectures") or "none"
    names = [str(name) for name in (given if isinstance(given, list) else [given])]
    # A model for embeddings may be named without its head.
    name = re.sub("Model$", "ForCausalLM", names[0])
    if len(names) != 1 or name not in FAMILIES:
        found, served = ", ".join(names), ", ".join(FAMILIES)
        raise ModelError(f"architectures: {found} is not served; served are {served}")
    if fields.get("is_causal") is False:
        raise ModelError("is_causal: models whose tokens attend to later ones are not served")
    family, fields = FAMILIES[name], language_model(fields)
    defaults = family.defaults
    if family.texts:
        text = fields.get("text_config") or {}
        kind = text.get("model_type") or next(iter(family.texts))
        if kind not in family.texts:
            served = ", ".join(family.texts)
            raise ModelError(f"text_config: model_type {kind} is not served; served are {served}")
        defaults = {**family.texts[kind], **defaults}
    return family, {**defaults, **fields}
