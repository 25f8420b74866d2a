"""`BATCH_INVARIANT`: the bits of a row are the same alone, among others, and in any chunk.

In the interpreter this shows that the order of sums does not depend on other rows. On a GPU, it
also shows that its instructions do not.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

import numpy as np
import pytest
import torch

from bench.gpu.steps import QWEN_0_6B, Heads
from tests.worker_svc.device import DEVICE, by_device, generator, int32
from tests.worker_svc.kernels.triton.attention_cases import Batch, random_batch
from tests.worker_svc.kernels.triton.caches import dequantized, store_reference
from tests.worker_svc.kernels.triton.precision import poisoned_memory, relative_error
from tests.worker_svc.kernels.triton.weights import random_weight
from tests.worker_svc.random_batches import run_batches
from worker_svc.kernels.ops import Experts, PackedWeight
from worker_svc.kernels.triton import batch_invariance, ops
from worker_svc.kernels.triton.decode_attention import decode_workspace
from worker_svc.kernels.triton.paged_attention import Tiling
from worker_svc.kernels.triton.prompt_attention import prompt_attention, query_tiles, tile_tokens
from worker_svc.kernels.triton.quantized.products import choose_splits
from worker_svc.kernels.triton.quantized_cache import SCALE_BYTES
from worker_svc.layers.embedding import VocabPartition
from worker_svc.ranks.distributed import TensorParallel
from worker_svc.sampling.logprobs import LogprobScorer
from worker_svc.sampling.sampler import Sampler
from worker_svc.weights.quantization.quantize import quantize

ROWS = [*range(1, 65), 65, 130, 270]
OUTS, COLUMNS = by_device(cpu=(40, 256), gpu=(1024, 4096))
SEGMENT = by_device(cpu=32, gpu=128)


@pytest.fixture(autouse=True)
def invariant() -> Iterator[None]:
    batch_invariance.switch(True)
    yield
    batch_invariance.switch(False)


def random(*size: int, seed: int = 0, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    source = generator(seed)
    return torch.randn(size, generator=source, device=source.device).to(dtype)


def weights() -> dict[str, PackedWeight]:
    plain = random(OUTS, COLUMNS, seed=1)
    found = {
        "bfloat16": ops.pack(plain, torch.bfloat16),
        "float32": ops.pack(plain.float(), torch.float32),
    }
    for name, groups, zeros in (("int8", 1, False), ("fp8", 1, False), ("int4", 8, True)):
        weight = random_weight(name, OUTS, COLUMNS, groups=groups, zeros=zeros)
        found[name] = ops.pack(weight, torch.bfloat16)
    return found


def assert_rows_alone(
    run: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor, counts: list[int]
) -> None:
    """Runs random rows of x, as many as each of `counts`, in any order: each has the same bits."""
    expected, source = run(x), np.random.default_rng(0)
    for count in counts:
        rows = torch.from_numpy(source.permutation(len(x))[:count]).to(x.device)
        found = run(x[rows])
        assert torch.equal(found, expected[rows]), count


@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("name", ["bfloat16", "float32", "int8", "fp8", "int4"])
def test_products(name: str, has_bias: bool) -> None:
    weight = weights()[name]
    dtype = torch.float32 if name == "float32" else torch.bfloat16
    bias = random(OUTS, seed=2, dtype=dtype) if has_bias else None
    with poisoned_memory():
        assert_rows_alone(lambda x: weight.matmul(x, bias), random(270, COLUMNS, dtype=dtype), ROWS)


def test_a_plain_product_is_right_and_its_columns_are_divided() -> None:
    weight = weights()["bfloat16"]
    for rows in (1, 64, 65, 270):
        x = random(rows, COLUMNS)
        expected = x.double() @ random(OUTS, COLUMNS, seed=1).double().T
        assert relative_error(weight.matmul(x, None), expected) < 0.01
        out = torch.empty(rows, OUTS, dtype=x.dtype, device=x.device)
        assert weight.matmul_into(x, out) is out  # type: ignore[attr-defined]
        assert torch.equal(out, weight.matmul(x, None))
    assert choose_splits(1, OUTS, COLUMNS // 64) > 1


@pytest.mark.parametrize("name", ["bfloat16", "int8", "int4"])
def test_experts(name: str) -> None:
    size, hidden, count = 32, 16, 4

    def pack(outs: int, columns: int, seed: int) -> PackedWeight:
        if name == "bfloat16":
            each = [random(outs, columns, seed=seed + i) for i in range(count)]
            return ops.pack_experts(each, count, torch.bfloat16, torch.empty)
        codes = [random_weight(name, outs, columns, seed=seed + i) for i in range(count)]
        return ops.pack_experts(codes, count, torch.bfloat16, torch.empty)

    gate_up, down = pack(2 * hidden, size, 10), pack(size, hidden, 20)
    experts = Experts(count, range(count), 3, normalized=False, activation="silu")
    router = random(count, size, seed=30).float()

    def run(x: torch.Tensor) -> torch.Tensor:
        logits = torch.stack([router @ each for each in x.float()])
        return ops.mix_experts(x, logits, gate_up, down, experts)

    assert_rows_alone(run, random(40, size) / 1000, [1, 2, 7, 33])


Chunk = tuple[int, int, int]  # a sequence, and its first and last position, exclusive


def attend(batch: Batch, chunks: list[Chunk]) -> list[torch.Tensor]:
    """Attends as a worker does, with single tokens apart from the others -> each chunk's results.
    The batch has a query for each position."""
    starts = batch.query_starts.tolist()
    rows = [starts[seq] + place for seq, start, stop in chunks for place in range(start, stop)]
    lens = np.array([stop - start for _, start, stop in chunks], np.int32)
    contexts = np.array([stop for *_, stop in chunks], np.int32)
    offsets = batch.table_offsets.tolist()
    tables = [batch.block_table[offsets[seq] : offsets[seq + 1]] for seq, *_ in chunks]
    part = replace(
        batch,
        q=batch.q[rows].contiguous(),
        query_starts=int32(*np.cumsum([0, *lens]).tolist()),
        context_lens=int32(*contexts.tolist()),
        block_table=torch.cat(tables),
        table_offsets=int32(*np.cumsum([0, *map(len, tables)]).tolist()),
    )
    out = torch.full_like(part.q, torch.nan)
    heads, head_dim = part.q.shape[1:]
    tokens = tile_tokens(head_dim, heads // part.cache.shape[3], part.q.dtype, small=True)
    tiling = by_device(cpu=Tiling(16, num_warps=4, num_stages=2), gpu=None)
    arguments = *part.sequences, out, tiling, part.window, SEGMENT
    with poisoned_memory():
        if len(long := np.flatnonzero(lens > 1).astype(np.int32)):
            tiles = torch.from_numpy(query_tiles(lens, long, tokens, contexts)).to(DEVICE)
            prompt_attention(part.q, part.cache, tiles, *arguments)
        if len(decodes := np.flatnonzero(lens == 1).astype(np.int32)):
            tiles = torch.from_numpy(np.stack([decodes, 0 * decodes], 1)).to(DEVICE)
            parts = -(-int(contexts.max()) // SEGMENT)
            partials = decode_workspace(len(decodes), heads, head_dim, parts, DEVICE)
            prompt_attention(part.q, part.cache, tiles, *arguments, partials)
    return list(out.split(lens.tolist()))


def random_cuts(source: np.random.Generator, contexts: list[int]) -> list[Chunk]:
    """Cuts sequences into chunks, of which some have one token, in any order."""
    chunks = []
    for seq, context in enumerate(contexts):
        start = 0
        while start < context:
            stop = min(start + int(source.choice([1, 2, 7, 30, 100])), context)
            chunks.append((seq, start, stop))
            start = stop
    return [chunks[i] for i in source.permutation(len(chunks))]


@pytest.mark.parametrize("window", [None, 5, 40])
@pytest.mark.parametrize("cache", ["own", "int8", "fp8"])
def test_attention(cache: str, window: int | None) -> None:
    """In chunks, alone and among others, at either side of the bounds of parts."""
    contexts = by_device(cpu=[70, 33], gpu=[200, 63, 65, 129])
    heads = by_device(cpu=Heads(2, 1, 16), gpu=QWEN_0_6B)
    shape = {**heads._asdict(), "dtype": torch.bfloat16}
    batch = random_batch(contexts, contexts, seed=0, window=window, **shape)
    if cache != "own":
        kind = {"int8": torch.int8, "fp8": torch.uint8}[cache]
        batch = replace(batch, cache=in_8_bits(batch.cache, kind))
    source = np.random.default_rng(0)
    every = [(seq, place, place + 1) for seq, n in enumerate(contexts) for place in range(n)]
    results = attend(batch, every)
    expected = {chunk[:2]: result[0] for chunk, result in zip(every, results, strict=True)}
    exact = replace(batch, cache=dequantized(batch.cache)).reference().split(contexts)
    found = torch.stack([expected[seq, place] for seq, place, _ in every])
    assert relative_error(found, torch.cat(exact)) < 0.02
    for _ in range(2):
        chunks = random_cuts(source, contexts)
        for (seq, start, stop), result in zip(chunks, attend(batch, chunks), strict=True):
            alone = torch.stack([expected[seq, place] for place in range(start, stop)])
            assert torch.equal(result, alone), (seq, start, stop)


def in_8_bits(cache: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The same numbers, rounded, and zeros for those that are NaN."""
    _, blocks, block_size, heads, head_dim = cache.shape
    found = torch.zeros(2, blocks, block_size, heads, head_dim + SCALE_BYTES, dtype=dtype)
    found = found.to(cache.device)
    keys, values = cache.nan_to_num().flatten(1, 2)
    slots = torch.arange(blocks * block_size, device=cache.device)
    store_reference(keys, values, slots, found)
    return found


