"""The whole GPU path: staging, kernels, the padded steps that CUDA graphs run, and the attention
backends, with stand-ins if there is no GPU."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import (
    Gemma3ForCausalLM,
    GraniteForCausalLM,
    LlamaForCausalLM,
    Olmo2ForCausalLM,
    Phi3ForCausalLM,
    Qwen2ForCausalLM,
    Qwen3MoeForCausalLM,
    SmolLM3ForCausalLM,
)

from tests.worker_svc.device import DEVICE, by_device, cpu_only
from tests.worker_svc.families import EXPERTS, GEMMA3, GRANITE
from tests.worker_svc.gpu_path.flash_attention import FlashAttention3Ops
from tests.worker_svc.gpu_path.small_model import (
    LARGER,
    LARGER_DTYPE,
    LARGER_HEADS,
    MAX_NUM_SEQS,
    NUM_BLOCKS,
    SMALL,
    VOCAB,
    decode,
    decode_with_features,
    make_runner,
)
from tests.worker_svc.harness import Batch, limits, save_model, worker_settings
from tests.worker_svc.platforms import GpuPlatform, Uncaptured, make_backend
from tests.worker_svc.test_model_runner import oracle_logits, prompts
from worker_svc.attention.choice import BACKENDS
from worker_svc.errors import ModelError
from worker_svc.model_runner import ModelRunner

# The first test of a model on a GPU compiles its kernels.
pytestmark = pytest.mark.timeout(240)

# Lengths of texts, and steps: the number of next tokens for each sequence.
LENGTHS, STEPS = by_device(
    # Prompts whole and in chunks, decodes, and all of them in one step.
    cpu=(
        [4, 23, 60, 16],
        [
            [(0, 1), (1, 20), (2, 17)],
            [(2, 43), (3, 15), (0, 1)],
            [(1, 1), (0, 2), (3, 1)],
        ],
    ),
    # Prompts in two steps, from the first token to the last, then decodes.
    gpu=(
        [n + 16 for n in (2, 17, 64, 255, 256, 300, 513, 1000)],
        [
            [(i, n // 2) for i, n in enumerate((2, 17, 64, 255, 256, 300, 513, 1000))],
            [(i, n - n // 2) for i, n in enumerate((2, 17, 64, 255, 256, 300, 513, 1000))],
            *[[(i, 1) for i in range(8)]] * 16,
        ],
    ),
)


def logits_of_steps(path: Path, **overrides: Any) -> list[torch.Tensor]:
    """[rows, vocab] float32 of each of `STEPS`."""
    settings = {"max_num_seqs": len(LENGTHS), "max_num_batched_tokens": 2048, **overrides}
    size = settings.get("block_size", 64)  # or larger
    num_blocks = 2 * sum(-(-length // size) for length in LENGTHS)  # in up to two tables
    runner, batch = make_runner(path, captures=False, num_blocks=num_blocks, **settings)
    vocab = runner.info.vocab_size
    texts = prompts(vocab, LENGTHS)
    found = []
    for chunks in STEPS:
        starts = {seq: batch.contexts.get(seq, 0) for seq, _ in chunks}
        parts = [(seq, texts[seq][starts[seq] : starts[seq] + n]) for seq, n in chunks]
        found.append(runner.logits(batch.step(parts))[:, :vocab].float())
    return found


def logits_of_oracle(oracle: Any) -> list[torch.Tensor]:
    """The same from transformers."""
    rows = [oracle_logits(oracle, text) for text in prompts(oracle.config.vocab_size, LENGTHS)]
    contexts, found = [0] * len(LENGTHS), []
    for chunks in STEPS:
        for seq, n in chunks:
            contexts[seq] += n
        found.append(torch.stack([rows[seq][contexts[seq] - 1] for seq, _ in chunks]))
    return found


def check_logits(path: Path, oracle: Any, **overrides: Any) -> None:
    ours, theirs = logits_of_steps(path, **overrides), logits_of_oracle(oracle)
    worst = max(float((a - b).abs().max()) for a, b in zip(ours, theirs, strict=True))
    print(f"largest difference {worst:.1e}")
    assert worst < 1e-4


@cpu_only
@pytest.mark.parametrize(
    ("shape", "block_size"),
    [
        ({"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}, 16),
        ({"attention_bias": True, "head_dim": 24, "tie_word_embeddings": False}, 7),
        ({"family": Qwen2ForCausalLM, "num_hidden_layers": 2}, 16),
        ({"family": LlamaForCausalLM, "num_hidden_layers": 2, "mlp_bias": True}, 16),
        ({"family": GraniteForCausalLM, **GRANITE}, 16),
        ({"family": Olmo2ForCausalLM, "num_hidden_layers": 2}, 16),
        ({"family": Gemma3ForCausalLM, "num_hidden_layers": 3, **GEMMA3, "sliding_window": 9}, 16),
        ({"family": Qwen3MoeForCausalLM, **EXPERTS, "num_hidden_layers": 2}, 16),
        ({"family": SmolLM3ForCausalLM, "no_rope_layers": [0, 1], "num_hidden_layers": 2}, 16),
        (
            {
                "family": Phi3ForCausalLM,
                "num_hidden_layers": 2,
                "rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": 0.75},
                "pad_token_id": None,
            },
            16,
        ),
    ],
)
def test_logits_match_transformers(tmp_path: Path, shape: dict[str, Any], block_size: int) -> None:
    oracle = save_model(tmp_path, **{**SMALL, **shape})
    check_logits(tmp_path, oracle, block_size=block_size)


@cpu_only
def test_gemma_is_not_computed_in_float16(tmp_path: Path) -> None:
    save_model(tmp_path, **SMALL, family=Gemma3ForCausalLM)
    with pytest.raises(ModelError, match="dtype: float16 is too narrow for Gemma 3"):
        logits_of_steps(tmp_path, dtype="float16")


def distance(logits: list[torch.Tensor], exact: list[torch.Tensor]) -> float:
    return float((torch.cat(logits) - torch.cat(exact)).norm() / torch.cat(exact).norm())


@dataclass(frozen=True)
class Oracle:
    path: Path
    exact: list[torch.Tensor]
    rounded_error: float  # of transformers in bfloat16


@pytest.fixture(scope="module")
def rounded(tmp_path_factory: pytest.TempPathFactory) -> Oracle:
    path = tmp_path_factory.mktemp("rounded")
    model = save_model(path, dtype=torch.bfloat16, **LARGER)
    logits = logits_of_oracle(model.to(DEVICE))
    exact = logits_of_oracle(model.float())
    return Oracle(path, exact, distance(logits, exact))


@pytest.mark.parametrize("name", by_device(cpu=["triton"], gpu=BACKENDS))
def test_logits_are_as_close_as_those_of_transformers(name: str, rounded: Oracle) -> None:
    """They round differently. Ours may have twice the error of theirs, on a CPU in float32."""
    make_backend(name, LARGER_HEADS, LARGER_DTYPE)  # skips what is not there
    logits = logits_of_steps(rounded.path, attention=name, dtype=str(LARGER_DTYPE)[6:])
    pairs = list(zip(logits, rounded.exact, STEPS, strict=True))
    for phase in (True, False):
        steps = [pair[:2] for pair in pairs if all(n == 1 for _, n in pair[2]) == phase]
        if steps:
            error = distance(*map(list, zip(*steps, strict=True)))
            print(f"decodes {phase}: error {error:.1e}, transformers {rounded.rounded_error:.1e}")
            assert error <= 2 * rounded.rounded_error


def poison(runner: ModelRunner) -> None:
    for cache in runner._model.caches:
        cache.fill_(torch.nan)


def test_padded_steps_on_static_buffers_equal_eager_ones(
    small_dir: Path, tokens: list[list[int]]
) -> None:
    """In tokens, in the cache, and in the part of it that nobody may write. A product of more rows
    may add in another order: on a GPU, where tokens would differ, eager steps are padded too."""
    caches = []
    for platform, captures in (
        by_device(cpu=(GpuPlatform, False), gpu=(Uncaptured, True)),
        (GpuPlatform, True),
    ):
        runner, batch = make_runner(small_dir, platform, captures=captures, block_size=16)
        poison(runner)
        assert decode(runner, batch) == tokens
        caches.append(runner._model.caches[0])
    eager, padded = caches
    tolerance = by_device(cpu=1e-5, gpu=0)
    torch.testing.assert_close(padded, eager, rtol=tolerance, atol=tolerance, equal_nan=True)
    unwritten = eager[0].isnan().flatten(2).all(2).sum().item()
    assert unwritten == NUM_BLOCKS * 16 - sum(batch.contexts.values())


@cpu_only
@pytest.mark.parametrize("captures", [False, True])
def test_features_equal_those_of_a_cpu(small_dir: Path, captures: bool) -> None:
    """They run beside the graphs, which know nothing of them."""
    cpu = ModelRunner(worker_settings(small_dir, max_num_seqs=MAX_NUM_SEQS))
    cpu.configure(1, NUM_BLOCKS)
    theirs = decode_with_features(cpu, Batch(limits(vocab_size=VOCAB, num_blocks=NUM_BLOCKS)))
    runner, batch = make_runner(
        small_dir, captures=captures, block_size=16, max_num_batched_tokens=32
    )
    ours = decode_with_features(runner, batch)
    for here, there in zip(ours, theirs, strict=True):
        assert here.token_ids.tolist() == there.token_ids.tolist()
        assert here.logprob_ids.tolist() == there.logprob_ids.tolist()
        np.testing.assert_allclose(here.logprob_values, there.logprob_values, atol=1e-4)
    assert [len(result.logprob_ids) for result in ours] == [1 + 4 + 17 * 3, 5, 1, 1, 1]


@cpu_only
def test_fa3(
    small_dir: Path,
    tmp_path: Path,
    flash_attention_3: FlashAttention3Ops,
    tokens: list[list[int]],
) -> None:
    runner, batch = make_runner(small_dir, attention="fa3", block_size=16)
    assert runner.info.attention_backend == "fa3"
    assert decode(runner, batch) == tokens
    # What layers share is computed once per step.
    oracle = save_model(tmp_path, **{**SMALL, "num_hidden_layers": 2})
    flash_attention_3.calls.clear()
    check_logits(tmp_path, oracle, attention="fa3", block_size=16)
    probes = 1  # with a call: `attention.probe`
    calls = flash_attention_3.calls
    assert calls.count("fwd") - probes == 2 * (calls.count("schedule") - probes) > 0


@cpu_only
def test_flash_attn(small_dir: Path, flash_attention_2: list[str], tokens: list[list[int]]) -> None:
    """Without FlashAttention 3, auto takes FlashAttention 2 for prompts."""
    runner, batch = make_runner(small_dir, attention="auto")
    assert (runner.info.attention_backend, runner.info.paging.block_size) == ("flash_attn", 256)
    assert decode(runner, batch) == tokens
    assert flash_attention_2


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_half_precision(small_dir: Path, dtype: str) -> None:
    """Another test shows how exact it is; this shows that no dtypes are mixed, nothing overflows,
    and nothing is read that was not written."""
    runner, batch = make_runner(small_dir, captures=False, block_size=16, dtype=dtype)
    poison(runner)
    tokens = np.concatenate(decode(runner, batch))
    assert ((tokens >= 0) & (tokens < VOCAB)).all()
