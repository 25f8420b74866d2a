"""Models of GGUF files against transformers, and parts of their tensors."""

from __future__ import annotations

import json
from contextlib import suppress
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Type
from transformers import (
    Gemma3ForCausalLM,
    GraniteForCausalLM,
    LlamaForCausalLM,
    Phi3ForCausalLM,
    PreTrainedModel,
    Qwen2ForCausalLM,
    Qwen3ForCausalLM,
    Qwen3MoeForCausalLM,
    SmolLM3ForCausalLM,
)

from tests.gguf_files import split_gguf, write_gguf
from tests.worker_svc.families import EXPERTS, GRANITE, LLAMA3
from tests.worker_svc.harness import save_model
from tests.worker_svc.test_model_runner import last_logits, make_runner, oracle_logits, prompts
from worker_svc.errors import ModelError
from worker_svc.gguf.unpack import unpack
from worker_svc.weights.files import WeightReader, weight_files
from worker_svc.weights.gguf_file import GgufTensor, read_gguf
from worker_svc.weights.gguf_types import READABLE

# Sizes that blocks of 32 divide.
SHAPE = {"intermediate_size": 96, "head_dim": 32, "vocab_size": 301}
CASES: dict[str, tuple[type[PreTrainedModel], Type, dict[str, Any]]] = {
    "llama, F32, tied": (LlamaForCausalLM, Type.F32, {}),
    "llama, Q4_1, all biases": (
        LlamaForCausalLM,
        Type.Q4_1,
        {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": False},
    ),
    "qwen2, Q8_0": (Qwen2ForCausalLM, Type.Q8_0, {}),
    "qwen3, F16, untied": (Qwen3ForCausalLM, Type.F16, {"tie_word_embeddings": False}),
    "qwen3, BF16": (Qwen3ForCausalLM, Type.BF16, {}),
    "qwen3moe, Q8_0": (
        Qwen3MoeForCausalLM,
        Type.Q8_0,
        {**EXPERTS, "moe_intermediate_size": 32, "tie_word_embeddings": False},
    ),
    "granite, Q8_0": (GraniteForCausalLM, Type.Q8_0, GRANITE),
    "smollm3, Q8_0": (SmolLM3ForCausalLM, Type.Q8_0, {"no_rope_layers": [1, 1, 1]}),
    "smollm3, each fourth layer": (SmolLM3ForCausalLM, Type.Q4_0, {"num_hidden_layers": 4}),
    "gemma3, Q8_0": (
        Gemma3ForCausalLM,
        Type.Q8_0,
        {"num_hidden_layers": 7, "sliding_window": 20, "query_pre_attn_scalar": 32},
    ),
    "phi3, Q8_0, untied": (Phi3ForCausalLM, Type.Q8_0, {"tie_word_embeddings": False}),
    "phi3, F16, partial": (
        Phi3ForCausalLM,
        Type.F16,
        {"rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": 0.75}},
    ),
}
# Types whose values `gguf` can read but not write are tested with random blocks.
BLOCKS = [
    kind
    for kind, (size, _) in gguf.GGML_QUANT_SIZES.items()
    if size > 1 and kind in gguf.quants._type_traits
]


def greedy(path: Path, text: list[int], count: int, **settings: Any) -> list[int]:
    runner, batch = make_runner(path, dtype="float32", **settings)
    tokens = [int(runner.run(batch.step([(0, text)]))[0])]
    while len(tokens) < count:
        tokens.append(int(runner.run(batch.step([(0, [-1])]))[0]))
    return tokens


@pytest.mark.parametrize(("family", "kind", "shape"), CASES.values(), ids=CASES)
def test_tokens_equal_those_of_transformers(
    tmp_path: Path, family: type[PreTrainedModel], kind: Type, shape: dict[str, Any]
) -> None:
    oracle = save_model(tmp_path / "original", family=family, **SHAPE, **shape)
    write_gguf(tmp_path / "model.gguf", oracle, kind)
    text = prompts(301, [40])[0]
    tokens = greedy(unpack(tmp_path / "model.gguf"), text, 40)
    expected = oracle_logits(oracle, text + tokens)[len(text) - 1 : -1].argmax(1)
    assert tokens == expected.tolist()


