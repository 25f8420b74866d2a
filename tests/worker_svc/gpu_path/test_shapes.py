"""The forward pass of public models' sizes on tensors without memory: devices, dtypes and shapes of
every launch, without a GPU or memory for the weights."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from triton.runtime.jit import KernelInterface

from tests.worker_svc.harness import Batch, limits
from tools.make_model import model_config
from worker_svc.attention.triton_backend import TritonBackend
from worker_svc.devices.warm_up import NUM_LOGPROBS, warm_up_steps
from worker_svc.kernels.triton import ops as triton_ops
from worker_svc.kv_cache import TokenCache, copy_blocks
from worker_svc.layers.embedding import VocabParallelHead, VocabPartition
from worker_svc.loader import WeightLoader
from worker_svc.models.config import load_model_config
from worker_svc.models.decoder import attention_shape
from worker_svc.models.registry import load_model
from worker_svc.ranks.distributed import TensorParallel
from worker_svc.sampling.features import FeatureRunner
from worker_svc.sampling.logprobs import PIECE
from worker_svc.sampling.sampler import Sampler
from worker_svc.step.arrays import StepArrays
from worker_svc.step.tensors import StepTensors, host_columns

GPU = torch.device("meta")
MAX_MODEL_LEN = 4096
VOCAB_SIZE = 151_936


class FakeReader:
    """Gives shapes without contents."""

    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype = dtype
        self.device = GPU

    def read_into(
        self, out: torch.Tensor, name: str, *, dim: int = 0, start: int | None = None
    ) -> None:
        assert out.device == GPU, name
        assert out.dtype == self.dtype, name

    def has(self, name: str) -> bool:
        return False

    def skip(self, name: str) -> None: ...

    def check_all_read(self) -> None: ...


@dataclass(frozen=True)
class Launch:
    kernel: str
    grid: tuple[int, ...]
    tensors: tuple[torch.Tensor, ...]


@contextmanager
def recorded(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Launch]]:
    """Records kernels instead of running them."""
    launches: list[Launch] = []

    def launcher(kernel: Any, grid: Any) -> Any:
        def launch(*args: Any, **kwargs: Any) -> None:
            tensors = tuple(a for a in (*args, *kwargs.values()) if isinstance(a, torch.Tensor))
            launches.append(Launch(kernel.fn.__name__, grid, tensors))

        return launch

    with monkeypatch.context() as patched:
        patched.setattr(KernelInterface, "__getitem__", launcher)
        yield launches


def make_step(query_lens: list[int], context_lens: list[int], block_size: int) -> StepArrays:
    batch = Batch(limits(block_size=block_size, max_model_len=MAX_MODEL_LEN))
    lengths = list(enumerate(zip(query_lens, context_lens, strict=True)))
    batch.contexts = {seq: context - new for seq, (new, context) in lengths}
    return batch.step([(seq, [0] * new) for seq, (new, _) in lengths])


def on_gpu(arrays: list[np.ndarray]) -> StepTensors:
    return StepTensors(
        *(torch.empty(len(a), dtype=torch.from_numpy(a.copy()).dtype, device=GPU) for a in arrays)
    )


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    ("name", "ranks"),
    [
        ("qwen3-0.6b", 1),
        ("qwen3-1.7b", 2),
        ("qwen3-4b", 1),
        ("qwen3-8b", 2),
        ("qwen3-14b", 4),
        ("qwen3-32b", 1),
        ("qwen3-32b", 8),
        ("qwen2.5-0.5b", 2),
        ("qwen2.5-7b", 4),
        ("qwen2.5-72b", 8),
        ("llama-3.2-1b", 1),
        ("llama-3.1-8b", 2),
        ("llama-3.1-70b", 8),
    ],
)
def test_forward(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, ranks: int, dtype: torch.dtype
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(model_config(name)))
    config = replace(load_model_config(tmp_path), dtype=dtype)
    steps = {"decodes": ([1] * 5, [600] * 5), "mixed": ([1, 700, 30], [33, 700, 90])}
    for query_lens, context_lens in steps.values():
        with recorded(monkeypatch) as launches:
            tp = TensorParallel(ranks - 1, ranks)  # the last: its vocabulary is padded
            backend = TritonBackend(attention_shape(config, ranks, GPU), 64, num_sms=132)
            reader: Any = FakeReader(dtype)
            loader = WeightLoader(reader, triton_ops)
            model = load_model(loader, config, MAX_MODEL_LEN, triton_ops, tp, backend)
            vocab = VocabPartition(config.vocab_size, tp.rank, ranks)
            step = make_step(query_lens, context_lens, backend.block_size)
            tensors = on_gpu(host_columns(step, backend.plan_column(step)))
            last_tokens = torch.zeros(8, dtype=torch.int32, device=GPU)
            metadata = [backend.plan(step, tensors, max(context_lens))]
            hidden = model.hidden_states(tensors, last_tokens, backend.allocate(16), metadata)
            logits = model.lm_head(hidden)
            sampler = Sampler(vocab, tp, triton_ops)
            tokens = sampler(logits, tensors.temperatures, tensors.uniforms)

        assert logits.shape == (len(query_lens), vocab.shard_size)
        assert (logits.dtype, logits.device) == (dtype, GPU)
        assert (tokens.shape, tokens.dtype, tokens.device) == (
            (len(query_lens),),
            torch.int32,
            GPU,
        )
        for launch in launches:
            assert all(size > 0 for size in launch.grid), launch
            assert all(size < 65536 for size in launch.grid[1:]), launch
            for tensor in launch.tensors:
                assert tensor.device == GPU, launch
                assert tensor.dtype in (dtype, torch.int32, torch.float32, torch.float64), launch
        # Besides the layers: embedding, last norm, two of the sampler. Products may be cuBLAS's.
        others = [launch for launch in launches if launch.kernel != "_thin_kernel"]
        per_layer = (len(others) - 4) / config.num_layers
        print(f"{name}, {ranks} ranks: {len(launches)} launches, {per_layer:.1f} others a layer")
        assert per_layer == (6 if step.decodes_only else 7)


@pytest.mark.parametrize("ranks", [1, 4])
def test_features(monkeypatch: pytest.MonkeyPatch, ranks: int) -> None:
    """Samples with all of them, and scores a prompt."""
    prompts, decodes = warm_up_steps(5, 2000, False, MAX_MODEL_LEN, 64, 1, VOCAB_SIZE)
    assert prompts.prompt_targets
    assert decodes.features
    with recorded(monkeypatch) as launches:
        tp = TensorParallel(ranks - 1, ranks)
        vocab = VocabPartition(VOCAB_SIZE, tp.rank, ranks)
        weight = torch.empty(vocab.shard_size, 64, dtype=torch.bfloat16, device=GPU)
        head = VocabParallelHead(triton_ops.pack(weight, weight.dtype))
        runner = FeatureRunner(vocab, tp, triton_ops, head, to_gpu)
        tensors = on_gpu(host_columns(decodes, decodes.query_lens[:0]))
        logits = head(torch.empty(8, 64, dtype=torch.bfloat16, device=GPU))  # padded
        tokens = torch.zeros(8, dtype=torch.int32, device=GPU)
        history = TokenCache.allocate(16, 64, GPU)
        scores = runner.sample(decodes.features, decodes, tensors, logits, tokens, history)
        hidden = torch.empty(prompts.num_tokens, 64, dtype=torch.bfloat16, device=GPU)
        scores += runner.score(prompts.prompt_targets, prompts, hidden)
        copy_blocks([torch.empty(2, 16, 64, 2, 8, device=GPU)], history, tokens[:2], tokens[2:4])
    assert [len(each.ids) for each in scores] == [5, PIECE]
    for each in scores:
        assert each.ids.shape == each.values.shape == (len(each.ids), 1 + NUM_LOGPROBS)
        assert (each.ids.dtype, each.ids.device) == (torch.int32, GPU)
        assert (each.values.dtype, each.values.device) == (torch.float32, GPU)
    assert launches
    for launch in launches:
        assert all(size > 0 for size in launch.grid), launch
        assert all(tensor.device == GPU for tensor in launch.tensors), launch


def to_gpu(arrays: Sequence[np.ndarray]) -> list[torch.Tensor]:
    """Stands in for `upload`."""
    dtypes = {np.float32: torch.float32, np.int32: torch.int32, np.uint32: torch.int32}
    return [torch.empty(a.size, dtype=dtypes[a.dtype.type], device=GPU) for a in arrays]
