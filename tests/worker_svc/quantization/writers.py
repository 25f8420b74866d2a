"""Writes small checkpoints in the formats that others publish.

The libraries themselves want a GPU, or other versions than this project's of what they depend on.
The tensors were found equal, bit for bit, to those of compressed-tensors 0.20.0 (`compress`),
AutoGPTQ 0.7.1 (`QuantLinear.pack`) and AutoAWQ 0.2.9 (`WQLinear_GEMM.from_linear`), given the same
scales and zeros; `dequantized` to what `decompress` (which rounds it to bfloat16), `QuantLinear` of
the identity, `dequantize_gemm` and, for blocks, transformers 5.23 return.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from transformers import Qwen3ForCausalLM

from tests.worker_svc.harness import save_model

FP8 = torch.float8_e4m3fn


@dataclass(frozen=True)
class Written:
    """The tensors of a layer, by the last parts of their names, and the matrix they stand for."""

    tensors: dict[str, torch.Tensor]
    dequantized: torch.Tensor


@dataclass(frozen=True)
class Format:
    config: dict[str, Any]  # quantization_config
    write: Callable[[torch.Tensor], Written]  # of a matrix [out, in] float32


def spread(per_group: torch.Tensor, size: int, columns: int) -> torch.Tensor:
    """[out, groups] -> [out, columns]; the last group may be smaller."""
    return per_group.repeat_interleave(size, dim=1)[:, :columns]


def affine(
    weight: torch.Tensor, bits: int, size: int, symmetric: bool, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Unsigned codes [out, in], scales [out, groups] of `dtype` and zeros [out, groups] int32."""
    columns = weight.shape[1]
    x = torch.nn.functional.pad(weight, (0, -columns % size)).unflatten(1, (-1, size))
    levels = 2**bits - 1
    low, high = x.amin(2).clamp(max=0), x.amax(2).clamp(min=0)
    if symmetric:
        scales = (2 * torch.maximum(-low, high) / levels).to(dtype)
        zeros = torch.full(scales.shape, 2 ** (bits - 1), dtype=torch.int32)
    else:
        scales = ((high - low) / levels).to(dtype)
        zeros = (-low / scales.float()).round().clamp(0, levels).int()
    codes = (weight / spread(scales, size, columns).float()).round().int()
    codes += spread(zeros, size, columns)
    return codes.clamp(0, levels), scales, zeros


def dequantize(
    codes: torch.Tensor, scales: torch.Tensor, zeros: torch.Tensor, size: int
) -> torch.Tensor:
    columns = codes.shape[1]
    return (codes - spread(zeros, size, columns)).float() * spread(scales, size, columns).float()


def pack_words(values: torch.Tensor, bits: int) -> torch.Tensor:
    """Unsigned [..., n] -> int32 [..., n · bits / 32], the first lowest; n is padded with zeros."""
    per_word = 32 // bits
    values = torch.nn.functional.pad(values.long(), (0, -values.shape[-1] % per_word))
    values = values.unflatten(-1, (-1, per_word)) << torch.arange(0, 32, bits)
    words = values.sum(-1)
    return torch.where(words < 2**31, words, words - 2**32).int()


