"""Writes a model of any shape with random weights, for tests and benchmarks.

    python -m tools.make_model --shape qwen3-0.6b --out /tmp/qwen3-0.6b
    python -m tools.make_model --shape tiny --out /tmp/tiny --set num_hidden_layers=3
    python -m tools.make_model --shape qwen3-32b --out /tmp/qwen3-32b-int4 --quantization int4

The tokenizer is the demo model's. If the vocabulary is larger, the weights make ids that the
tokenizer does not know unlikely, so that even random weights write text.

Weights of 4 bits are also packed for this machine, as the first start of a worker packs them. The
first start then only reads them.
"""

import argparse
import hashlib
import json
import math
import shutil
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors.torch import save_file
from torch import Tensor

from shared.config import load_settings
from tools.model_shapes import BASE_CONFIG, SHAPES
from worker_svc.devices.choice import choose_platform
from worker_svc.errors import StartError
from worker_svc.kv_cache import choose_max_model_len
from worker_svc.rank_models.rank_model import RankModel
from worker_svc.ranks.distributed import Ranks
from worker_svc.settings import WorkerSettings

DEMO_MODEL = Path(__file__).parents[1] / "models" / "demo"
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json")
DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
DEFAULT_SHARD_BYTES = 2 << 30
_UNKNOWN_SCALE = 0.1  # scale of the logits of ids that the tokenizer does not know
_QUANTILES = 1 << 16  # values that a random weight can have
_DRAWN = 1 << 20  # numbers that are drawn at once, so that they stay in a core's cache
_MAX_GROUP = 128  # inputs that share a scale
_MIDDLE = 8  # the 4 bits that stand for zero
_CODES_STD = math.sqrt(2 * sum(i * i for i in range(_MIDDLE)) / 16)  # see `_pairs_of_codes`

Quantization = Literal["none", "int4"]


