"""Attention backends against the reference, through the interface that the model uses."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
import torch

from bench.gpu.steps import QWEN_0_6B, QWEN_8B, Heads
from shared.graph_sizes import GraphSize
from tests.worker_svc.device import DEVICE, ODD, by_device, generator, gpu_only
from tests.worker_svc.harness import Batch, limits, worker_settings
from tests.worker_svc.kernels.triton.caches import dequantized, store_reference
from tests.worker_svc.kernels.triton.precision import poisoned_memory, relative_error, row_bound
from tests.worker_svc.platforms import GpuPlatform, make_backend
from worker_svc.attention import fa3, flash_attn
from worker_svc.attention.base import AttentionShape, KvDtype
from worker_svc.attention.choice import BACKENDS, HOPPER
from worker_svc.kernels.triton.paged_attention import attention_reference
from worker_svc.step.arrays import StepArrays
from worker_svc.step.padding import padded
from worker_svc.step.tensors import upload_step

# The first test of each backend compiles its kernels.
pytestmark = [pytest.mark.timeout(240), pytest.mark.usefixtures("libraries")]

LONGEST = by_device(cpu=40, gpu=4096)
# What libraries say about heads or dtypes that they were not built for.
UNSUPPORTED = ("only support", "not support", "head dimension")


class Case(NamedTuple):
    query_lens: list[int]
    context_lens: list[int]
    num_padding: int = 0


def make_cases() -> dict[str, Case]:
    rng = np.random.default_rng(0)
    short = LONGEST // 8
    rows = by_device(cpu=3, gpu=129)
    ones, contexts = [1] * rows, [1, LONGEST, *rng.integers(1, LONGEST, size=rows - 2).tolist()]
    prompts = [1, 2, 65, short, 2 * short]
    cached = [0, *rng.integers(1, short, size=4).tolist()]
    chunks = [sum(pair) for pair in zip(prompts, cached, strict=True)]
    return {
        "decodes": Case(ones, contexts),
        "padded decodes": Case(ones, contexts, num_padding=3),
        "a long decode": Case([1], [2 * LONGEST]),  # in parts, and over several blocks
        "prompts": Case(prompts, prompts),
        "chunks": Case(prompts, chunks),
        "chunks after few decodes": Case(ones[:9] + prompts, contexts[:9] + chunks),
        "chunks after many decodes": Case(ones + prompts, contexts + chunks),
    }


CASES = make_cases()


def make_step(case: Case, block_size: int) -> tuple[StepArrays, np.ndarray, int]:
    """Makes a step -> it, the slots of everything its sequences have in the cache, and the cache's
    blocks."""
    num_blocks = sum(-(-context // block_size) for context in case.context_lens) + 1
    batch = Batch(
        limits(
            vocab_size=1,
            num_blocks=num_blocks,
            block_size=block_size,
            max_num_seqs=len(case.query_lens),
            max_num_batched_tokens=sum(case.context_lens),
            max_model_len=max(case.context_lens),
        )
    )
    lengths = list(enumerate(zip(case.query_lens, case.context_lens, strict=True)))
    cached = [(seq, [0] * (context - new)) for seq, (new, context) in lengths if context > new]
    steps = [batch.step(cached)] if cached else []
    steps.append(batch.step([(seq, [0] * new) for seq, (new, _) in lengths]))
    slots = np.concatenate([step.slot_mapping for step in steps])
    step = steps[-1]
    if case.num_padding:
        step = padded(step, GraphSize(step.num_seqs + case.num_padding, 0, 0))
    return step, slots, num_blocks


@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
@pytest.mark.parametrize(
    "dtype", by_device(cpu=[torch.float32], gpu=[torch.bfloat16, torch.float16]), ids=str
)
@pytest.mark.parametrize(
    "heads", by_device(cpu=[Heads(4, 2, 40)], gpu=[QWEN_0_6B, QWEN_8B, ODD]), ids=str
)
@pytest.mark.parametrize(
    ("name", "kv_dtype"),
    [*((each, "auto") for each in BACKENDS), ("triton", "int8"), ("triton", "fp8")],
)
def test_equals_the_reference(
    name: str,
    kv_dtype: KvDtype,
    heads: Heads,
    dtype: torch.dtype,
    case: Case,
    record_property: Callable[[str, object], None],
) -> None:
    """The numbers that a cache in 8 bits stands for count.

    For our kernels, slots that no sequence has written hold NaN. Libraries' kernels may load
    them and give them weight 0, so there a cache is zeros at first, and then what others have
    left."""
    backend = make_backend(name, heads, dtype, kv_dtype, windows=(None, LONGEST // 8))
    step, slots, num_blocks = make_step(case, backend.block_size)
    tensors = upload_step(step, backend.plan_column(step), DEVICE)
    random = generator(seed=len(slots))

    def normal(rows: int, count: int) -> torch.Tensor:
        size = rows, count, heads.head_dim
        return torch.randn(size, generator=random, device=random.device).to(dtype)

    # Queries twice as large as usual: widely differing weights make a wrong maximum visible.
    q = 2 * normal(len(step.positions), heads.heads)
    k, v = normal(len(slots), heads.kv_heads), normal(len(slots), heads.kv_heads)
    cache = backend.allocate(num_blocks)[0]
    assert not cache.any()

    def error(unwritten: float, window: int | None) -> float:
        cache.fill_(unwritten if kv_dtype == "auto" else -1)  # the bits of NaN
        store_reference(k, v, torch.from_numpy(slots).to(DEVICE), cache)
        metadata = backend.plan(step, tensors, max(LONGEST, int(step.context_lens.max())))
        try:
            with poisoned_memory():
                out = backend.attend(q, cache, metadata, window).view(q.shape)
        except RuntimeError as failure:
            if name != "triton" and any(text in str(failure) for text in UNSUPPORTED):
                pytest.skip(f"{name} does not take {heads}, {dtype}: {failure}")
            raise
        exact = attention_reference(
            q,
            dequantized(cache),
            tensors.query_starts.diff(),
            tensors.context_lens,
            tensors.block_table,
            tensors.table_offsets,
            backend.shape.scale,
            window,
        )
        # Nobody reads what libraries' kernels leave in padding.
        rows = len(step.positions) - (case.num_padding if name != "triton" else 0)
        return relative_error(out[:rows], exact[:rows])

    for window in (None, LONGEST // 8):
        with_nan = error(torch.nan, window)
        record_property(f"window {window}: error where unwritten slots are NaN", with_nan)
        found = with_nan if name == "triton" else error(100.0, window)
        print(f"relative error {found:.1e}, where unwritten slots are NaN {with_nan:.1e}")
        assert found <= 2 * row_bound(dtype)


@gpu_only
@pytest.mark.parametrize(("name", "load"), [("fa3", fa3.load), ("flash_attn", flash_attn.load)])
def test_an_installed_library_can_be_used(name: str, load: Callable[[], bool]) -> None:
    """Tried on a typical model. Other tests skip a library that cannot be used, even one that is
    called wrongly."""
    if not load():
        pytest.skip(f"{name} is not installed")
    if name == "fa3" and torch.cuda.get_device_capability() != HOPPER:
        pytest.skip("it is for Hopper GPUs")
    settings = worker_settings(Path(), attention=name)
    shape = AttentionShape((None,), *QWEN_0_6B, torch.bfloat16, DEVICE)
    assert GpuPlatform(settings).attention_backend(settings, shape).name == name
