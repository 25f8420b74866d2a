"""GGUF files become model directories, or are refused with the key or tensor."""

from __future__ import annotations

import json
import struct
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import Tokenizer
from transformers import (
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    LlamaConfig,
    LlamaForCausalLM,
    Phi3Config,
    Phi3ForCausalLM,
)

from deploy.errors import LaunchError
from deploy.model import model_name, resolve_model
from frontend.text.model_files import read_model_facts
from frontend.text.tokenizer import Tokenizer as FrontendTokenizer
from tests.damage import damages
from tests.gguf_files import spm_keys, write_gguf
from worker_svc.errors import ModelError
from worker_svc.gguf import unpack as module
from worker_svc.gguf.header import read_header
from worker_svc.gguf.unpack import unpack
from worker_svc.models.config import load_model_config
from worker_svc.user_cache import keep

SHAPE: dict[str, Any] = {
    "vocab_size": 301,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 32,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": True,
}


UNREADABLE = {"I8": np.int8, "I16": np.int16, "I32": np.int32, "I64": np.int64, "F64": np.float64}


def write(tmp_path: Path, **changes: Any) -> Path:
    path = tmp_path / "small.gguf"
    write_gguf(path, LlamaForCausalLM(LlamaConfig(**SHAPE)), **changes)
    return path


def refusal(model: Path) -> str:
    with pytest.raises(LaunchError) as error:
        resolve_model(str(model))
    return str(error.value).removeprefix(f"MODEL: {model}: ")


def read_json(path: Path) -> Any:
    return json.loads(path.read_text())


def test_unpacks_once_until_the_file_changes(tmp_path: Path) -> None:
    path = write(tmp_path, keys={"tokenizer.chat_template": "{{ messages }}"})
    directory = resolve_model(str(path))
    assert (directory / "model.gguf").resolve() == path
    config = read_json(directory / "config.json")
    assert config["architectures"] == ["LlamaForCausalLM"]
    assert {name: config[name] for name in SHAPE} == SHAPE
    assert config["eos_token_id"] == [2, 266]  # </s> by its key, <|im_end|> by its name
    assert read_json(directory / "generation_config.json")["eos_token_id"] == [2, 266]
    tokenizer = read_json(directory / "tokenizer_config.json")
    assert tokenizer["chat_template"] == "{{ messages }}"
    assert (tokenizer["bos_token"], tokenizer["eos_token"]) == ("<s>", "</s>")
    assert model_name(str(path), directory) == "small"

    before = (directory / "config.json").stat().st_mtime_ns
    assert resolve_model(str(path)) == directory
    assert (directory / "config.json").stat().st_mtime_ns == before
    write(tmp_path, keys={"llama.context_length": 256})
    changed = resolve_model(str(path))
    assert read_json(changed / "config.json")["max_position_embeddings"] == 256


def test_end_tokens_are_those_of_the_keys_and_of_known_names(tmp_path: Path) -> None:
    """One set, of which transformers adds the tokenizer's own. Text is no end token."""
    im_end, types = 266, spm_keys(301)["tokenizer.ggml.token_type"]
    keys = {"tokenizer.ggml.eot_token_id": 5, "tokenizer.ggml.eom_token_id": 6}
    for kind, named in ((3, [im_end]), (4, [im_end]), (1, [])):
        types[im_end] = kind
        directory = unpack(write(tmp_path, keys={**keys, "tokenizer.ggml.token_type": types}))
        assert read_model_facts(directory).eos_token_ids == (2, 5, 6, *named)
        tokenizer = FrontendTokenizer(directory, threads=1)
        tokenizer.close()
        assert tokenizer.eos_token_ids == (2,)


def test_defaults_for_sampling_are_kept_apart(tmp_path: Path) -> None:
    path = write(tmp_path)
    plain, warm = unpack(path), unpack(path, {"temperature": 0.2})
    assert read_json(plain / "generation_config.json") == {"eos_token_id": [2, 266]}
    expected = {"temperature": 0.2, "eos_token_id": [2, 266]}
    assert read_json(warm / "generation_config.json") == expected


