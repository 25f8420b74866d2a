"""Writes GGUF files, as llama.cpp's converter does."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from gguf import GGMLQuantizationType as Type

_NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "mlp.gate": "ffn_gate_inp",
    "mlp.experts.gate_proj": "ffn_gate_exps",
    "mlp.experts.up_proj": "ffn_up_exps",
    "mlp.experts.down_proj": "ffn_down_exps",
    "self_attn.qkv_proj": "attn_qkv",
    "mlp.gate_up_proj": "ffn_up",
}
_GEMMA3_NAMES = {
    "post_attention_layernorm": "post_attention_norm",
    "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
}
# Of Granite.
_FACTORS = {
    "attention.scale": "attention_multiplier",
    "embedding_scale": "embedding_multiplier",
    "residual_scale": "residual_multiplier",
    "logit_scale": "logits_scaling",
}
_PAIRED = ("llama", "smollm3", "granite")  # whose halves of heads are interleaved
# 256 bytes, and some text.
SPM_TOKENS = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
SPM_TOKENS += ["▁", "a", "b", "▁a", "ab", "▁ab", "é", "<|im_end|>"]


def spm_keys(vocab_size: int) -> dict[str, Any]:
    """The keys of a small tokenizer in SentencePiece's manner."""
    tokens = [*SPM_TOKENS, *(f"word{number}" for number in range(vocab_size - len(SPM_TOKENS)))]
    types = [2, 3, 3, *[6] * 256, *[1] * (vocab_size - 259)]
    types[tokens.index("<|im_end|>")] = 3
    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.scores": [float(-number) for number in range(vocab_size)],
        "tokenizer.ggml.token_type": types,
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.unknown_token_id": 0,
    }


def write_gguf(
    path: Path,
    model: Any,
    matrices: Type = Type.F32,
    keys: Mapping[str, Any] | None = None,
    tensors: Mapping[str, np.ndarray] | None = None,
) -> None:
    """Writes `model` of transformers, whose weights become what the file says.

    Args:
        matrices: the type of all matrices; vectors are F32.
        keys: values that replace keys; None leaves a key out.
        tensors: more tensors, of F32.
    """
    config, arch = model.config, _arch(model.config)
    values = {**_keys(config), **(keys or {})}
    writer = gguf.GGUFWriter(path, values.pop("general.architecture", arch))
    names, norm_offset = _names(arch)
    for name, value in values.items():
        _add(writer, name, value)
    for name, parameter in _parameters(model):
        stem, _, suffix = name.rpartition(".")
        prefix = ""
        if layer := re.fullmatch(r"model\.layers\.(\d+)\.(.*)", stem):
            prefix, stem = f"blk.{layer[1]}.", layer[2]
        array = parameter.data.numpy()
        heads = {"self_attn.q_proj": config.num_attention_heads}
        heads["self_attn.k_proj"] = config.num_key_value_heads
        paired, offset = arch in _PAIRED and stem in heads, norm_offset if "norm" in stem else 0
        if paired:
            array = _pair(array, heads[stem])
        if offset:
            array = array + np.float32(offset)
        kind = matrices if array.ndim > 1 and stem != "mlp.gate" else Type.F32
        data = gguf.quantize(array, kind)
        values_in_file = gguf.dequantize(data, kind)
        if paired:
            values_in_file = _unpair(values_in_file, heads[stem])
        parameter.data.copy_(torch.from_numpy(values_in_file.copy()) - offset)
        writer.add_tensor(f"{prefix}{names[stem]}.{suffix}", data, raw_dtype=kind)
    for name, array in (tensors or {}).items():
        writer.add_tensor(name, array)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _parameters(model: Any) -> Iterator[tuple[str, Any]]:
    """The parameters by name. Those of gates and ups of experts are parts of one."""
    for name, parameter in model.named_parameters():
        if name.endswith("experts.gate_up_proj"):
            for part, half in zip(("gate", "up"), parameter.data.chunk(2, dim=1), strict=True):
                yield f"{name.removesuffix('gate_up_proj')}{part}_proj.weight", half
        else:
            yield f"{name}.weight" if name.endswith("experts.down_proj") else name, parameter


def _arch(config: Any) -> str:
    return str(config.model_type).removesuffix("_text").replace("_", "")


def _names(arch: str) -> tuple[dict[str, str], int]:
    """The names of tensors in files, and what is added to the weights of norms there."""
    return ({**_NAMES, **_GEMMA3_NAMES}, 1) if arch == "gemma3" else (_NAMES, 0)