def compressed_tensors(
    kind: str,
    bits: int = 8,
    strategy: str = "channel",
    *,
    group_size: int | None = None,
    symmetric: bool = True,
    activations: dict[str, Any] | None = None,
) -> Format:
    number = "float" if kind == "float-quantized" else "int"
    weights = {
        "num_bits": bits,
        "type": number,
        "strategy": strategy,
        "group_size": group_size,
        "symmetric": symmetric,
        "dynamic": False,
        "observer": "minmax",
    }
    if strategy == "block":
        weights["block_structure"] = [32, 48]
    scheme = {"targets": ["Linear"], "weights": weights, "input_activations": activations}
    config = {
        "quant_method": "compressed-tensors",
        "format": kind,
        "quantization_status": "compressed",
        "config_groups": {"group_0": scheme | {"output_activations": None}},
        "ignore": ["lm_head"],
        "kv_cache_scheme": None,
        "global_compression_ratio": None,
    }

    def write_float(weight: torch.Tensor) -> Written:
        if strategy == "block":
            codes, scales = block_codes(weight, 32, 48)
            whole = per_block(scales, weight.shape, 32, 48)
        else:
            dims = {"dim": 1, "keepdim": True} if strategy == "channel" else {}
            scales = (weight.abs().amax(**dims) / 448).view(-1, *([1] if dims else []))
            codes, whole = (weight / scales).to(FP8), scales
        return Written({"weight": codes, "weight_scale": scales}, codes.float() * whole)

    def write(weight: torch.Tensor) -> Written:
        size = group_size or weight.shape[1]
        codes, scales, zeros = affine(weight, bits, size, symmetric, torch.bfloat16)
        tensors = {"weight_scale": scales}
        offset = 2 ** (bits - 1)
        if kind == "pack-quantized":
            tensors["weight_packed"] = pack_words(codes, bits)
            tensors["weight_shape"] = torch.tensor(weight.shape)
            if not symmetric:
                tensors["weight_zero_point"] = pack_words(zeros.T, bits).T.contiguous()
        else:
            tensors["weight"] = (codes - offset).to(torch.int8)
            if not symmetric:
                tensors["weight_zero_point"] = (zeros - offset).to(torch.int8)
        return Written(tensors, dequantize(codes, scales, zeros, size))

    return Format(config, write_float if number == "float" else write)