def test_makes_a_tokenizer_in_sentencepieces_manner(tmp_path: Path) -> None:
    directory = resolve_model(str(write(tmp_path)))
    tokenizer = Tokenizer.from_file(str(directory / "tokenizer.json"))
    assert tokenizer.encode("ab a").tokens == ["<s>", "▁ab", "▁a"]
    assert tokenizer.encode(" z<|im_end|>é").tokens == [
        "<s>", "▁", "▁", "<0x7A>", "<|im_end|>", "▁", "é",
    ]  # fmt: skip
    assert tokenizer.decode(tokenizer.encode("ab  €").ids) == "ab  €"


@pytest.mark.parametrize(
    ("keys", "theta", "window_theta", "windows"),
    [
        ({}, 1e6, 1e4, [8, 8]),
        ({"rope.freq_base": None}, 1e6, 1e4, [8, 8]),
        ({"rope.freq_base": None, "rope.global.freq_base": 77.0}, 77.0, 1e4, [8, 8]),
        ({"rope.local.freq_base": 5.0}, 1e6, 5.0, [8, 8]),
        ({"rope.freq_base_swa": 5.0}, 1e6, 5.0, [8, 8]),
        ({"attention.sliding_window_pattern": 2}, 1e6, 1e4, [8, None]),
        ({"attention.sliding_window_pattern": [False, True]}, 1e6, 1e4, [None, 8]),
    ],
)
def test_keys_of_gemma3(
    tmp_path: Path,
    keys: dict[str, Any],
    theta: float,
    window_theta: float,
    windows: list[int | None],
) -> None:
    """By llama.cpp's names and by Ollama's."""
    config = Gemma3TextConfig(**{**SHAPE, "num_hidden_layers": 2}, sliding_window=8)
    named = {f"gemma3.{name}": value for name, value in keys.items()}
    write_gguf(tmp_path / "small.gguf", Gemma3ForCausalLM(config), keys=named)
    model = load_model_config(unpack(tmp_path / "small.gguf"))
    assert [layer.window for layer in model.layers] == windows
    for layer in model.layers:
        assert layer.rope is not None
        assert layer.rope.theta == (theta if layer.window is None else window_theta)
    assert model.rope.theta == theta


def test_marks_of_phi3_take_the_space_after_them(tmp_path: Path) -> None:
    """Phi-3's own tokenizer.json says so. GGUF files do not."""
    config = Phi3Config(**SHAPE, pad_token_id=None, eos_token_id=2)
    write_gguf(tmp_path / "phi.gguf", Phi3ForCausalLM(config))
    directory = unpack(tmp_path / "phi.gguf")
    FrontendTokenizer(directory, threads=1).close()  # transformers reads the configuration
    tokenizer = Tokenizer.from_file(str(directory / "tokenizer.json"))
    assert tokenizer.encode("<|im_end|>\n a").ids == [1, 266, 262]
    assert tokenizer.encode("<s>\na").tokens == ["<s>", "<s>", "▁", "<0x0A>", "a"]