def test_sums_of_rows() -> None:
    x = random(270, 297, dtype=torch.float32)
    assert_rows_alone(ops.sum_rows, x, ROWS)
    assert relative_error(ops.sum_rows(x)[:, None], x.double().sum(1, keepdim=True)) < 1e-3
    assert_rows_alone(ops.sum_rows, x.double(), [1, 2, 64])
    assert_rows_alone(lambda x: ops.sum_squares(x, (100, 50)), x, [1, 2, 64])


def test_norms_and_activations() -> None:
    x, weight = random(270, 96), random(96, seed=1)
    assert_rows_alone(lambda x: ops.rms_norm(x, None, weight, 1e-6), x, ROWS)
    assert_rows_alone(lambda x: ops.activate_and_multiply(x, "silu"), x, ROWS)


def test_sampling_and_log_probabilities() -> None:
    """Tokens, and the log-probabilities of tokens and of the likeliest ones."""
    size = by_device(cpu=700, gpu=32_003)
    vocab = VocabPartition(size, 0, 1)
    logits = random(130, vocab.shard_size)
    temperatures = torch.rand(130, generator=generator(1), device=DEVICE).mul(2).round(decimals=1)
    uniforms = torch.rand(130, generator=generator(2), device=DEVICE, dtype=torch.float64)
    sampler = Sampler(vocab, TensorParallel(), ops)
    scorer = LogprobScorer(vocab, TensorParallel(), ops)
    tokens = sampler(logits, temperatures, uniforms)

    def run(rows: torch.Tensor) -> torch.Tensor:
        rows = rows[:, 0]
        found = sampler(logits[rows], temperatures[rows], uniforms[rows])
        assert torch.equal(found, tokens[rows])
        counts = np.full(len(rows), 3, np.int32)
        scored = scorer(lambda piece: logits[rows][piece], found, counts)
        return torch.cat((scored.ids.double(), scored.values.double()), 1)

    assert_rows_alone(run, torch.arange(130, device=DEVICE)[:, None], [1, 2, 5, 16, 33, 64])


