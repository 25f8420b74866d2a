from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    Gemma3ForCausalLM,
    GraniteForCausalLM,
    LlamaForCausalLM,
    Olmo2ForCausalLM,
    Phi3ForCausalLM,
    Qwen3MoeForCausalLM,
    SmolLM3ForCausalLM,
)

from tests.worker_svc.families import EXPERTS, GEMMA3, GRANITE
from tests.worker_svc.harness import Batch, limits, load_rank, save_model
from tests.worker_svc.kernels.cpu.eager_ops import eager
from tests.worker_svc.test_model_runner import prompts
from tests.worker_svc.thread_ranks import on_ranks
from worker_svc.attention.cpu_backend import CpuBackend
from worker_svc.kernels.cpu import traced_model
from worker_svc.kernels.cpu.program import SEQUENCES, run_timed
from worker_svc.kernels.cpu.rows import Rows, allocate
from worker_svc.kernels.cpu.traced_model import TracedModel
from worker_svc.models.decoder import Decoder
from worker_svc.ranks.distributed import TensorParallel
from worker_svc.step.arrays import StepArrays
from worker_svc.step.tensors import upload_step

CPU = torch.device("cpu")
NUM_BLOCKS = 64
MODELS: dict[str, dict[str, Any]] = {
    "Qwen3": {},
    "Qwen3, experts": {"family": Qwen3MoeForCausalLM, **EXPERTS},
    "Llama with biases": {"family": LlamaForCausalLM, "attention_bias": True, "mlp_bias": True},
    "SmolLM3": {"family": SmolLM3ForCausalLM, "no_rope_layers": [1, 0, 1]},
    "Granite": {"family": GraniteForCausalLM, **GRANITE},
    "OLMo 2": {"family": Olmo2ForCausalLM, "num_key_value_heads": 1},
    "Gemma 3": {"family": Gemma3ForCausalLM, **GEMMA3},
    "Phi-4-mini": {
        "family": Phi3ForCausalLM,
        "rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": 0.75},
    },
}
FORMATS = [("none", torch.float32), ("none", torch.bfloat16), ("int8", torch.float32)]


@dataclass
class Pair:
    """A model that runs steps traced, and operation by operation, with a cache for each."""

    model: Decoder
    backend: CpuBackend
    traced: TracedModel
    tp: TensorParallel
    batch: Batch = field(init=False)
    last_tokens: torch.Tensor = field(default_factory=lambda: torch.tensor([7, 9]).int())

    def __post_init__(self) -> None:
        self.batch = Batch(limits(num_blocks=NUM_BLOCKS, paging=self.backend.layout.paging))
        self.use_caches(self.backend.allocate(NUM_BLOCKS))

    def use_caches(self, tensors: list[torch.Tensor]) -> None:
        for tensor in tensors:
            tensor.zero_()
        self.tensors, self.eager_tensors = tensors, [tensor.clone() for tensor in tensors]
        both = self.tensors, self.eager_tensors
        self.caches, self.eager_caches = map(self.backend.layout.layers_of, both)

    def check(self, step: StepArrays, *, every_token: bool = False) -> torch.Tensor:
        """Both ways lead to the same bits."""
        tensors = upload_step(step, self.backend.plan_column(step), CPU)
        given: Any = tensors, self.last_tokens
        layers = range(len(self.eager_caches))
        tables = range(len(self.backend.layout.paging.tables))
        with eager(*given, map(self.backend.cache_of, self.eager_caches), self.tp):
            expected = self.model.hidden_states(*given, layers, tables, every_token=every_token)
        out = self.traced(*given, self.caches, None, every_token=every_token)
        assert torch.equal(out, expected)
        assert all(map(torch.equal, self.tensors, self.eager_tensors))
        return out.clone()

    def check_some_steps(self) -> None:
        """Prompts, decodes whose tokens the step before sampled, and steps of all sizes."""
        long, short, late = prompts(301, [40, 3, 90])
        self.check(self.batch.step([(0, short), (1, long)]))
        self.check(self.batch.step([(0, [-1]), (1, [-2])]))
        self.check(self.batch.step([(0, [-1]), (2, late), (1, [5])]))
        self.check(self.batch.step([(2, [-1])]), every_token=True)
        self.check(self.batch.step([(3, late), (2, [5])]), every_token=True)