@pytest.mark.parametrize(
    ("keys", "reason"),
    [
        ({"general.architecture": "gemma2"}, "general.architecture: gemma2 is not served; served"),
        ({"llama.block_count": None}, "llama.block_count: missing"),
        ({"llama.block_count": "two"}, "llama.block_count: 'two' is not of type int"),
        ({"llama.attention.head_count": 0}, "llama.attention.head_count: 0 of 64"),
        ({"llama.attention.value_length": 16}, "llama.attention.value_length: 16"),
        ({"llama.expert_count": 8}, "llama.expert_count: "),
        ({"llama.rope.scaling.type": "longrope"}, "llama.rope.scaling.type: longrope"),
        ({"tokenizer.ggml.model": "t5"}, "tokenizer.ggml.model: t5 is not served"),
        ({"tokenizer.ggml.model": "gpt2", "tokenizer.ggml.pre": "tekken"}, "tokenizer.ggml.pre: "),
        ({"tokenizer.ggml.tokens": ["a"] * 301}, "tokenizer.ggml.tokens: "),
        (
            {"tokenizer.ggml.tokens": [*map(str, range(300)), "a" * 1025]},
            "tokenizer.ggml.tokens: a token of 1025 characters",
        ),
        ({"tokenizer.ggml.tokens": [*map(str, range(302))]}, "token_embd.weight: 301 rows for 302"),
        ({"tokenizer.ggml.token_type": [1]}, "tokenizer.ggml.token_type: 1 types of 301"),
        ({"tokenizer.ggml.scores": [1.0]}, "tokenizer.ggml.scores: 1 scores of 301"),
        ({"tokenizer.ggml.bos_token_id": 301}, "tokenizer.ggml.bos_token_id: 301"),
        (
            {
                "tokenizer.ggml.model": "gpt2",
                "tokenizer.ggml.pre": "smollm",
                "tokenizer.ggml.merges": ["a z"],
            },
            "tokenizer.ggml.merges: ('a', 'z') at 0",
        ),
    ],
)
def test_refuses_by_name(tmp_path: Path, keys: dict[str, Any], reason: str) -> None:
    assert refusal(write(tmp_path, keys=keys)).startswith(reason)


@pytest.mark.parametrize(
    ("name", "values", "reason"),
    [
        ("blk.0.ffn_gate_shexp.weight", np.zeros((4, 4), np.float32), "the tensor belongs to"),
        ("blk.0.ffn_gate_exps.weight", np.zeros((4, 4), np.float32), "shape [4, 4] is not"),
        ("blk.0.ffn_up_exps.weight", np.zeros((2, 4, 4), np.float32), "shape [2, 4, 4] is not"),
        ("rope_freqs.weight", np.ones(16, np.float16), "F16 [16] is not a vector of F32"),
        *(
            ("blk.0.attn_q.bias", np.zeros(64, dtype), f"tensors of type {name} are not served")
            for name, dtype in UNREADABLE.items()
        ),
    ],
)
def test_refuses_a_tensor_by_name(
    tmp_path: Path, name: str, values: np.ndarray[Any, Any], reason: str
) -> None:
    assert refusal(write(tmp_path, tensors={name: values})).startswith(f"{name}: {reason}")


def test_names_where_a_file_is_cut_short(tmp_path: Path) -> None:
    path = write(tmp_path)
    data = path.read_bytes()
    places = {
        0: "not a GGUF file",
        40: "key 0 of 19: ",
        60: "general.architecture: ",
        3000: "tokenizer.ggml.tokens: ",
        len(data) - 1: "output_norm.weight: cut short",
    }
    for size, reason in places.items():
        path.write_bytes(data[:size])
        assert reason in refusal(path)


def key(name: str, kind: int, value: bytes) -> bytes:
    return struct.pack("<Q", len(name)) + name.encode() + struct.pack("<I", kind) + value


def array(name: str, kind: int, length: int, size: int) -> bytes:
    return key(name, 9, struct.pack("<IQ", kind, length) + bytes(length * size))


def long_header(*keys: bytes) -> bytes:
    return b"GGUF" + struct.pack("<IQQ", 3, 0, len(keys)) + b"".join(keys)