def test_is_quantized_like_any_checkpoint(tmp_path: Path) -> None:
    oracle = save_model(tmp_path / "original", family=LlamaForCausalLM, **SHAPE)
    write_gguf(tmp_path / "model.gguf", oracle, Type.Q5_1)
    oracle.save_pretrained(tmp_path / "plain")
    text = prompts(301, [40])[0]
    tokens = [
        greedy(path, text, 20, quantization="int8")
        for path in (unpack(tmp_path / "model.gguf"), tmp_path / "plain")
    ]
    assert tokens[0] == tokens[1]


def test_llama3_rope_comes_as_a_tensor(tmp_path: Path) -> None:
    oracle = save_model(
        tmp_path / "original", family=LlamaForCausalLM, rope_parameters=LLAMA3, **SHAPE
    )
    inv_freq = oracle.model.rotary_emb.inv_freq.numpy()
    plain = LLAMA3["rope_theta"] ** -(np.arange(0, 32, 2, dtype=np.float32) / 32)
    factors = (plain / inv_freq).astype(np.float32)
    write_gguf(tmp_path / "model.gguf", oracle, tensors={"rope_freqs.weight": factors})
    logits, expected = last_logits(unpack(tmp_path / "model.gguf"), oracle, 400)
    assert (logits - expected).abs().max() < 1e-4


def test_longrope_comes_as_two_tensors(tmp_path: Path) -> None:
    rope: dict[str, Any] = {"rope_type": "longrope", "short_factor": [1.0] * 4}
    rope |= {"long_factor": [1.0, 1.5, 4.0, 16.0]}
    rope |= {"rope_theta": 1e4, "partial_rotary_factor": 0.5}
    shape = SHAPE | {"head_dim": 16, "rope_parameters": rope, "original_max_position_embeddings": 2}
    shape |= {"sliding_window": 30}
    oracle = save_model(tmp_path / "original", family=Phi3ForCausalLM, **shape)
    keys = {
        "phi3.rope.scaling.original_context_length": 2,
        "phi3.rope.scaling.attn_factor": float(oracle.model.rotary_emb.attention_scaling),
        "phi3.attention.sliding_window": 30,
    }
    tensors = {
        f"rope_factors_{name}.weight": np.array(rope[f"{name}_factor"], np.float32)
        for name in ("short", "long")
    }
    write_gguf(tmp_path / "model.gguf", oracle, keys=keys, tensors=tensors)
    logits, expected = last_logits(unpack(tmp_path / "model.gguf"), oracle, 250)
    assert (logits - expected).abs().max() < 1e-4


def test_the_readable_types_are_those_that_gguf_converts() -> None:
    found = set()
    for kind in Type:
        _, block_bytes = gguf.GGML_QUANT_SIZES[kind]
        with suppress(NotImplementedError), np.errstate(all="ignore"):
            gguf.dequantize(np.zeros((1, block_bytes), np.uint8), kind)
            found.add(kind)
    assert found == READABLE