def model_config(shape: str, overrides: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """The config.json of `shape`, in which `overrides` replace any keys.

    Raises:
        ValueError: there is no such shape.
    """
    if shape not in SHAPES:
        raise ValueError(f"shape: {shape!r} is unknown; there are {', '.join(SHAPES)}")
    demo = _read_json(DEMO_MODEL / "config.json")
    config = BASE_CONFIG | SHAPES[shape]
    if shape == "tiny":
        config["vocab_size"] = demo["vocab_size"]
    config |= {key: demo[key] for key in ("eos_token_id", "pad_token_id")}
    return config | dict(overrides or {})


def tensor_shapes(config: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    """The shape of every weight, by its Hugging Face name, in the order of the forward pass."""
    hidden, inner = config["hidden_size"], _inner_size(config)
    head_dim = config["head_dim"]
    q_size = config["num_attention_heads"] * head_dim
    kv_size = config["num_key_value_heads"] * head_dim
    kind = config["model_type"]
    inputs = {"q_proj": q_size, "k_proj": kv_size, "v_proj": kv_size}
    gates = {"gate_proj": inner, "up_proj": inner}
    if kind == "phi3":
        inputs, gates = {"qkv_proj": q_size + 2 * kv_size}, {"gate_up_proj": 2 * inner}
    projections = {name: (rows, hidden) for name, rows in inputs.items()}
    projections["o_proj"] = hidden, q_size
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (config["vocab_size"], hidden)
    }
    for layer in range(config["num_hidden_layers"]):
        prefix = f"model.layers.{layer}"
        if kind != "olmo2":
            shapes[f"{prefix}.input_layernorm.weight"] = (hidden,)
        for name, (rows, columns) in projections.items():
            shapes[f"{prefix}.self_attn.{name}.weight"] = (rows, columns)
            if config["attention_bias"] or (kind == "qwen2" and name != "o_proj"):
                shapes[f"{prefix}.self_attn.{name}.bias"] = (rows,)
        if kind in ("qwen3", "qwen3_moe", "gemma3_text"):
            shapes[f"{prefix}.self_attn.q_norm.weight"] = (head_dim,)
            shapes[f"{prefix}.self_attn.k_norm.weight"] = (head_dim,)
        if kind == "olmo2":
            shapes[f"{prefix}.self_attn.q_norm.weight"] = (q_size,)
            shapes[f"{prefix}.self_attn.k_norm.weight"] = (kv_size,)
        shapes[f"{prefix}.post_attention_layernorm.weight"] = (hidden,)
        if kind == "gemma3_text":
            shapes[f"{prefix}.pre_feedforward_layernorm.weight"] = (hidden,)
        if kind in ("gemma3_text", "olmo2"):
            shapes[f"{prefix}.post_feedforward_layernorm.weight"] = (hidden,)
        mlps = [f"{prefix}.mlp"]
        if kind == "qwen3_moe":
            shapes[f"{prefix}.mlp.gate.weight"] = config["num_experts"], hidden
            mlps = [f"{prefix}.mlp.experts.{expert}" for expert in range(config["num_experts"])]
        for mlp in mlps:
            shapes |= {f"{mlp}.{name}.weight": (rows, hidden) for name, rows in gates.items()}
            shapes[f"{mlp}.down_proj.weight"] = (hidden, inner)
    shapes["model.norm.weight"] = (hidden,)
    if not config["tie_word_embeddings"]:
        shapes["lm_head.weight"] = (config["vocab_size"], hidden)
    return shapes


def stored_tensors(
    config: Mapping[str, Any], dtype: torch.dtype, quantization: Quantization = "none"
) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
    """The shape and dtype of every tensor in the files, by name.

    With int4, a layer's projection [out, in] is stored as llm-compressor stores it: words of eight
    codes [out, in / 8], and a scale for each group of a row.
    """
    stored: dict[str, tuple[tuple[int, ...], torch.dtype]] = {}
    for name, shape in tensor_shapes(config).items():
        if quantization == "none" or not name.endswith("_proj.weight"):
            stored[name] = shape, dtype
            continue
        rows, columns = shape
        stored[f"{name}_packed"] = (rows, -(-columns // 8)), torch.int32
        stored[f"{name}_scale"] = (rows, columns // _group_size(config)), dtype
        stored[f"{name}_shape"] = (2,), torch.int64
    return stored


def _group_size(config: Mapping[str, Any]) -> int:
    """The largest power of two up to `_MAX_GROUP` that divides the inputs of all layers."""
    q_size = config["num_attention_heads"] * config["head_dim"]
    return math.gcd(_MAX_GROUP, config["hidden_size"], _inner_size(config), q_size)


def _inner_size(config: Mapping[str, Any]) -> int:
    """The intermediate size of MLPs, or of experts."""
    size: int = config.get("moe_intermediate_size") or config["intermediate_size"]
    return size


def _quantization_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """The field of config.json with which llm-compressor describes int4 weights."""
    weights = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group"}
    group = {"targets": ["Linear"], "weights": weights | {"group_size": _group_size(config)}}
    return {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "quantization_status": "compressed",
        "config_groups": {"group_0": group},
        "ignore": ["lm_head", "re:.*mlp.gate$"],
    }


def make_tensor(
    name: str, shape: tuple[int, ...], dtype: torch.dtype, *, seed: int, std: float
) -> Tensor:
    """Makes random weights that depend only on the seed and the name, not on their file.

    Norms and scales have a little noise, so that tests notice missing or swapped ones.
    """
    digest = hashlib.sha256(f"{seed}/{name}".encode()).digest()
    generator = np.random.Generator(np.random.SFC64(int.from_bytes(digest[:8], "little")))
    if name.endswith("_packed"):
        return torch.from_numpy(_draw(generator, _pairs_of_codes(), shape, np.int32))
    mean, std = (1.0, 0.05) if "norm" in name else (0.0, std)
    if name.endswith("_scale"):
        mean, std = std / _CODES_STD, 0.05 * std / _CODES_STD
    # Looking up quantiles is much faster than drawing from a normal distribution. numpy needs less
    # time for it than torch, and has no bfloat16.
    bits = np.int32 if dtype.itemsize == 4 else np.int16
    table = np.frombuffer(_quantiles(mean, std, dtype).view(torch.uint8).numpy(), bits)
    return torch.from_numpy(_draw(generator, table, shape, bits)).view(dtype)


@cache
def _quantiles(mean: float, std: float, dtype: torch.dtype) -> Tensor:
    centers = (torch.arange(_QUANTILES, dtype=torch.float64) + 0.5) / _QUANTILES
    quantiles: Tensor = mean + std * torch.special.ndtri(centers)
    return quantiles.to(dtype)


def _pairs_of_codes() -> NDArray[Any]:
    """All pairs of codes from -7 to 7, stored plus `_MIDDLE`. Zero is twice as likely as any other
    code, so that the mean is zero."""
    codes = np.arange(16, dtype=np.uint8)
    codes[0] = _MIDDLE
    return (codes[:, None] << 4 | codes).ravel()


def _draw(
    generator: np.random.Generator, table: NDArray[Any], shape: tuple[int, ...], dtype: type
) -> NDArray[Any]:
    """Fills an array with random entries of a table, which has 2^8 or 2^16."""
    index = np.dtype(np.uint8 if table.size == 1 << 8 else np.uint16)
    drawn: NDArray[Any] = np.empty(shape, dtype)
    entries = drawn.reshape(-1).view(table.dtype)
    for begin in range(0, entries.size, _DRAWN):
        part = entries[begin : begin + _DRAWN]
        words = generator.integers(
            1 << 64, size=-(-part.size * index.itemsize // 8), dtype=np.uint64
        )
        part[:] = table[words.view(index)[: part.size]]
    return drawn


def plan_shards(sizes: Mapping[str, int], max_shard_bytes: int) -> list[list[str]]:
    """Assigns the names of tensors with these sizes in bytes to files; a tensor above
    `max_shard_bytes` gets its own file."""
    shards: list[list[str]] = [[]]
    used = 0
    for name, size in sizes.items():
        if shards[-1] and used + size > max_shard_bytes:
            shards.append([])
            used = 0
        shards[-1].append(name)
        used += size
    return shards


def make_model(
    out: Path,
    shape: str = "tiny",
    overrides: Mapping[str, Any] | None = None,
    *,
    seed: int = 0,
    dtype: torch.dtype = torch.bfloat16,
    max_shard_bytes: int = DEFAULT_SHARD_BYTES,
    quantization: Quantization = "none",
) -> Path:
    """Writes a model directory to `out` and returns it. Holds two files' weights in memory.

    `overrides` are keys of config.json: `{"tie_word_embeddings": False, "attention_bias": True}`.
    """
    config = model_config(shape, overrides)
    config["torch_dtype"] = str(dtype).removeprefix("torch.")
    if quantization != "none":
        config["quantization_config"] = _quantization_config(config)
    out.mkdir(parents=True, exist_ok=True)
    _write_json(out / "config.json", config)
    _write_tokenizer(out, config["vocab_size"])

    stored = stored_tensors(config, dtype, quantization)
    shapes_of = {f"{name}_shape": shape for name, shape in tensor_shapes(config).items()}
    sizes = {name: math.prod(shape) * kind.itemsize for name, (shape, kind) in stored.items()}
    tied = config["tie_word_embeddings"]
    output_layer = "model.embed_tokens.weight" if tied else "lm_head.weight"
    known = _read_json(DEMO_MODEL / "config.json")["vocab_size"]
    shards = plan_shards(sizes, max_shard_bytes)
    files = ["model.safetensors"]
    if (count := len(shards)) > 1:
        files = [f"model-{i:05}-of-{count:05}.safetensors" for i in range(1, count + 1)]

    def write(file: str, names: list[str]) -> None:
        std = config["initializer_range"]
        tensors = {
            name: torch.tensor(shapes_of[name])
            if name in shapes_of
            else make_tensor(name, *stored[name], seed=seed, std=std)
            for name in names
        }
        if output_layer in tensors:
            tensors[output_layer][known:] *= _UNKNOWN_SCALE
        save_file(tensors, out / file, metadata={"format": "pt"})
        (out / file).chmod(0o644)  # a container reads the file as another user

    with ThreadPoolExecutor(2) as threads:  # one draws numbers while the other writes
        list(threads.map(write, files, shards))
    if len(shards) > 1:
        weight_map = {
            name: file for file, names in zip(files, shards, strict=True) for name in names
        }
        index = {"metadata": {"total_size": sum(sizes.values())}, "weight_map": weight_map}
        _write_json(out / "model.safetensors.index.json", index)
    return out


def pack(model_dir: Path) -> None:
    """Packs the weights into the user's cache, where a worker with default settings finds them.

    Raises:
        StartError: the model cannot be served here, for example because memory is short.
    """
    settings = load_settings(WorkerSettings, ["--model", str(model_dir)])
    model = RankModel(settings, choose_platform(settings), Ranks())
    model.load(choose_max_model_len(settings, model.config.max_model_len))


def _write_tokenizer(out: Path, vocab_size: int) -> None:
    """Copies the demo model's tokenizer and its generation defaults, without end tokens that are
    not in the vocabulary."""
    for file in TOKENIZER_FILES:
        shutil.copyfile(DEMO_MODEL / file, out / file)
    generation = _read_json(DEMO_MODEL / "generation_config.json")
    generation["eos_token_id"] = [i for i in generation["eos_token_id"] if i < vocab_size]
    _write_json(out / "generation_config.json", generation)


def _read_json(path: Path) -> dict[str, Any]:
    content: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return content


def _write_json(path: Path, content: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def _override(text: str) -> tuple[str, Any]:
    """Parses `key=value`, the value as JSON."""
    key, _, value = text.partition("=")
    return key, json.loads(value)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shape", choices=SHAPES, required=True)
    parser.add_argument("--out", type=Path, required=True, help="directory to write the model to")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--dtype", choices=DTYPES, default="bfloat16")
    parser.add_argument(
        "--quantization",
        choices=get_args(Quantization),
        default="none",
        help="int4: the weights of layers in 4 bits, as llm-compressor stores them",
    )
    parser.add_argument("--max-shard-mib", type=int, default=DEFAULT_SHARD_BYTES >> 20)
    parser.add_argument(
        "--set", type=_override, action="append", default=[], metavar="KEY=JSON", dest="overrides"
    )
    args = parser.parse_args()
    make_model(
        args.out,
        args.shape,
        dict(args.overrides),
        seed=args.seed,
        dtype=DTYPES[args.dtype],
        max_shard_bytes=args.max_shard_mib << 20,
        quantization=args.quantization,
    )
    print(f"wrote {args.shape} to {args.out}")
    if args.quantization != "none":
        try:
            pack(args.out)
        except StartError as error:
            print(f"not packed, so the first start packs the weights: {error}")


if __name__ == "__main__":
    main()