@pytest.mark.parametrize(
    ("header", "reason"),
    [
        (
            long_header(array("a", 10, 1 << 21, 8), array("b", 0, 1, 1)),
            "b: 1 elements; the limit of all",
        ),
        (
            long_header(*(array(f"{n}", 0, 1 << 18, 1) for n in range(9))),
            "8: 262144 elements; the limit of all",
        ),
        (
            long_header(array("a", 8, 1 << 20, 8), array("b", 8, (1 << 20) + 1, 8)),
            "b: 1048577 elements",
        ),
        (
            long_header(*(key(f"{n}", 0, b"1") for n in range(4097))),
            "4097 keys; the limit is 4096",
        ),
        (
            long_header(key("a", 8, struct.pack("<Q", 1 << 26) + bytes(1 << 26))),
            "header must end at 67108864",
        ),
        (long_header(key("a", 9, struct.pack("<IQ", 0, 1 << 40))), "a: 1099511627776 elements"),
        (b"GGML" + bytes(20), "not a GGUF file"),
        (b"GGUF" + bytes([9, 0, 0, 0]) + bytes(16), "version 9"),
        (b"GGUF" + bytes([3, 0, 0, 0]) + bytes(8) + b"\xff" * 8, "key 0 of 18446744073709551615"),
        (b"GGUF" + bytes([3, 0, 0, 0]) + b"\xff" * 8 + bytes(8), "18446744073709551615 tensors"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_refuses_hostile_headers(tmp_path: Path, header: bytes, reason: str) -> None:
    path = tmp_path / "hostile.gguf"
    path.write_bytes(header)
    assert reason in refusal(path)


def test_numbers_take_no_more_than_their_bytes(tmp_path: Path) -> None:
    """They took twenty times as much: 5.3 GB for a header of 248 MB."""
    path = tmp_path / "long.gguf"
    path.write_bytes(long_header(array("a", 6, 1 << 21, 4)))
    tracemalloc.start()
    try:
        assert len(read_header(path).keys["a"]) == 1 << 21
        assert tracemalloc.get_traced_memory()[1] < 3 * (1 << 23)
    finally:
        tracemalloc.stop()


@damages
@pytest.mark.parametrize(
    "name",
    ["config.json", "generation_config.json", "tokenizer_config.json", "tokenizer.json",
     "model.gguf.json", "digests.json"],
)  # fmt: skip
def test_what_is_damaged_is_made_again(
    tmp_path: Path,
    damage: Callable[[Path], None],
    name: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    path = write(tmp_path)
    directory = unpack(path)
    right = (directory / name).read_bytes()
    damage(directory / name)
    assert unpack(path) == directory
    assert capsys.readouterr().err == f"{directory} is damaged; making it again\n"
    assert (directory / name).read_bytes() == right
    assert unpack(path) == directory
    assert not capsys.readouterr().err


def test_a_file_or_link_that_is_lost_is_made_again(tmp_path: Path) -> None:
    path = write(tmp_path)
    directory = unpack(path)
    names = sorted(each.name for each in directory.iterdir())
    for name in names:
        (directory / name).unlink()
        assert unpack(path) == directory
        assert sorted(each.name for each in directory.iterdir()) == names
    (directory / "model.gguf").unlink()
    (directory / "model.gguf").symlink_to("elsewhere")
    assert unpack(path) == directory
    assert (directory / "model.gguf").resolve() == path


@pytest.mark.parametrize("count", range(6))
def test_nothing_is_trusted_that_was_not_written_to_its_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, count: int
) -> None:
    path, written = write(tmp_path), []

    def fail(made: Path, path: Path) -> None:
        if len(written) == count:
            path.write_bytes(made.read_bytes()[:10])  # as a file system may leave it
            raise OSError(5, "Input/output error")
        written.append(path.name)
        keep(made, path)

    with monkeypatch.context() as patched:
        patched.setattr(module, "keep", fail)
        with pytest.raises(ModelError, match="Input/output error"):
            unpack(path)
    assert len(written) == count
    directory = unpack(path)
    assert read_json(directory / "config.json")["vocab_size"] == 301
    assert Tokenizer.from_file(str(directory / "tokenizer.json")).get_vocab_size() == 301
    assert len(list(directory.parent.iterdir())) == 1
