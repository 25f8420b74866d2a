"""Quantized checkpoints, against the matrices that they stand for as their formats define them."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from tests.worker_svc.harness import worker_settings
from tests.worker_svc.quantization.writers import (
    FORMATS,
    PROJECTIONS,
    Format,
    gptq,
    save_quantized,
)
from tests.worker_svc.test_model_runner import make_runner, oracle_logits, prompts
from worker_svc import loader
from worker_svc.errors import ModelError
from worker_svc.kernels.cpu import ops as cpu_ops
from worker_svc.loader import Rows, WeightLoader
from worker_svc.model_runner import ModelRunner
from worker_svc.weights.files import WeightReader
from worker_svc.weights.quantization.choice import Choice, choose_quantization
from worker_svc.weights.quantization.formats import QuantizedWeight

CPU = torch.device("cpu")
OUT, IN = 96, 192

formats = pytest.mark.parametrize("format", FORMATS.values(), ids=FORMATS.keys())


WITHOUT_PACKING: Any = SimpleNamespace(pack=lambda weight, dtype: weight, quantize=cpu_ops.quantize)


def load_codes(
    path: Path, choice: Choice, parts: list[Rows], in_features: int, columns: range | None = None
) -> QuantizedWeight:
    """A matrix as the loader gives it to a device to be packed."""
    with WeightReader(path, torch.float32, CPU) as reader:
        weight = WeightLoader(reader, WITHOUT_PACKING, choice).matrix(parts, in_features, columns)
    assert isinstance(weight, QuantizedWeight)
    return weight


def load(
    path: Path, format: Format, parts: list[Rows], columns: range | None = None
) -> QuantizedWeight:
    return load_codes(path, choose_quantization("auto", format.config), parts, IN, columns)


def save_layer(path: Path, format: Format, name: str = "x") -> torch.Tensor:
    weight = torch.randn(OUT, IN, generator=torch.Generator().manual_seed(0))
    written = format.write(weight)
    # Not worse than rounding to 4 bits; the writer's own check.
    assert (written.dequantized - weight).abs().max() < 0.5 * weight.abs().max() / 3
    tensors = {f"{name}.{part}": tensor for part, tensor in written.tensors.items()}
    save_file(tensors, path / f"{name}.safetensors")
    return written.dequantized


@formats
def test_reads_parts_of_rows(tmp_path: Path, format: Format) -> None:
    """And puts them together, wherever words and blocks begin."""
    expected = save_layer(tmp_path, format)
    parts = [Rows("x", 5, 19), Rows("x", 90, 6), Rows("x", 0, 1)]
    weight = load(tmp_path, format, parts)
    rows = [*range(5, 24), *range(90, 96), 0]
    assert torch.equal(weight.dequantized(), expected[rows])


@formats
@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_reads_parts_of_columns(tmp_path: Path, format: Format, ranks: int) -> None:
    """Where a boundary cuts a group, its inputs keep their scales."""
    expected = save_layer(tmp_path, format)
    share = IN // ranks
    for rank in range(ranks):
        columns = range(rank * share, (rank + 1) * share) if ranks > 1 else None
        weight = load(tmp_path, format, [Rows("x", 0, OUT)], columns)
        assert weight.shape == (OUT, share)
        assert torch.equal(weight.dequantized(), expected[:, share * rank : share * (rank + 1)])


def test_in_pieces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    format = FORMATS["AWQ"]
    expected = save_layer(tmp_path, format)
    monkeypatch.setitem(loader._PIECES, "cpu", 7 * IN)
    assert torch.equal(load(tmp_path, format, [Rows("x", 0, OUT)]).dequantized(), expected)


def test_symmetric_codes_need_no_zeros(tmp_path: Path) -> None:
    for name in ("W4A16", "W8A8", "GPTQ 4", "GPTQ 8", "AWQ symmetric"):
        save_layer(tmp_path, FORMATS[name])
        assert load(tmp_path, FORMATS[name], [Rows("x", 0, OUT)]).zeros is None


LAYERS = "q_proj", "k_proj", "v_proj", "down_proj"


@pytest.mark.parametrize(
    ("format", "layers"),
    # A checkpoint tells by its tensors which layers its `ignore` has left out.
    [*((each, PROJECTIONS) for each in FORMATS.values()), (FORMATS["W4A16"], LAYERS)],
    ids=[*FORMATS, "some layers"],
)
def test_logits(tmp_path: Path, format: Format, layers: tuple[str, ...]) -> None:
    """Whole models; what is not quantized is read as it is. Integers are multiplied with 8 bits
    of the activations, which moves logits a little."""
    oracle = save_quantized(tmp_path, format, layers)
    runner, batch = make_runner(tmp_path)
    (tokens,) = prompts(301, [40])
    (logits,) = runner.logits(batch.step([(0, tokens)]))
    expected = oracle_logits(oracle, tokens)[-1]
    kind = choose_quantization("auto", format.config).name
    difference = (logits[:301] - expected).abs().max() / expected.abs().max()
    print(f"{kind}: {difference:.1e} of the largest logit")
    assert difference < 0.05
    assert runner.info.fingerprint.endswith(f"-{kind}")


def test_parts_of_one_matrix_must_be_alike(tmp_path: Path) -> None:
    save_quantized(tmp_path, FORMATS["W4A16"], ("q_proj", "v_proj"))
    with pytest.raises(ModelError, match=r"k_proj is not quantized, but .*q_proj is"):
        ModelRunner(worker_settings(tmp_path))


def test_inputs_out_of_order_are_rejected(tmp_path: Path) -> None:
    """desc_act: true alone does no harm: with one group there is no order."""
    written = FORMATS["GPTQ 4"].write(torch.randn(OUT, IN))
    order = written.tensors["g_idx"].flip(0).contiguous()
    tensors = {f"x.{part}": each for part, each in (written.tensors | {"g_idx": order}).items()}
    save_file(tensors, tmp_path / "x.safetensors")
    format = gptq(4, 32)
    format.config["desc_act"] = True
    with pytest.raises(ModelError, match=r"desc_act: true is not implemented \(x\.g_idx"):
        load(tmp_path, format, [Rows("x", 0, OUT)])
    by_channel = gptq(4, -1)
    by_channel.config["desc_act"] = True
    expected = save_layer(tmp_path, by_channel)
    assert torch.equal(load(tmp_path, by_channel, [Rows("x", 0, OUT)]).dequantized(), expected)


def changed(name: str, *path: str, **fields: Any) -> dict[str, Any]:
    """The configuration of a format with `fields` changed in its part at `path`."""
    config = copy.deepcopy(FORMATS[name].config)
    part = config
    for key in path:
        part = part[key]
    part |= fields
    return config


WEIGHTS = "config_groups", "group_0", "weights"
STATIC = {"num_bits": 8, "type": "float", "strategy": "tensor", "dynamic": False}


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        ({"quant_method": "bitsandbytes"}, "quant_method: bitsandbytes"),
        (changed("W4A16", kv_cache_scheme={"num_bits": 8}), "kv_cache_scheme: {"),
        (changed("W4A16", sparsity_config={"format": "sparse-24"}), "sparsity_config: {"),
        (changed("W4A16", transform_config={"config_groups": {"u": 1}}), "transform_config: {"),
        (changed("W4A16", format="nvfp4-pack-quantized"), "format: nvfp4-pack-quantized"),
        (changed("W4A16", config_groups={"a": {}, "b": {}}), "config_groups: 2 groups"),
        (changed("W4A16", *WEIGHTS, num_bits=3), "weights.num_bits: 3"),
        (changed("W4A16", *WEIGHTS, actorder="group"), "weights.actorder: group"),
        (changed("W4A16", *WEIGHTS, strategy="tensor_group"), "weights.strategy: tensor_group"),
        (changed("W8A8", *WEIGHTS, num_bits=4), "weights.num_bits: 4"),
        (
            changed("FP8", *WEIGHTS[:2], input_activations=STATIC),
            "input_activations.dynamic: false",
        ),
        (
            changed("FP8", *WEIGHTS[:2], output_activations=STATIC),
            "output_activations: {",
        ),
        (changed("GPTQ 4", bits=3), "bits: 3"),
        (changed("GPTQ 4", checkpoint_format="marlin"), "checkpoint_format: marlin"),
        (changed("GPTQ 4", dynamic={"+:.*down.*": {"bits": 8}}), "dynamic: {"),
        (changed("AWQ", version="gemv"), "version: gemv"),
        (changed("AWQ", bits=8), "bits: 8"),
        (changed("Qwen FP8", activation_scheme="static"), "activation_scheme: static"),
        (changed("Qwen FP8", weight_block_size=None), "weight_block_size: null"),
    ],
)
def test_rejects_by_name(config: dict[str, Any], reason: str) -> None:
    with pytest.raises(ModelError) as error:
        choose_quantization("auto", config)
    assert str(error.value).startswith(f"quantization_config: {reason}")
    assert "implemented" in str(error.value)


# JSON whose nesting a parser takes, but an encoder a few calls deeper may not.
DEEP: list[Any] = []
for _ in range(950):
    DEEP = [DEEP]
NUMBERS: tuple[Any, ...] = -1, 0, 1, 1.5, 4.0, 2**31, 2**70, float("nan"), True, False
LISTS: tuple[Any, ...] = [], ["x"], [1], [0, 0], [1, 1], [1.5, None], [[], {}], DEEP
VALUES = *NUMBERS, *LISTS, None, "", "x", "\ud800", {}, {"x": None}, {"x": {}}


def broken(config: Any) -> Iterator[Any]:
    """`config` with each field, of its parts as well, removed or replaced."""
    yield from VALUES
    if isinstance(config, dict):
        for name, part in config.items():
            others = {key: each for key, each in config.items() if key != name}
            yield others
            yield from (others | {name: each} for each in broken(part))
    elif isinstance(config, list):
        for i, part in enumerate(config):
            yield from ([*config[:i], each, *config[i + 1 :]] for each in broken(part))


@formats
def test_a_broken_configuration_is_rejected(tmp_path: Path, format: Format) -> None:
    """Unless the tensors can be read by it nevertheless."""
    save_layer(tmp_path, format)
    configs, rejected = list(broken(format.config)), []
    with WeightReader(tmp_path, torch.float32, CPU) as reader:
        for config in configs:
            try:
                choice = choose_quantization("auto", config)
                WeightLoader(reader, cpu_ops, choice).matrix([Rows("x", 0, OUT)], IN)
            except ModelError as error:
                rejected.append(str(error))
    assert 20 < len(rejected) < len(configs)
    assert max(map(len, rejected)) < 500


def test_a_setting_must_be_what_the_checkpoint_is() -> None:
    for name, setting in (("W4A16", "int4"), ("W8A8", "int8"), ("FP8", "fp8")):
        choice = choose_quantization(setting, FORMATS[name].config)
        assert (choice.format, choice.quantize_to) == (setting, setting)
    for name, setting in (("W4A16", "none"), ("W8A8", "int4"), ("AWQ", "fp8")):
        with pytest.raises(ModelError, match=f"quantization: {setting}, but the checkpoint is int"):
            choose_quantization(setting, FORMATS[name].config)


def test_codes_are_not_read_as_weights(tmp_path: Path) -> None:
    """A checkpoint whose config.json has lost its `quantization_config`."""
    save_quantized(tmp_path, FORMATS["FP8"])
    config = tmp_path / "config.json"
    config.write_text(config.read_text().replace("quantization_config", "unknown"))
    with pytest.raises(ModelError, match=r"q_proj\.weight: its dtype, F8_E4M3, is one of"):
        ModelRunner(worker_settings(tmp_path))
