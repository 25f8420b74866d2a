"""Logits and tokens against transformers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import MistralForCausalLM, PreTrainedModel

from tests.worker_svc.families import FAMILIES, MULTIMODAL, SHAPES
from tests.worker_svc.harness import TINY, Batch, batch_for, save_model, worker_settings
from worker_svc.devices import cpu
from worker_svc.errors import StartError
from worker_svc.kernels.cpu.library import set_threads
from worker_svc.kernels.cpu_features import has
from worker_svc.model_runner import ModelRunner

NUM_BLOCKS = 256


def make_runner(path: Path, **overrides: Any) -> tuple[ModelRunner, Batch]:
    runner = ModelRunner(worker_settings(path, **overrides))
    runner.configure(1, NUM_BLOCKS)
    return runner, batch_for(runner, NUM_BLOCKS)


def prompts(vocab_size: int, lengths: list[int], seed: int = 0) -> list[list[int]]:
    rng = np.random.default_rng(seed)
    return [rng.integers(vocab_size, size=n).tolist() for n in lengths]


def oracle_logits(model: Any, tokens: list[int]) -> torch.Tensor:
    """[len(tokens), vocab]"""
    with torch.inference_mode():
        ids = torch.tensor([tokens], device=model.device)
        logits: torch.Tensor = model(ids).logits[0].float()
    return logits


def last_logits(path: Path, oracle: Any, length: int = 40) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits of a prompt's last token: of a runner of the model in `path`, and of transformers."""
    runner, batch = make_runner(path)
    (tokens,) = prompts(301, [length])
    (logits,) = runner.logits(batch.step([(0, tokens)]))
    return logits[:301], oracle_logits(oracle, tokens)[-1]


class VectorMath(TorchDispatchMode):
    """Records how many numbers each call of MKL's vector math gets."""

    FUNCTIONS = frozenset((torch.ops.aten.cos, torch.ops.aten.exp, torch.ops.aten.sin))

    def __init__(self) -> None:
        super().__init__()
        self.sizes: list[int] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.overloadpacket in self.FUNCTIONS:
            self.sizes.append(args[0].numel())
        return func(*args, **kwargs or {})


def test_one_thread_makes_the_first_call_of_vector_math(tiny_dir: Path) -> None:
    with VectorMath() as calls:
        make_runner(tiny_dir)
    assert calls.sizes[0] == 1  # torch shares larger ones among threads
    assert max(calls.sizes) > 2048


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES.keys())
@pytest.mark.parametrize("block_size", [16, 5])
def test_logits_match_transformers(tmp_path: Path, shape: dict[str, Any], block_size: int) -> None:
    """Prompts whole and in chunks, decodes, and all of them in one step."""
    oracle = save_model(tmp_path, **shape)
    vocab = oracle.config.vocab_size
    runner, batch = make_runner(tmp_path, block_size=block_size)
    texts = prompts(vocab, [1, 37, 100, 16])
    worst = 0.0

    def run(chunks: list[tuple[int, int]], silent: tuple[int, ...] = ()) -> None:
        """Runs a step of (sequence, number of its next tokens) each."""
        nonlocal worst
        starts = {seq: batch.contexts.get(seq, 0) for seq, _ in chunks}
        parts = [(seq, texts[seq][starts[seq] : starts[seq] + n]) for seq, n in chunks]
        logits = runner.logits(batch.step(parts, silent=silent))[:, :vocab]
        sampling = [seq for seq, _ in chunks if seq not in silent]
        for row, seq in zip(logits, sampling, strict=True):
            expected = oracle_logits(oracle, texts[seq][: batch.contexts[seq]])[-1]
            worst = max(worst, (row - expected).abs().max().item())

    run([(0, 1), (1, 20), (2, 33)], silent=(1,))
    run([(2, 33), (3, 16), (1, 16)], silent=(2,))
    texts[0] += prompts(vocab, [3], seed=1)[0]
    texts[3] += prompts(vocab, [2], seed=2)[0]
    run([(3, 1), (1, 1), (2, 33), (0, 2)])
    run([(0, 1), (2, 1), (3, 1)])
    print(f"largest difference {worst:.1e}")
    assert worst < 1e-4


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize(("family", "text"), MULTIMODAL.values(), ids=MULTIMODAL.keys())
def test_the_text_part_of_a_model_that_takes_images(
    tmp_path: Path, family: Any, text: dict[str, Any], tied: bool
) -> None:
    images = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1}
    images |= {"num_attention_heads": 2, "image_size": 28, "patch_size": 14}
    text = {**TINY, **text, "tie_word_embeddings": tied}
    config = family.config_class(text_config=text, vision_config=images, tie_word_embeddings=tied)
    oracle = family(config).eval()
    oracle.save_pretrained(tmp_path)
    logits, expected = last_logits(tmp_path, oracle, 60)
    assert (logits - expected).abs().max() < 1e-4


