"""Families of models, and shapes in which each of their peculiarities shows."""

from __future__ import annotations

from typing import Any

from transformers import (
    Gemma3ForCausalLM,
    Gemma3ForConditionalGeneration,
    GraniteForCausalLM,
    LlamaForCausalLM,
    MinistralForCausalLM,
    Mistral3ForConditionalGeneration,
    MistralForCausalLM,
    Olmo2ForCausalLM,
    Olmo3ForCausalLM,
    Phi3ForCausalLM,
    Qwen2ForCausalLM,
    Qwen3ForCausalLM,
    Qwen3MoeForCausalLM,
    SmolLM3ForCausalLM,
)

FAMILIES = (
    Qwen3ForCausalLM,
    Qwen3MoeForCausalLM,
    Qwen2ForCausalLM,
    LlamaForCausalLM,
    MistralForCausalLM,
    SmolLM3ForCausalLM,
    Phi3ForCausalLM,
    GraniteForCausalLM,
    Gemma3ForCausalLM,
    Olmo2ForCausalLM,
    Olmo3ForCausalLM,
)
GRANITE = {
    "attention_multiplier": 0.1,
    "embedding_multiplier": 12.0,
    "residual_multiplier": 0.22,
    "logits_scaling": 3.0,
    "attention_bias": True,
    "mlp_bias": True,
}
# The factors for long contexts hold from the third token on, in transformers too.
LONGROPE = {
    "rope_type": "longrope",
    "short_factor": [1.0, 1.1, 1.2, 1.5, 2.0, 3.0],
    "long_factor": [1.0, 1.5, 2.0, 4.0, 8.0, 16.0],
    "partial_rotary_factor": 0.75,
    "rope_theta": 1e4,
}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
    "rope_theta": 5e2,
}
# Shorter than contexts, and of another rope.
GEMMA3 = {
    "sliding_window": 24,
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
    "query_pre_attn_scalar": 10,
    "rope_parameters": {
        "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
        "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e4},
    },
}
YARN = {
    "rope_type": "yarn",
    "factor": 4.0,
    "original_max_position_embeddings": 64,
    "rope_theta": 1e4,
}
EXPERTS = {
    "num_experts": 7,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 24,
    "norm_topk_prob": True,
}
SHAPES: dict[str, dict[str, Any]] = {
    "tied, GQA 2": {},
    "untied, GQA 1": {"tie_word_embeddings": False, "num_key_value_heads": 4},
    "GQA 8, head_dim 24": {"num_attention_heads": 8, "num_key_value_heads": 1, "head_dim": 24},
    "bias, head_dim 40": {"attention_bias": True, "head_dim": 40},
    "yarn": {"rope_parameters": YARN, "max_position_embeddings": 256},
    "linear rope, sharded files": {
        "rope_parameters": {"rope_type": "linear", "factor": 2.5, "rope_theta": 1e5},
        "max_shard_size": "60KB",
    },
    "wide, eps, theta": {
        "vocab_size": 1000,
        "hidden_size": 96,
        "intermediate_size": 40,
        "rms_norm_eps": 1e-3,
        "rope_parameters": {"rope_type": "default", "rope_theta": 5e3},
    },
    "Qwen3, experts": {"family": Qwen3MoeForCausalLM, **EXPERTS},
    "Qwen3, experts in some layers, not normalized": {
        "family": Qwen3MoeForCausalLM,
        "num_hidden_layers": 5,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 40,
        "decoder_sparse_step": 2,
        "mlp_only_layers": [1],
    },
    "Qwen3, all of few experts": {
        "family": Qwen3MoeForCausalLM,
        **EXPERTS,
        "num_experts_per_tok": 7,
        "tie_word_embeddings": False,
    },
    "Qwen2, tied": {"family": Qwen2ForCausalLM},
    "Qwen2, untied, sharded files, GQA 7": {
        "family": Qwen2ForCausalLM,
        "num_attention_heads": 7,
        "num_key_value_heads": 1,
        "tie_word_embeddings": False,
        "max_shard_size": "60KB",
    },
    "Llama 2, untied": {
        "family": LlamaForCausalLM,
        "num_key_value_heads": 4,
        "tie_word_embeddings": False,
    },
    "Llama 3, llama3 rope": {"family": LlamaForCausalLM, "rope_parameters": LLAMA3},
    "Llama, all biases, odd sizes": {
        "family": LlamaForCausalLM,
        "vocab_size": 499,
        "hidden_size": 72,
        "intermediate_size": 90,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
        "head_dim": 8,
        "attention_bias": True,
        "mlp_bias": True,
    },
    "Mistral": {"family": MistralForCausalLM, "tie_word_embeddings": False},
    "Mistral, window": {"family": MistralForCausalLM, "sliding_window": 17},
    "Ministral": {
        "family": MinistralForCausalLM,
        "layer_types": ["full_attention", "sliding_attention", "sliding_attention"],
        "sliding_window": 17,
    },
    "OLMo 2": {"family": Olmo2ForCausalLM, "attention_bias": True},
    "Olmo 3": {
        "family": Olmo3ForCausalLM,
        "tie_word_embeddings": False,
        "num_hidden_layers": 4,
        "sliding_window": 17,
        "rope_parameters": {
            "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
            "full_attention": YARN,
        },
    },
    "Qwen3, last layers with a window": {
        "use_sliding_window": True,
        "sliding_window": 33,
        "max_window_layers": 1,
    },
    "Gemma 3": {"family": Gemma3ForCausalLM, **GEMMA3},
    "Gemma 3, head_dim 256, biases": {
        "family": Gemma3ForCausalLM,
        "head_dim": 256,
        "num_key_value_heads": 1,
        "num_hidden_layers": 7,
        "attention_bias": True,
        "sliding_window": 1,
    },
    "SmolLM3": {"family": SmolLM3ForCausalLM, "num_hidden_layers": 5},
    "SmolLM3, layers as listed": {
        "family": SmolLM3ForCausalLM,
        "no_rope_layers": [0, 1, 0],
        "num_hidden_layers": 3,
        "attention_bias": True,
    },
    "Granite": {"family": GraniteForCausalLM, **GRANITE},
    "Phi-3, MHA": {"family": Phi3ForCausalLM, "num_key_value_heads": 4},
    "Phi-4-mini, longrope": {
        "family": Phi3ForCausalLM,
        "rope_parameters": LONGROPE,
        "original_max_position_embeddings": 2,
        "max_shard_size": "60KB",
    },
    "Phi-4-mini, short": {
        "family": Phi3ForCausalLM,
        "rope_parameters": LONGROPE
        | {"factor": 4.0, "partial_rotary_factor": 0.5}
        | {"short_factor": [1.0, 1.2, 1.5, 3.0], "long_factor": [1.0] * 4},
        "original_max_position_embeddings": 512,
    },
}
# Models that take images, and their text parts.
MULTIMODAL: dict[str, tuple[Any, dict[str, Any]]] = {
    "Gemma 3": (Gemma3ForConditionalGeneration, {"model_type": "gemma3_text", **GEMMA3}),
    "Mistral Small 3.1": (Mistral3ForConditionalGeneration, {"model_type": "mistral"}),
    "Ministral 3": (Mistral3ForConditionalGeneration, {"model_type": "ministral3"}),
}
