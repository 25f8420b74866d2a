"""Models with random weights: transformers reads exactly what was asked for."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from structlog.testing import capture_logs
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.worker_svc.test_model_runner import make_runner
from tools.make_model import main, make_model, model_config, tensor_shapes
from worker_svc.weights.files import WeightReader
from worker_svc.weights.quantization.compressed_tensors import CompressedTensors

# As stated by the public checkpoints; tied embeddings count once.
PARAMETERS = {
    "qwen3-0.6b": 596_049_920,
    "qwen3-1.7b": 1_720_574_976,
    "qwen3-4b": 4_022_468_096,
    "qwen3-8b": 8_190_735_360,
    "qwen3-14b": 14_768_307_200,
    "qwen3-32b": 32_762_123_264,
    "qwen2.5-0.5b": 494_032_768,
    "qwen2.5-7b": 7_615_616_512,
    "qwen2.5-72b": 72_706_203_648,
    "llama-3.2-1b": 1_235_814_400,
    "llama-3.1-8b": 8_030_261_248,
    "llama-3.1-70b": 70_553_706_496,
    "mistral-7b": 7_248_023_552,
    "smollm3-3b": 3_075_098_624,
    "granite-3.3-2b": 2_533_539_840,
    "phi-4-mini": 3_836_021_760,
    "olmo2-7b": 7_298_617_344,
    "gemma3-270m": 268_098_176,
    "gemma3-1b": 999_885_952,
}


def read_weights(directory: Path) -> dict[str, torch.Tensor]:
    return {
        name: tensor
        for file in directory.glob("*.safetensors")
        for name, tensor in load_file(file).items()
    }


@pytest.mark.parametrize("shape", PARAMETERS)
def test_shapes_have_the_size_of_the_public_models(shape: str) -> None:
    sizes = tensor_shapes(model_config(shape)).values()
    assert sum(torch.Size(size).numel() for size in sizes) == PARAMETERS[shape]


@pytest.mark.parametrize(
    "overrides",
    [
        {},
        {"tie_word_embeddings": False},
        {"attention_bias": True, "num_key_value_heads": 4},
        {"head_dim": 32, "num_hidden_layers": 3, "vocab_size": 3001},
        {"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2"},
        {"architectures": ["LlamaForCausalLM"], "model_type": "llama"},
        {"architectures": ["MistralForCausalLM"], "model_type": "mistral"},
        {"architectures": ["SmolLM3ForCausalLM"], "model_type": "smollm3"},
        {"architectures": ["GraniteForCausalLM"], "model_type": "granite"},
        {"architectures": ["Phi3ForCausalLM"], "model_type": "phi3"},
        {"architectures": ["Gemma3ForCausalLM"], "model_type": "gemma3_text"},
        {"architectures": ["Olmo2ForCausalLM"], "model_type": "olmo2", "hidden_size": 64},
    ],
)
def test_transformers_finds_every_weight_and_no_other(
    tmp_path: Path, overrides: dict[str, Any]
) -> None:
    make_model(tmp_path, "tiny", overrides)
    model, report = AutoModelForCausalLM.from_pretrained(tmp_path, output_loading_info=True)
    assert not any(report.values()), report
    assert model.dtype == torch.bfloat16
    for name, tensor in read_weights(tmp_path).items():
        assert torch.equal(model.state_dict()[name], tensor), name
    for key, value in overrides.items():
        assert getattr(model.config, key) == value


@pytest.mark.parametrize("tied", [True, False])
def test_random_weights_write_text(tmp_path: Path, tied: bool) -> None:
    make_model(tmp_path, "tiny", {"vocab_size": 50_000, "tie_word_embeddings": tied})
    model = AutoModelForCausalLM.from_pretrained(tmp_path)
    known = len(AutoTokenizer.from_pretrained(tmp_path))
    for first in range(100, 120):
        written = model.generate(torch.tensor([[first]]), do_sample=False, max_new_tokens=8)
        assert written.max() < known


@pytest.mark.parametrize(
    ("overrides", "theta", "factor"),
    [
        ({}, 1e6, 1.0),
        ({"rope_theta": 5000.0}, 5000.0, 1.0),
        ({"rope_scaling": {"rope_type": "linear", "factor": 4.0}}, 1e6, 4.0),
    ],
)
def test_transformers_reads_the_rope(
    tmp_path: Path, overrides: dict[str, Any], theta: float, factor: float
) -> None:
    make_model(tmp_path, "tiny", overrides)
    model = AutoModelForCausalLM.from_pretrained(tmp_path)
    slowest = model.model.rotary_emb.inv_freq[-1].item()
    # head_dim is 16, so the slowest of the eight frequencies is theta ** (-14 / 16), interpolated.
    assert slowest == pytest.approx(theta ** (-14 / 16) / factor, rel=1e-3)


def test_files_do_not_change_the_weights(tmp_path: Path) -> None:
    one = read_weights(make_model(tmp_path / "one", seed=3))
    many_directory = make_model(tmp_path / "many", seed=3, max_shard_bytes=20_000)
    many = read_weights(many_directory)
    index = json.loads((many_directory / "model.safetensors.index.json").read_text())
    assert len(set(index["weight_map"].values())) > 2
    assert index["weight_map"].keys() == one.keys() == many.keys()
    assert all(torch.equal(one[name], many[name]) for name in one)
    assert index["metadata"]["total_size"] == sum(tensor.nbytes for tensor in one.values())
    loaded = AutoModelForCausalLM.from_pretrained(many_directory).state_dict()
    assert all(torch.equal(loaded[name], one[name]) for name in one)


def test_seed_decides_the_weights(tmp_path: Path) -> None:
    first, again, other = (
        read_weights(make_model(tmp_path / str(i), seed=seed)) for i, seed in enumerate((1, 1, 2))
    )
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert not any(torch.equal(first[name], other[name]) for name in first)


@pytest.mark.parametrize(
    ("overrides", "group_size"),
    [({}, 32), ({"hidden_size": 192, "head_dim": 32, "intermediate_size": 320}, 64)],
)
def test_a_worker_reads_int4_weights(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, overrides: dict[str, Any], group_size: int
) -> None:
    """They are as large as the weights of other models."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    make_model(tmp_path, "tiny", overrides, quantization="int4")
    config = json.loads((tmp_path / "config.json").read_text())
    stored, layers = read_weights(tmp_path), CompressedTensors(config["quantization_config"])
    with WeightReader(tmp_path, torch.float32, torch.device("cpu")) as reader:
        for name, shape in tensor_shapes(config).items():
            if not name.endswith("_proj.weight"):
                assert stored[name].dtype == torch.bfloat16
                continue
            rows, columns = shape
            assert stored[f"{name}_shape"].tolist() == [*shape]
            assert stored[f"{name}_scale"].shape == (rows, columns // group_size)
            layer = name.removesuffix(".weight")
            weight = layers.read(reader, layer, range(rows), range(columns), columns)
            values = weight.dequantized()
            assert values.mean().item() == pytest.approx(0, abs=0.003)
            assert values.std().item() == pytest.approx(0.02, rel=0.1)
    make_runner(tmp_path)  # reads all tensors


def test_the_first_start_of_an_int4_model_reads_packed_weights(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    command = ["make_model", "--shape", "tiny", "--out", str(tmp_path), "--quantization", "int4"]
    monkeypatch.setattr("sys.argv", command)
    main()
    with capture_logs() as logs:
        make_runner(tmp_path)
    assert "packed weights are read" in [each["event"] for each in logs]


def test_weights_differ_from_each_other_and_norms_from_one(tmp_path: Path) -> None:
    weights = read_weights(make_model(tmp_path, dtype=torch.float32))
    gate, up = (weights[f"model.layers.0.mlp.{name}_proj.weight"] for name in ("gate", "up"))
    assert not torch.equal(gate, up)
    assert gate.std().item() == pytest.approx(0.02, rel=0.1)
    norm = weights["model.layers.1.post_attention_layernorm.weight"]
    assert norm.mean().item() == pytest.approx(1, abs=0.05)
    assert norm.std().item() > 0.02


def test_a_model_has_a_tokenizer_and_end_tokens(tmp_path: Path) -> None:
    make_model(tmp_path)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    ends = json.loads((tmp_path / "generation_config.json").read_text())["eos_token_id"]
    assert tokenizer.convert_ids_to_tokens(ends) == ["<|im_end|>", "<|endoftext|>"]


def test_unknown_shape_is_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"shape: 'qwen3-7b' is unknown; there are .*qwen3-8b"):
        make_model(tmp_path, "qwen3-7b")


def test_command_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    command = ["make_model", "--shape", "tiny", "--out", str(tmp_path), "--dtype", "float16"]
    command += ["--set", "num_hidden_layers=1", "--set", "tie_word_embeddings=false"]
    monkeypatch.setattr("sys.argv", command)
    main()
    weights = read_weights(tmp_path)
    assert weights["lm_head.weight"].dtype == torch.float16
    assert not any(name.startswith("model.layers.1.") for name in weights)