def gptq(bits: int, group_size: int, *, symmetric: bool = True, version: str = "gptq") -> Format:
    config = {
        "quant_method": "gptq",
        "bits": bits,
        "group_size": group_size,
        "desc_act": False,
        "sym": symmetric,
        "lm_head": False,
        "true_sequential": True,
        "checkpoint_format": version,
    }

    def write(weight: torch.Tensor) -> Written:
        columns = weight.shape[1]
        size = group_size if group_size > 0 else columns
        codes, scales, zeros = affine(weight, bits, size, symmetric, torch.float16)
        # The first version has no way to store a zero of 0.
        zeros = zeros.clamp(min=1)
        stored = zeros.T - (1 if version == "gptq" else 0)
        tensors = {
            "qweight": pack_words(codes, bits).T.contiguous(),
            "qzeros": pack_words(stored, bits),
            "scales": scales.T.contiguous(),
            "g_idx": (torch.arange(columns) // size).int(),
        }
        return Written(tensors, dequantize(codes, scales, zeros, size))

    return Format(config, write)


def awq(group_size: int, *, zero_point: bool = True) -> Format:
    config = {
        "quant_method": "awq",
        "bits": 4,
        "group_size": group_size,
        "zero_point": zero_point,
        "version": "gemm",
        "modules_to_not_convert": None,
    }
    order = [0, 2, 4, 6, 1, 3, 5, 7]

    def in_order(values: torch.Tensor) -> torch.Tensor:
        return values.unflatten(-1, (-1, 8))[..., order].flatten(-2)

    def write(weight: torch.Tensor) -> Written:
        size = group_size if group_size > 0 else weight.shape[1]
        codes, scales, zeros = affine(weight, 4, size, not zero_point, torch.float16)
        tensors = {
            "qweight": pack_words(in_order(codes.T), 4),
            "scales": scales.T.contiguous(),
        }
        if zero_point:
            tensors["qzeros"] = pack_words(in_order(zeros.T), 4)
        return Written(tensors, dequantize(codes, scales, zeros, size))

    return Format(config, write)


def block_codes(weight: torch.Tensor, height: int, width: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes [out, in] and scales [blocks down, blocks across]; those at the ends may be smaller."""
    out, columns = weight.shape
    padded = torch.nn.functional.pad(weight, (0, -columns % width, 0, -out % height))
    blocks = padded.unflatten(1, (-1, width)).unflatten(0, (-1, height))
    scales = blocks.abs().amax(dim=(1, 3)) / 448
    return (weight / per_block(scales, weight.shape, height, width)).to(FP8), scales


def per_block(scales: torch.Tensor, shape: torch.Size, height: int, width: int) -> torch.Tensor:
    whole = scales.repeat_interleave(height, dim=0).repeat_interleave(width, dim=1)
    return whole[: shape[0], : shape[1]]


def block_fp8(height: int, width: int) -> Format:
    config = {
        "quant_method": "fp8",
        "fmt": "e4m3",
        "activation_scheme": "dynamic",
        "weight_block_size": [height, width],
    }

    def write(weight: torch.Tensor) -> Written:
        codes, scales = block_codes(weight, height, width)
        whole = per_block(scales, weight.shape, height, width)
        return Written({"weight": codes, "weight_scale_inv": scales}, codes.float() * whole)

    return Format(config, write)


TOKEN = {"num_bits": 8, "type": "int", "strategy": "token", "dynamic": True, "symmetric": True}
FLOAT_TOKEN = TOKEN | {"type": "float"}
# Of matrices whose inputs are multiples of 32 and outputs of 8.
FORMATS: dict[str, Format] = {
    "W4A16": compressed_tensors("pack-quantized", 4, "group", group_size=32),
    "W4A16 by channel": compressed_tensors("pack-quantized", 4),
    "W4A16 asymmetric": compressed_tensors(
        "pack-quantized", 4, "group", group_size=32, symmetric=False
    ),
    "W8A16": compressed_tensors("pack-quantized", 8, "group", group_size=64),
    "W8A16 asymmetric": compressed_tensors("pack-quantized", 8, symmetric=False),
    "W8A8": compressed_tensors("int-quantized", activations=TOKEN),
    "W8A8 asymmetric": compressed_tensors("int-quantized", symmetric=False, activations=TOKEN),
    "FP8": compressed_tensors("float-quantized", activations=FLOAT_TOKEN),
    "FP8 by tensor": compressed_tensors("float-quantized", strategy="tensor"),
    "FP8 by block": compressed_tensors("float-quantized", strategy="block"),
    "GPTQ 4": gptq(4, 32),
    "GPTQ 4 asymmetric": gptq(4, 32, symmetric=False),
    "GPTQ 4 v2": gptq(4, 64, symmetric=False, version="gptq_v2"),
    "GPTQ 4 by channel": gptq(4, -1),
    "GPTQ 4 with a rest": gptq(4, 128, symmetric=False),
    "GPTQ 8": gptq(8, 32),
    "GPTQ 8 asymmetric": gptq(8, -1, symmetric=False),
    "AWQ": awq(32),
    "AWQ by channel": awq(-1),
    "AWQ symmetric": awq(64, zero_point=False),
    "Qwen FP8": block_fp8(32, 64),
}

SHAPE: dict[str, Any] = {"intermediate_size": 128}  # with TINY's others, what `FORMATS` can write
PROJECTIONS = "q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"


def save_quantized(
    path: Path, format: Format, layers: tuple[str, ...] = PROJECTIONS, **overrides: Any
) -> Qwen3ForCausalLM:
    """Writes a small Qwen3 with `layers` quantized -> the same with the matrices they stand for."""
    model = save_model(path, **SHAPE | overrides)
    for name, dequantized in quantize_checkpoint(path, format, layers).items():
        model.get_submodule(name).weight.data = dequantized
    return model


def quantize_checkpoint(
    path: Path, format: Format, layers: tuple[str, ...] = PROJECTIONS
) -> dict[str, torch.Tensor]:
    """Quantizes `layers` of the checkpoint at `path` -> the matrices they stand for, by name."""
    tensors, dequantized = load_file(path / "model.safetensors"), {}
    for name in [key.removesuffix(".weight") for key in tensors]:
        if name.endswith(layers):
            written = format.write(tensors.pop(f"{name}.weight").float())
            tensors |= {f"{name}.{part}": each for part, each in written.tensors.items()}
            dequantized[name] = written.dequantized
    save_file(tensors, path / "model.safetensors")
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(config | {"quantization_config": format.config}))
    return dequantized
