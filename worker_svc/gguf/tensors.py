"""Names the tensors of a GGUF file as config.json's architecture does."""

from __future__ import annotations

import re
from collections.abc import Mapping
from math import prod
from pathlib import Path
from typing import Any

from gguf import GGML_QUANT_SIZES

from worker_svc.gguf.configuration import ROPE_FACTORS
from worker_svc.gguf.header import GgufError, Header
from worker_svc.models.families import Family

_MODEL = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
}
_LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "ffn_gate_inp": "mlp.gate",
    "ffn_gate_exps": "mlp.experts.{}.gate_proj",
    "ffn_up_exps": "mlp.experts.{}.up_proj",
    "ffn_down_exps": "mlp.experts.{}.down_proj",
}


def weight_index(
    header: Header, family: Family, config: dict[str, Any], links: Mapping[str, Path]
) -> dict[str, Any]:
    """Where each weight is: its type, its shape, the link to its file, and its first byte.
    `head_dim` is set where the file interleaves the halves of each head's rows, `minus` where it
    adds to weights of norms.

    Raises:
        GgufError: the file has a tensor that the family does not have.
    """
    names = {file: link for link, file in links.items()}
    weights = {}
    for name, tensor in header.tensors.items():
        if name in ROPE_FACTORS:
            continue
        weight = _weight(name, {**_LAYER, **family.gguf_names})
        count, shape = 1, list(tensor.shape)
        if "{}" in weight:  # the matrices of all experts
            count, *shape = shape
            if len(shape) != 2 or count != config.get("num_experts"):
                raise GgufError(f"{name}: shape {list(tensor.shape)} is not that of all experts")
        block, block_bytes = GGML_QUANT_SIZES[tensor.type]
        for expert in range(count):
            weights[weight.format(expert)] = {
                "type": tensor.type.name,
                "shape": shape,
                "file": names[tensor.file],
                "start": tensor.start + expert * prod(shape) // block * block_bytes,
            }
    for name, place in weights.items():
        if family.gguf_pairs and re.search(r"\.[qk]_proj\.", name):
            place["head_dim"] = config["head_dim"]
        if family.gguf_norm_offset and name.endswith("norm.weight"):
            place["minus"] = family.gguf_norm_offset
    return weights


def _weight(name: str, of_layers: Mapping[str, str]) -> str:
    stem, _, suffix = name.rpartition(".")
    layer = re.fullmatch(r"blk\.(\d+)\.(\w+)", stem)
    if layer and layer[2] in of_layers:
        return f"model.layers.{layer[1]}.{of_layers[layer[2]]}.{suffix}"
    if stem in _MODEL:
        return f"{_MODEL[stem]}.{suffix}"
    raise GgufError(f"{name}: the tensor belongs to no part of the model that is served")