@pytest.mark.parametrize("options", [{}, {"kv_dtype": "int8", "quantization": "int4"}], ids=str)
def test_steps_of_a_model(options: dict[str, str]) -> None:
    assert run_batches(12, **options) > 100


@pytest.mark.parametrize("what", ["ranks", "format", "mean pooling"])
def test_what_still_changes_bits(what: str) -> None:
    x, weight = random(130, COLUMNS), random(OUTS, COLUMNS, seed=1)
    whole, half = ops.pack(weight, torch.bfloat16).matmul(x, None), COLUMNS // 2
    if what == "ranks":
        parts = [
            ops.pack(weight[:, part].contiguous(), torch.bfloat16).matmul(x[:, part], None)
            for part in (slice(half), slice(half, None))
        ]
        assert not torch.equal(parts[0] + parts[1], whole)
    elif what == "format":
        codes = quantize(weight.float(), "int8")
        assert not torch.equal(ops.pack(codes, torch.bfloat16).matmul(x, None), whole)
    else:  # a frontend adds up what chunks add up in float64 and round
        hidden = random(130, OUTS, dtype=torch.float32)
        chunks = [part.sum(0, dtype=torch.float64).float() for part in hidden.split([7, 123])]
        assert not torch.equal(sum(chunks), hidden.sum(0, dtype=torch.float64).float())


def test_more_than_two_ranks_add_up_in_their_order(monkeypatch: pytest.MonkeyPatch) -> None:
    """A library might begin with any rank, by the place of a number."""
    parts = torch.tensor([[1.0], [1e8], [-1e8]])
    tp = TensorParallel(0, 3, in_order=True)
    monkeypatch.setattr(tp, "_joined", True)
    monkeypatch.setattr(tp, "all_gather", lambda x: parts)
    assert tp.all_reduce(parts[0].clone()) == parts[0] + parts[1] + parts[2]
