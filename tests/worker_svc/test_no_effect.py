"""Tensors that a model needs, and those that it does not have but a checkpoint may hold."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.worker_svc.harness import save_model, worker_settings
from tests.worker_svc.quantization.writers import FORMATS, save_quantized
from tests.worker_svc.test_model_runner import last_logits
from worker_svc.errors import ModelError
from worker_svc.model_runner import ModelRunner

ATTENTION, MLP = "model.layers.0.self_attn", "model.layers.2.mlp"
ONE, ZERO = torch.ones(()), torch.zeros(())


def edit(model_dir: Path, tensors: Mapping[str, torch.Tensor | None]) -> None:
    """Adds or replaces tensors, and removes those that are None."""
    path = model_dir / "model.safetensors"
    edited = {**load_file(path), **tensors}
    save_file({name: each for name, each in edited.items() if each is not None}, path)


def assert_rejected(model_dir: Path, reason: str) -> None:
    with pytest.raises(ModelError, match=reason):
        ModelRunner(worker_settings(model_dir))


@pytest.fixture
def model_dir(tmp_path: Path) -> Path:
    save_model(tmp_path)
    return tmp_path


@pytest.mark.parametrize(
    ("name", "tensor", "reason"),
    [
        ("model.layers.1.mlp.up_proj.weight", None, r"missing weight: .*\.1\.mlp\.up_proj\.weight"),
        ("model.norm.weight", torch.zeros(63), r"model\.norm\.weight: shape \[63\].*\[64\]"),
        (
            "model.layers.0.mlp.gate_proj.weight",
            torch.zeros(111, 64),
            r"gate_proj\.weight: shape \[111, 64\]",
        ),
        ("lm_head.weight", torch.zeros(299, 64), r"lm_head\.weight: shape \[299, 64\]"),
    ],
)
def test_a_tensor_that_does_not_fit_is_named(
    model_dir: Path, name: str, tensor: torch.Tensor | None, reason: str
) -> None:
    edit(model_dir, {name: tensor})
    assert_rejected(model_dir, reason)


def test_such_tensors_do_not_change_the_model(tmp_path: Path) -> None:
    oracle = save_model(tmp_path)
    edit(
        tmp_path,
        {
            f"{ATTENTION}.rotary_emb.inv_freq": torch.rand(8),
            "model.rotary_emb.inv_freq": torch.rand(8),
            "model.rotary_emb.original_inv_freq": torch.rand(8),
            f"{ATTENTION}.rotary_emb.cos_cached": torch.rand(1, 1, 512, 16),
            f"{ATTENTION}.rotary_emb.sin_cached": torch.rand(1, 1, 512, 16).half(),
            f"{ATTENTION}.k_scale": ONE,
            f"{ATTENTION}.v_scale": torch.ones(1, dtype=torch.bfloat16),
            f"{ATTENTION}.attn.q_scale": torch.ones(4),
            f"{ATTENTION}.k_proj.output_scale": torch.ones(1),
            f"{MLP}.down_proj.input_scale": torch.ones(1, 1, dtype=torch.float16),
            f"{MLP}.down_proj.weight_scale": torch.ones(64, 1),
            f"{MLP}.down_proj.input_zero_point": torch.zeros(1, dtype=torch.int8),
        },
    )
    torch.testing.assert_close(*last_logits(tmp_path, oracle))


@pytest.mark.parametrize(
    ("name", "tensor", "neutral"),
    [
        (f"{ATTENTION}.k_scale", torch.tensor(1.001), 1),
        (f"{ATTENTION}.v_scale", ZERO, 1),
        (f"{MLP}.up_proj.input_scale", torch.tensor([1.0, 1.0, 2.0]), 1),
        (f"{MLP}.up_proj.weight_scale", torch.tensor([1.0, float("nan")]), 1),
        (f"{MLP}.up_proj.input_zero_point", torch.tensor([0, 1]), 0),
        (f"{ATTENTION}.q_proj.bias", ZERO, None),  # of a layer that is not quantized
        (f"{ATTENTION}.inv_freq", ONE, None),
        (f"{ATTENTION}.rotary_emb.weight", ONE, None),
        (f"{ATTENTION}.my_rotary_emb.inv_freq", ONE, None),
        (f"{ATTENTION}.other_norm.scale", ONE, None),
        (f"{ATTENTION}.temperature_scale", ONE, None),
        ("model.layers.3.extra", ZERO, None),
    ],
)
def test_what_may_change_the_model_stays_unknown(
    model_dir: Path, name: str, tensor: torch.Tensor, neutral: int | None
) -> None:
    edit(model_dir, {name: tensor})
    unless = "$" if neutral is None else f": may be ignored only if all of it is {neutral}"
    assert_rejected(model_dir, f"^unknown weight: {name}{unless}")


@pytest.mark.parametrize("format", ["GPTQ 4", "AWQ", "W4A16", "FP8", "Qwen FP8"])
def test_a_quantized_layers_bias_may_be_zero(tmp_path: Path, format: str) -> None:
    """AutoGPTQ writes one for each layer, whether or not the model has it."""
    save_quantized(tmp_path, FORMATS[format])
    names = [f"{ATTENTION}.o_proj.bias", f"{MLP}.up_proj.bias"]
    edit(tmp_path, {name: torch.zeros(64, dtype=torch.float16) for name in names})
    ModelRunner(worker_settings(tmp_path))
    edit(tmp_path, {names[1]: torch.tensor([0.0, 1e-5])})
    assert_rejected(tmp_path, f"^unknown weight: {names[1]}: may be ignored only if all of it is 0")


@pytest.mark.parametrize("zero", [0, 1])
def test_zero_points_of_a_symmetric_format_are_checked(tmp_path: Path, zero: int) -> None:
    save_quantized(tmp_path, FORMATS["W8A8"])
    name = f"{MLP}.up_proj.weight_zero_point"
    edit(tmp_path, {name: torch.full((128, 1), zero, dtype=torch.int8)})
    if zero:
        assert_rejected(tmp_path, f"^unknown weight: {name}")
    else:
        ModelRunner(worker_settings(tmp_path))