def load(path: Path, quantization: str, dtype: torch.dtype, tp: TensorParallel) -> Pair:
    model = load_rank(path, tp, quantization=quantization, dtype=str(dtype)[6:], block_size=16)
    backend: Any = model.backend
    traced = TracedModel(model.decoder.hidden_states, (tp,), backend.layout, backend.cache_of)
    return Pair(model.decoder, backend, traced, tp)


@pytest.fixture
def pair(tiny_dir: Path) -> Pair:
    return load(tiny_dir, "none", torch.float32, TensorParallel())


@pytest.mark.parametrize(("quantization", "dtype"), FORMATS)
@pytest.mark.parametrize("shape", MODELS.values(), ids=MODELS)
def test_a_traced_model_equals_its_operations(
    tmp_path: Path, shape: dict[str, Any], quantization: str, dtype: torch.dtype
) -> None:
    save_model(tmp_path, **shape)
    load(tmp_path, quantization, dtype, TensorParallel()).check_some_steps()


@pytest.mark.parametrize(("quantization", "dtype"), FORMATS)
@pytest.mark.parametrize("model", ["Llama with biases", "Qwen3, experts"])
def test_on_two_ranks(tmp_path: Path, model: str, quantization: str, dtype: torch.dtype) -> None:
    """All-reduces, and the exchange of magnitudes, cut the program."""
    save_model(tmp_path, **MODELS[model])
    on_ranks(2, lambda tp: load(tmp_path, quantization, dtype, tp).check_some_steps())


@pytest.mark.parametrize("tokens", [1, 13, 64])
def test_a_large_step_runs_in_parts(
    pair: Pair, monkeypatch: pytest.MonkeyPatch, tokens: int
) -> None:
    monkeypatch.setattr(traced_model, "MAX_TOKENS", tokens)
    pair.check_some_steps()