@pytest.mark.parametrize("count", [2, 5])
def test_a_split_file_is_read_from_all_parts(tmp_path: Path, count: int) -> None:
    oracle = save_model(tmp_path / "original", family=LlamaForCausalLM, **SHAPE)
    write_gguf(tmp_path / "m.gguf", oracle, Type.Q8_0)
    whole = unpack(tmp_path / "m.gguf")
    size = -(-len(read_gguf(whole)) // count)
    slices = [slice(size * number, size * (number + 1)) for number in range(count)]
    directory = unpack(split_gguf(tmp_path / "m.gguf", slices)[-1])
    assert len(weight_files(directory)) == count
    text = prompts(301, [40])[0]
    assert greedy(directory, text, 20) == greedy(whole, text, 20)
    part = weight_files(directory)[1].resolve()
    part.write_bytes(part.read_bytes()[:-1])
    with pytest.raises(ModelError, match=rf"model-00002-of-0000{count}\.gguf: cut short"):
        weight_files(directory)


@pytest.mark.parametrize("kind", BLOCKS, ids=lambda kind: kind.name)
def test_reads_rows_of_every_type(tmp_path: Path, kind: Type) -> None:
    block, block_bytes = gguf.GGML_QUANT_SIZES[kind]
    data = np.random.default_rng(0).integers(0, 256, (16, 2 * block_bytes), np.uint8)
    (tmp_path / "model.gguf").write_bytes(bytes(7) + data.tobytes())
    tensor = GgufTensor(tmp_path / "model.gguf", kind, (16, 2 * block), 7)
    with np.errstate(all="ignore"):  # random scales may be infinite
        whole = gguf.dequantize(data, kind).astype(np.float32)
        some = tensor.read(range(3, 11))
    np.testing.assert_array_equal(some.numpy(), whole[3:11])


@pytest.mark.parametrize("rows", [range(32), range(8, 24), range(5, 7), range(3, 29)])
def test_reads_any_rows_of_paired_halves(tmp_path: Path, rows: range) -> None:
    values = torch.arange(32.0 * 4).view(32, 4)
    halves = values.view(4, 2, 4, 4).transpose(1, 2).contiguous()
    (tmp_path / "model.gguf").write_bytes(halves.numpy().tobytes())
    tensor = GgufTensor(tmp_path / "model.gguf", Type.F32, (32, 4), 0, head_dim=8)
    assert torch.equal(tensor.read(rows), values[rows.start : rows.stop])


def test_a_rank_reads_its_slices(tmp_path: Path) -> None:
    oracle = save_model(tmp_path / "original", family=LlamaForCausalLM, **SHAPE)
    write_gguf(tmp_path / "model.gguf", oracle, Type.Q4_0)
    cpu = torch.device("cpu")
    with WeightReader(unpack(tmp_path / "model.gguf"), torch.float32, cpu) as reader:
        for name, dim, start, size in (
            ("model.layers.1.self_attn.q_proj", 0, 32, 64),
            ("model.layers.0.self_attn.o_proj", 1, 96, 32),
            ("model.embed_tokens", 0, 100, 50),
        ):
            whole = oracle.get_parameter(f"{name}.weight")
            out = torch.empty_like(whole.narrow(dim, start, size))
            reader.read_into(out, f"{name}.weight", dim=dim, start=start)
            assert torch.equal(out, whole.narrow(dim, start, size)), name


def test_names_a_file_that_became_shorter(tmp_path: Path) -> None:
    oracle = save_model(tmp_path / "original", family=Qwen2ForCausalLM, **SHAPE)
    write_gguf(tmp_path / "model.gguf", oracle)
    directory = unpack(tmp_path / "model.gguf")
    with (tmp_path / "model.gguf").open("rb+") as file:
        file.truncate(100_000)
    with pytest.raises(ModelError, match=r"model\.gguf: cut short: \S+ ends at byte \d+ of 100000"):
        WeightReader(directory, torch.float32, torch.device("cpu"))


def test_names_an_index_that_cannot_be_read(tmp_path: Path) -> None:
    oracle = save_model(tmp_path / "original", family=Qwen2ForCausalLM, **SHAPE)
    write_gguf(tmp_path / "model.gguf", oracle)
    directory = unpack(tmp_path / "model.gguf")
    right = {"type": "F32", "shape": [4], "start": 0, "file": "model.gguf"}
    changes: list[dict[str, Any]] = [{"type": "I64"}, {"file": "../x.gguf"}, {"file": "no.gguf"}]
    changed = [right | change for change in changes]
    for entry in (
        *([], {"type": "Q9", "shape": [4], "start": 0}, {"type": "F32", "shape": [-4]}),
        *changed,
    ):
        (directory / "model.gguf.json").write_text(json.dumps({"model.norm.weight": entry}))
        with pytest.raises(ModelError, match=r"model\.gguf\.json: cannot be read"):
            WeightReader(directory, torch.float32, torch.device("cpu"))