@pytest.mark.parametrize("family", FAMILIES)
def test_greedy_tokens_match_transformers(tmp_path: Path, family: type[PreTrainedModel]) -> None:
    """20 sequences of mixed lengths, 64 tokens each, sampled tokens fed back on the device."""
    oracle = save_model(tmp_path, family=family)
    runner, batch = make_runner(tmp_path)
    texts = prompts(301, [1 + 5 * i for i in range(20)])
    rows = list(range(20))
    tokens = [runner.run(batch.step([(i, texts[i]) for i in rows]))]
    for _ in range(63):
        tokens.append(runner.run(batch.step([(i, [-1 - i]) for i in rows])))
    for i, completion in enumerate(np.array(tokens).T.tolist()):
        # If each token is the oracle's after those before it, all of them are.
        expected = oracle_logits(oracle, texts[i] + completion)[len(texts[i]) - 1 : -1].argmax(1)
        assert completion == expected.tolist()


@pytest.mark.parametrize("family", FAMILIES)
def test_bfloat16_is_as_close_as_transformers_own(
    tmp_path: Path, family: type[PreTrainedModel]
) -> None:
    """They round differently; ours may not be further from float32 than theirs."""
    biases = {} if family is MistralForCausalLM else {"attention_bias": True}
    rounded = save_model(tmp_path, family=family, dtype=torch.bfloat16, **biases)
    runner, batch = make_runner(tmp_path)
    assert runner.info.dtype == "bfloat16"
    text = prompts(301, [50])[0]
    whole = runner.logits(batch.step([(0, text[:49])]))  # through the prompt's attention
    decoded = runner.logits(batch.step([(0, text[49:])]))  # and the decode kernel
    ours = torch.cat((whole, decoded))[:, :301].float()
    theirs = oracle_logits(rounded, text)[-2:]
    exact = oracle_logits(rounded.float(), text)[-2:]
    assert (ours - exact).abs().max() <= 1.5 * (theirs - exact).abs().max()


def test_batch_composition_does_not_change_tokens(tiny_dir: Path) -> None:
    """The same sequence alone, and among others that come and go. For float32 see
    `sampling/test_model_with_features`."""
    text, *others = prompts(301, [30, 7, 45, 3])

    def generate(crowded: bool) -> list[int]:
        runner, batch = make_runner(tiny_dir, dtype="bfloat16")
        completion: list[int] = []
        for index in range(24):
            chunks = [(0, text if index == 0 else completion[-1:])]
            if crowded and index % 3:
                chunks.insert(index % 2, (100 + index, others[index % 3]))
            row = [seq for seq, _ in chunks].index(0)
            tokens = runner.run(
                batch.step(chunks, temperatures=[0.8] * len(chunks), seeds=[7] * len(chunks))
            )
            completion.append(int(tokens[row]))
        return completion

    assert generate(crowded=False) == generate(crowded=True)


LOST = {"int4": 0.4, "fp8": 0.15}  # of logits' norm, at most


@pytest.mark.skipif(not has("avx2") or has("amx-bf16"), reason="products through oneDNN")
@pytest.mark.parametrize(
    "settings",
    [
        {"dtype": "float32"},
        {"dtype": "bfloat16"},
        {"quantization": "int8"},
        {"quantization": "int4", "kv_dtype": "int8"},
        {"quantization": "fp8", "kv_dtype": "int8", "dtype": "bfloat16"},
    ],
    ids=str,
)
def test_neither_chunks_nor_neighbours_change_a_bit(
    settings: dict[str, Any], tmp_path: Path
) -> None:
    """Nor does the number of threads: no preemption, restart or batch changes a token in any
    format. And those bits are right, as far as the format goes."""
    layers = ["full_attention", "sliding_attention", "full_attention"]
    windows = {"layer_types": layers, "use_sliding_window": True, "sliding_window": 40}
    oracle = save_model(tmp_path, hidden_size=64, intermediate_size=96, **windows)
    runner, batch = make_runner(tmp_path, **settings)
    texts = prompts(301, [300, 37, 1, 129, 256])
    crowd = runner.logits(batch.step(list(enumerate(texts))))
    rng = np.random.default_rng(0)
    for number, text in enumerate(texts):
        done = 0
        while done < len(text):
            end = done + int(rng.integers(1, 90))
            torch.set_num_threads(threads := 1 + end % 2)
            set_threads(threads)
            alone = runner.logits(batch.step([(100 + number, text[done:end])]))
            done = end
        assert torch.equal(alone[0], crowd[number])
    exact = torch.stack([oracle_logits(oracle, text)[-1] for text in texts])
    lost = (crowd[:, :301] - exact).norm() / exact.norm()
    print(f"lost {lost:.4f} of the norm")
    assert lost < LOST.get(settings.get("quantization", "none"), 0.05)