def _keys(config: Any) -> dict[str, Any]:
    """The keys of a file of a model with this configuration."""
    arch, rope = _arch(config), config.rope_parameters
    rope = rope.get("full_attention", rope)
    return {
        f"{arch}.context_length": config.max_position_embeddings,
        f"{arch}.embedding_length": config.hidden_size,
        f"{arch}.block_count": config.num_hidden_layers,
        f"{arch}.feed_forward_length": config.intermediate_size,
        f"{arch}.attention.head_count": config.num_attention_heads,
        f"{arch}.attention.head_count_kv": config.num_key_value_heads,
        f"{arch}.attention.key_length": config.head_dim,
        f"{arch}.attention.value_length": config.head_dim,
        f"{arch}.rope.dimension_count": int(config.head_dim * rope.get("partial_rotary_factor", 1)),
        f"{arch}.attention.layer_norm_rms_epsilon": float(config.rms_norm_eps),
        f"{arch}.rope.freq_base": float(rope["rope_theta"]),
        **{
            f"{arch}.{key}": float(getattr(config, field))
            for key, field in _FACTORS.items()
            if hasattr(config, field)
        },
        f"{arch}.attention.sliding_window": getattr(config, "sliding_window", None),
        f"{arch}.expert_count": getattr(config, "num_experts", None),
        f"{arch}.expert_used_count": getattr(config, "num_experts_per_tok", None),
        f"{arch}.expert_feed_forward_length": getattr(config, "moe_intermediate_size", None),
        **spm_keys(config.vocab_size),
    }


def read_gguf(path: Path, model: Any) -> None:
    """Gives the weights of a file to `model` of transformers."""
    weights = dict(model.named_parameters())
    config = model.config
    own_names, norm_offset = _names(_arch(config))
    # Not the fused ones, nor those of other families.
    names = {short: name for name, short in reversed(own_names.items())}
    heads = {"attn_q": config.num_attention_heads, "attn_k": config.num_key_value_heads}
    for tensor in gguf.GGUFReader(path).tensors:
        stem, _, suffix = tensor.name.rpartition(".")
        prefix = ""
        if layer := re.fullmatch(r"blk\.(\d+)\.(.*)", stem):
            prefix, stem = f"model.layers.{layer[1]}.", layer[2]
        values = gguf.dequantize(tensor.data, tensor.tensor_type)
        if config.model_type in _PAIRED and stem in heads:
            values = _unpair(values, heads[stem])
        numbers = torch.from_numpy(values.copy()) - (norm_offset if "norm" in stem else 0)
        weights.pop(f"{prefix}{names[stem]}.{suffix}").data = numbers
    assert not weights


def split_gguf(
    path: Path,
    groups: Sequence[slice],
    changes: Mapping[int, Mapping[str, int | None]] | None = None,
) -> list[Path]:
    """Splits a file as llama.cpp's gguf-split does -> the parts, MODEL-00001-of-0000N.gguf and so
    on, beside the file.

    Args:
        groups: the tensors of each part.
        changes: by part, from 0: values of its `split.` keys; None leaves a key out.
    """
    whole = gguf.GGUFReader(path)
    kinds = {"no": "uint16", "count": "uint16", "tensors.count": "int32"}
    parts = []
    for number, group in enumerate(groups):
        part = path.with_name(f"{path.stem}-{number + 1:05}-of-{len(groups):05}.gguf")
        writer = gguf.GGUFWriter(part, "")
        writer.kv_data[0].clear()
        for name, field in whole.fields.items() if number == 0 else ():
            if not name.startswith("GGUF."):
                kind, *of = field.types
                sub_type = of[-1] if of else None
                writer.add_key_value(name, field.contents(), kind, sub_type=sub_type)
        values: dict[str, int | None] = {"no": number, "count": len(groups)}
        values["tensors.count"] = len(whole.tensors)
        for name, value in {**values, **(changes or {}).get(number, {})}.items():
            if value is not None:
                getattr(writer, f"add_{kinds[name]}")(f"split.{name}", value)
        for tensor in whole.tensors[group]:
            writer.add_tensor(tensor.name, tensor.data, raw_dtype=tensor.tensor_type)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        parts.append(part)
    return parts


def _add(writer: gguf.GGUFWriter, name: str, value: Any) -> None:
    if isinstance(value, bool):
        writer.add_bool(name, value)
    elif isinstance(value, int):
        writer.add_uint32(name, value)
    elif isinstance(value, float):
        writer.add_float32(name, value)
    elif isinstance(value, str):
        writer.add_string(name, value)
    elif value is not None:
        writer.add_array(name, value)


def _pair(array: np.ndarray, heads: int) -> np.ndarray:
    """From llama.cpp's `LlamaModel.permute`."""
    halves = array.reshape(heads, 2, -1, *array.shape[1:])
    return np.ascontiguousarray(halves.swapaxes(1, 2).reshape(array.shape))


def _unpair(array: np.ndarray, heads: int) -> np.ndarray:
    pairs = array.reshape(heads, -1, 2, *array.shape[1:])
    return pairs.swapaxes(1, 2).reshape(array.shape)
