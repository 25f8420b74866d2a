"""The configurations of public models, of which `tools.make_model` makes models."""

from __future__ import annotations

from typing import Any

# Keys that the public Qwen3 configurations have in common. Both transformers 4 and 5 find
# "rope_theta" here.
BASE_CONFIG: dict[str, Any] = {
    "architectures": ["Qwen3ForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "head_dim": 128,
    "hidden_act": "silu",
    "initializer_range": 0.02,
    "max_position_embeddings": 40960,
    "model_type": "qwen3",
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-06,
    "rope_scaling": None,
    "rope_theta": 1000000,
    "sliding_window": None,
    "tie_word_embeddings": True,
    "use_cache": True,
    "use_sliding_window": False,
    "vocab_size": 151936,
}


def _shape(hidden: int, layers: int, heads: int, intermediate: int, **rest: Any) -> dict[str, Any]:
    return {
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "max_window_layers": layers,
        "num_attention_heads": heads,
        "intermediate_size": intermediate,
        **rest,
    }


# Other families' keys that differ from `BASE_CONFIG`.
_QWEN2 = {"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2"}
_LARGE_QWEN2 = {"vocab_size": 152064, "tie_word_embeddings": False}
_QWEN3_MOE = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "num_key_value_heads": 4,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "moe_intermediate_size": 768,
    "norm_topk_prob": True,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "tie_word_embeddings": False,
}
_LLAMA3 = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 128256,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-05,
    "rope_theta": 500000.0,
    "rope_scaling": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    },
}
_MISTRAL = {
    "architectures": ["MistralForCausalLM"],
    "model_type": "mistral",
    "vocab_size": 32768,
    "max_position_embeddings": 32768,
    "rms_norm_eps": 1e-05,
    "tie_word_embeddings": False,
}
_SMOLLM3 = {
    "architectures": ["SmolLM3ForCausalLM"],
    "model_type": "smollm3",
    "num_key_value_heads": 4,
    "vocab_size": 128256,
    "max_position_embeddings": 65536,
    "rope_theta": 5000000.0,
}
_GRANITE = {
    "architectures": ["GraniteForCausalLM"],
    "model_type": "granite",
    "head_dim": 64,
    "vocab_size": 49159,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-05,
    "rope_theta": 10000000.0,
    "attention_multiplier": 0.015625,
    "embedding_multiplier": 12.0,
    "residual_multiplier": 0.22,
    "logits_scaling": 8.0,
}
_PHI3 = {
    "architectures": ["Phi3ForCausalLM"],
    "model_type": "phi3",
    "vocab_size": 200064,
    "max_position_embeddings": 131072,
    "original_max_position_embeddings": 4096,
    "rms_norm_eps": 1e-05,
    "rope_theta": 10000.0,
    "partial_rotary_factor": 0.75,
    "rope_scaling": {
        "type": "longrope",
        "short_factor": [1.0] * 48,
        "long_factor": [float(2 ** (number / 8)) for number in range(48)],
    },
}
_OLMO2 = {
    "architectures": ["Olmo2ForCausalLM"],
    "model_type": "olmo2",
    "num_key_value_heads": 32,
    "vocab_size": 100352,
    "max_position_embeddings": 4096,
    "rope_theta": 500000.0,
    "tie_word_embeddings": False,
}
_GEMMA3 = {
    "architectures": ["Gemma3ForCausalLM"],
    "model_type": "gemma3_text",
    "num_key_value_heads": 1,
    "head_dim": 256,
    "hidden_activation": "gelu_pytorch_tanh",
    "vocab_size": 262144,
    "max_position_embeddings": 32768,
    "rope_local_base_freq": 10000.0,
    "query_pre_attn_scalar": 256,
    "sliding_window": 512,
    "sliding_window_pattern": 6,
}
SHAPES: dict[str, dict[str, Any]] = {
    "qwen3-0.6b": _shape(1024, 28, 16, 3072),
    "qwen3-1.7b": _shape(2048, 28, 16, 6144),
    "qwen3-4b": _shape(2560, 36, 32, 9728),
    "qwen3-8b": _shape(4096, 36, 32, 12288, tie_word_embeddings=False),
    "qwen3-14b": _shape(5120, 40, 40, 17408, tie_word_embeddings=False),
    "qwen3-32b": _shape(5120, 64, 64, 25600, tie_word_embeddings=False),
    "qwen3-30b-a3b": _shape(2048, 48, 32, 6144, **_QWEN3_MOE),
    "qwen2.5-0.5b": _shape(896, 24, 14, 4864, num_key_value_heads=2, head_dim=64, **_QWEN2),
    "qwen2.5-7b": _shape(3584, 28, 28, 18944, num_key_value_heads=4, **_QWEN2, **_LARGE_QWEN2),
    "qwen2.5-72b": _shape(8192, 80, 64, 29568, **_QWEN2, **_LARGE_QWEN2),
    "llama-3.2-1b": _shape(2048, 16, 32, 8192, head_dim=64, **_LLAMA3),
    "llama-3.1-8b": _shape(4096, 32, 32, 14336, **_LLAMA3, tie_word_embeddings=False),
    "llama-3.1-70b": _shape(8192, 80, 64, 28672, **_LLAMA3, tie_word_embeddings=False),
    "mistral-7b": _shape(4096, 32, 32, 14336, **_MISTRAL),
    "smollm3-3b": _shape(2048, 36, 16, 11008, **_SMOLLM3),
    "granite-3.3-2b": _shape(2048, 40, 32, 8192, **_GRANITE),
    "phi-4-mini": _shape(3072, 32, 24, 8192, **_PHI3),
    "olmo2-7b": _shape(4096, 32, 32, 11008, **_OLMO2),
    "gemma3-270m": _shape(640, 18, 4, 2048, **_GEMMA3),
    "gemma3-1b": _shape(1152, 26, 4, 6912, **_GEMMA3),
    # Heads times head_dim differs from the hidden size, as in Qwen3-0.6B and most other shapes.
    "tiny": _shape(32, 2, 4, 64, num_key_value_heads=2, head_dim=16, max_position_embeddings=4096),
}