def test_behind_the_last_attention_only_last_tokens_are_computed(
    tiny_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    long, short = prompts(301, [40, 3])

    def check(tp: TensorParallel) -> None:
        pair = load(tiny_dir, "int8", torch.float32, tp)
        step = pair.batch.step([(0, short), (1, long)])
        every = pair.check(step, every_token=True)
        rows: list[int] = []
        mlp = pair.model.layers[-1].mlp
        with monkeypatch.context() as patched:
            patched.setattr(pair.model.layers[-1], "mlp", lambda x: rows.append(len(x)) or mlp(x))
            last = pair.check(step)
        assert torch.equal(last, every[[2, 42]])
        assert rows == [2, SEQUENCES]  # step by step, and in the trace

    check(TensorParallel())
    on_ranks(2, check)


def test_new_caches(pair: Pair) -> None:
    (text,) = prompts(301, [40])
    step = pair.batch.step([(0, text)])
    out = pair.check(step)
    pair.use_caches(pair.backend.allocate(NUM_BLOCKS + 5))
    assert torch.equal(pair.check(step), out)


def test_smaller_caches_at_the_same_addresses(pair: Pair) -> None:
    """Memory that larger caches freed may be allocated again at the same address."""
    (text,) = prompts(301, [10])
    blocks = NUM_BLOCKS // 2
    pair.check(Batch(limits(num_blocks=blocks)).step([(0, text)]))
    halves = [cache.view(-1, *cache.shape[2:])[: 2 * blocks] for cache in pair.caches]
    whole = pair.caches
    pair.use_caches([half.view(2, blocks, *half.shape[1:]) for half in halves])
    assert pair.caches[0].data_ptr() == whole[0].data_ptr()
    pair.check(Batch(limits(num_blocks=blocks)).step([(0, text)]))


def test_old_caches_are_not_kept(pair: Pair) -> None:
    pair.check(pair.batch.step([(0, [1, 2, 3])]))
    freed = torch._C._WeakTensorRef(pair.caches[0])
    pair.use_caches(pair.backend.allocate(1))
    assert freed.expired()


def test_several_models_in_one_process(tmp_path: Path, pair: Pair) -> None:
    """The result of one is valid while others run."""
    save_model(tmp_path, **MODELS["Llama with biases"])
    other = load(tmp_path, "int8", torch.float32, TensorParallel())
    long, short = prompts(301, [50, 4])
    first, second = pair.batch.step([(0, long)]), pair.batch.step([(0, [-1]), (1, short)])
    tensors = upload_step(first, pair.backend.plan_column(first), CPU)
    pair.check(first)
    out = pair.traced(tensors, pair.last_tokens, pair.caches, tensors)
    kept = out.clone()
    other.check(first)
    other.check(second)
    assert torch.equal(out, kept)
    pair.check(second)


@pytest.mark.parametrize(
    "change", [lambda x: x + x, lambda x: x[:, :4], lambda x: x[:1], lambda x: x.mul_(2)]
)
def test_a_trace_that_torch_has_changed_fails_and_leaves_nothing_behind(
    pair: Pair, change: Callable[[torch.Tensor], torch.Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    step = pair.batch.step([(0, [1, 2, 3])])
    tensors = upload_step(step, pair.backend.plan_column(step), CPU)
    norm = pair.model.norm
    with monkeypatch.context() as patched:
        patched.setattr(pair.model, "norm", lambda x, residual: norm(change(x), residual))
        with pytest.raises(TypeError, match="add an operation to Ops"):
            pair.traced(tensors, pair.last_tokens, pair.caches, tensors)
    pair.check(step)


def test_more_threads_than_cores(pair: Pair, threads: Callable[[int], None]) -> None:
    for members in (7, 1, 3):  # of which the kernel often stops some between or within units
        threads(members)
        for _ in range(20):
            pair.check(pair.batch.step([(0, [1, 2, 3]), (1, [4])]))


def test_timed_phases(
    pair: Pair, monkeypatch: pytest.MonkeyPatch, threads: Callable[[int], None]
) -> None:
    threads(1)  # which then works in every phase
    times: list[Any] = []
    monkeypatch.setattr(traced_model, "run", lambda *given: times.extend(run_timed(*given)))
    pair.check(pair.batch.step([(0, [1, 2, 3])]))
    # For each layer two norms, four products, one packing, and three other phases.
    assert len(times) == 1 + 3 * 10 + 1
    assert all(each.work >= 0 and each.wait >= 0 for each in times)
    assert sum(each.work for each in times) > 0


def test_rows_that_live_at_the_same_time_share_no_memory(seed: int) -> None:
    rng = random.Random(seed)
    memory = []
    for first_use in sorted(rng.choices(range(100), k=200)):
        rows = Rows(4 * rng.randint(1, 99), 0, per_sequence=False, first_use=first_use)
        rows.last_use = first_use + rng.choice([0, 1, 2, 50])
        memory.append(rows)
    tokens = 7
    allocate(memory, tokens)
    assert all((rows.address is None) == (rows.last_use == rows.first_use) for rows in memory)
    memory = [rows for rows in memory if rows.is_read]
    for a in memory:
        assert a.address % 64 == 0
        for b in memory:
            if a is b or a.last_use < b.first_use or b.last_use < a.first_use:
                continue
            ends = (a.address + a.row_bytes * tokens, b.address + b.row_bytes * tokens)
            assert ends[0] <= b.address or ends[1] <= a.address
    assert len({rows.address for rows in memory}) < len(memory) / 2