def test_small_steps_run_on_one_thread(tiny_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    runner, batch = make_runner(tiny_dir, threads=2)
    short, long = prompts(301, [40, 200])
    num_weights = runner._model.num_weights(active=False)
    for small, threads in ((cpu.SMALL_STEP, [1, 1]), (100 * num_weights, [1, 2])):
        monkeypatch.setattr(cpu, "SMALL_STEP", small)
        for text, expected in zip((short, long), threads, strict=True):
            runner.run(batch.step([(0, text)]))
            assert torch.get_num_threads() == expected


def test_rows_that_sample_nothing(tiny_dir: Path) -> None:
    runner, batch = make_runner(tiny_dir)
    text = prompts(301, [12])[0]
    tokens = runner.run(batch.step([(0, text[:5]), (1, text), (2, text[:3])], silent=[0, 2]))
    assert tokens[0] == tokens[2] == -1
    assert runner.run(batch.step([(0, text[5:]), (1, [-2])]))[0] == tokens[1]
    assert runner.run(batch.step([(2, text[3:6])], silent=[2])).tolist() == [-1]


def test_limits_of_the_cache_and_of_sequences(tiny_dir: Path) -> None:
    # No more than max_num_seqs sequences of 512 tokens can use.
    info = ModelRunner(worker_settings(tiny_dir, max_num_seqs=3)).info
    assert (info.num_blocks, info.max_model_len) == (3 * 32, 512)
    info = ModelRunner(worker_settings(tiny_dir, kv_blocks=7, max_model_len=99)).info
    assert (info.num_blocks, info.max_model_len) == (7, 99)
    few = ModelRunner(worker_settings(tiny_dir, memory_utilization=1e-4)).info.num_blocks
    assert few < 256 * 32


@pytest.mark.parametrize(
    ("settings", "shape", "reason"),
    [
        ({"memory_utilization": 1e-12}, {}, "memory: 1 MiB short"),
        ({"max_model_len": 513}, {}, "max_model_len: 513 "),
        *(({"attention": x}, {}, f"attention: {x} runs on a GPU") for x in ("fa3", "flash_attn")),
        ({"attention": "triton"}, {}, "attention: triton runs on a GPU"),
        ({"dtype": "float16"}, {}, "dtype: float16 is not served on cpu"),
        ({"dtype": "bfloat16", "block_size": 5}, {}, "block_size: 5 is not a multiple of 2"),
        ({"kv_dtype": "int8", "block_size": 6}, {}, "block_size: 6 is not a multiple of 4"),
        ({"block_size": 260}, {}, "block_size: 260 is over 256 and not a multiple of 16"),
        ({"tp": 3}, {}, "num_attention_heads: 4 cannot be split over tp = 3"),
        (
            {"tp": 2},
            {"num_attention_heads": 6, "num_key_value_heads": 3},
            "num_key_value_heads: 3 cannot be split or copied over tp = 2",
        ),
        (
            {"tp": 2},
            {"intermediate_size": 111},
            "intermediate_size: 111 cannot be split over tp = 2",
        ),
    ],
)
def test_what_cannot_be_served_is_named(
    tmp_path: Path, settings: dict[str, Any], shape: dict[str, Any], reason: str
) -> None:
    save_model(tmp_path, **shape)
    with pytest.raises(StartError) as error:
        make_runner(tmp_path, **settings)
    assert str(error.value).startswith(reason)


def test_weights_that_do_not_fit_are_not_read(tmp_path: Path) -> None:
    save_model(tmp_path)
    config = tmp_path / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"intermediate_size": 1 << 40}))
    with pytest.raises(StartError, match=r"memory: the weights need \d+ MiB, but only \d+ MiB are"):
        make_runner(tmp_path)


def test_a_gpu_that_is_not_there(tiny_dir: Path) -> None:
    settings = worker_settings(tiny_dir).model_copy(update={"device": "cuda"})
    with pytest.raises(StartError, match="device: cuda, but torch finds no CUDA device"):
        ModelRunner(settings)
