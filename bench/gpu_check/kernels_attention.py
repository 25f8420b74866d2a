"""The attention kernels against their reference."""

from __future__ import annotations

import numpy as np
import torch

from bench.gpu_check.inputs import Batch, poisoned, random_batch, relative_error, rounding
from bench.gpu_check.records import Report
from bench.gpu_check.setup import QWEN_0_6B, Heads, Setup
from worker_svc.kernels.decode_attention import decode_attention, decode_workspace
from worker_svc.kernels.kv_store import store_kv
from worker_svc.kernels.prompt_attention import prompt_attention, query_tiles, tile_tokens
from worker_svc.step import Int32s
from worker_svc.step_tensors import StepTensors


def check_decode(setup: Setup, report: Report) -> None:
    """Contexts of any length, a padding row among them, in one part and in several."""
    rng = np.random.default_rng(setup.part_seed("decode"))
    longest = setup.sizes.longest
    for dtype, heads, block_size in _cases(setup):
        # On both sides of the boundaries of blocks, and the longest.
        edges = [1, block_size - 1, block_size, block_size + 1, longest]
        for rows in setup.sizes.decode_batches:
            case = f"{rows} x {heads}, blocks of {block_size}, {_name(dtype)}"
            contexts = rng.integers(1, longest // 2, size=rows).tolist()
            contexts[: len(edges)] = edges[: len(contexts)]
            batch = random_batch(
                setup.generator(case),
                [1] * rows,
                contexts,
                heads,
                block_size,
                dtype,
                pad_to=rows + 1,
            )
            cache = filled_cache(batch, block_size)
            exact = batch.reference(cache, _scale(heads))
            for splits in setup.sizes.splits:
                error = relative_error(_decode(batch, cache, splits), exact)
                report.check(f"{case}, {splits} parts", error, _bound(dtype))


def check_prompt(setup: Setup, report: Report) -> None:
    """Whole prompts, chunks after a cached prefix, and single queries beside them."""
    rng = np.random.default_rng(setup.part_seed("prompt"))
    longest = setup.sizes.longest
    for number, (dtype, heads, block_size) in enumerate(_cases(setup)):
        queries = [1, 64, 65, longest // 8 - 1, longest // 4]
        queries = [min(max(length, 1), longest) for length in queries]
        cached = [0, 0, block_size, *rng.integers(longest // 4, size=2).tolist()]
        contexts = [sum(pair) for pair in zip(queries, cached, strict=True)]
        batch = random_batch(
            setup.generator(f"prompt {number}"), queries, contexts, heads, block_size, dtype
        )
        cache = filled_cache(batch, block_size)
        error = relative_error(_prompt(batch, cache), batch.reference(cache, _scale(heads)))
        case = f"{sum(queries)} x {heads}, blocks of {block_size}, {_name(dtype)}"
        report.check(case, error, _bound(dtype))


def check_large_cache(setup: Setup, report: Report) -> None:
    """Of Qwen3-0.6B's heads, at its end: offsets that 32 bits cannot hold."""
    dtype, block_size, heads = setup.dtype, 64, QWEN_0_6B
    per_block = block_size * heads.kv_heads * heads.head_dim
    blocks = -(-setup.sizes.large_cache_elements // per_block)
    size = (2, blocks, block_size, heads.kv_heads, heads.head_dim)
    cache = torch.empty(size, dtype=dtype, device=setup.device)
    for name, queries, contexts in (("decodes", [1] * 3, [1, 64, 130]), ("prompts", [30], [100])):
        last = range(blocks - 8, blocks)
        generator = setup.generator(f"large {name}")
        batch = random_batch(generator, queries, contexts, heads, block_size, dtype, blocks=last)
        slots = torch.from_numpy(batch.slots).to(setup.device)
        store_kv(batch.k, batch.v, slots, cache)
        # The same in a cache that begins with these blocks.
        small = torch.empty(2, 8, *size[2:], dtype=dtype, device=setup.device)
        store_kv(batch.k, batch.v, slots - (blocks - 8) * block_size, small)
        stored = cache[:, blocks - 8 :]
        written = (slots - (blocks - 8) * block_size).long()
        different = (stored.flatten(1, 2)[:, written] != small.flatten(1, 2)[:, written]).sum()
        report.check(f"{name}, stored", float(different), 0, "elements that differ")
        out = _decode(batch, cache, 1) if name == "decodes" else _prompt(batch, cache)
        error = relative_error(out, batch.reference(cache, _scale(heads)))
        report.check(name, error, _bound(dtype))


def filled_cache(batch: Batch, block_size: int) -> torch.Tensor:
    blocks = int(batch.step.block_table.max()) + 1
    size = (2, blocks, block_size, *batch.k.shape[1:])
    cache = torch.full(size, torch.nan, dtype=batch.k.dtype, device=batch.k.device)
    store_kv(batch.k, batch.v, torch.from_numpy(batch.slots).to(cache.device), cache)
    return cache


def _decode(batch: Batch, cache: torch.Tensor, splits: int) -> torch.Tensor:
    tensors = batch.tensors(np.arange(batch.step.num_seqs, dtype=np.int32))
    rows, heads, head_dim = batch.q.shape
    with poisoned():
        workspace = decode_workspace(rows, heads, head_dim, splits, cache.device)
        out = torch.empty_like(batch.q)
        sequences = _sequences(tensors, head_dim)
        decode_attention(batch.q, cache, tensors.attention, *sequences, splits, workspace, out)
    return out


def _prompt(batch: Batch, cache: torch.Tensor) -> torch.Tensor:
    tensors = batch.tensors(prompt_tiles(batch))
    with poisoned():
        out = torch.empty_like(batch.q)
        tiles = tensors.attention.view(-1, 2)
        prompt_attention(batch.q, cache, tiles, *_sequences(tensors, batch.q.shape[2]), out)
    return out


def prompt_tiles(batch: Batch) -> Int32s:
    """Of all sequences, flat."""
    step = batch.step
    seqs = np.arange(step.num_seqs, dtype=np.int32)
    _, heads, head_dim = batch.q.shape
    tokens = tile_tokens(head_dim, heads // batch.k.shape[1], batch.q.dtype)
    return query_tiles(step.query_lens, seqs, tokens, step.context_lens).ravel()


def _sequences(
    tensors: StepTensors, head_dim: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, float]:
    return (
        tensors.query_starts,
        tensors.context_lens,
        tensors.block_table,
        tensors.table_offsets,
        head_dim**-0.5,
    )


def _cases(setup: Setup) -> list[tuple[torch.dtype, Heads, int]]:
    """All heads in the first dtype and the first heads in the others, since each is compiled; in
    turn all block sizes, of which the first heads get two."""
    heads, sizes = setup.sizes.heads, setup.sizes.block_sizes
    first, *others = setup.sizes.dtypes
    cases = [(first, each, sizes[n % len(sizes)]) for n, each in enumerate(heads, start=1)]
    return cases + [(dtype, heads[0], sizes[0]) for dtype in others]


def _bound(dtype: torch.dtype) -> float:
    """The weights are rounded, and the result."""
    return 2 * rounding(dtype)


def _scale(heads: Heads) -> float:
    return float(heads.head_dim**-0.5)


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
