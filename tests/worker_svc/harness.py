"""Small models, a block allocator that cannot fail, and steps built by hand."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from shared.config import WorkerSettings
from shared.pb.worker_pb2 import StepRequest
from worker_svc.step import Step, StepLimits, decode_step

TINY: dict[str, Any] = {
    "vocab_size": 301,
    "hidden_size": 64,
    "intermediate_size": 112,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 512,
    "tie_word_embeddings": True,
}


def save_model(
    path: Path, *, dtype: torch.dtype = torch.float32, max_shard_size: str = "5GB", **overrides: Any
) -> Qwen3ForCausalLM:
    """Writes a random Qwen3 to `path` and returns it, ready to be asked for its logits."""
    torch.manual_seed(0)
    config = Qwen3Config(**{**TINY, **overrides})
    model = Qwen3ForCausalLM(config).to(dtype).eval()
    with torch.no_grad():  # defaults are 1 and 0, which would hide a norm or a bias left out
        for name, parameter in model.named_parameters():
            if "norm" in name:
                parameter.uniform_(0.5, 1.5)
            elif name.endswith("bias"):
                parameter.normal_(std=0.2)
            else:
                parameter.normal_(std=0.08)
    model.save_pretrained(path, max_shard_size=max_shard_size)
    return model


def worker_settings(model: Path, **overrides: Any) -> WorkerSettings:
    return WorkerSettings(model=str(model), device="cpu", threads=1, **overrides)


@dataclass
class Batch:
    """Sequences with block tables of their own, turned into steps of any mix."""

    limits: StepLimits
    step_id: int = 0
    contexts: dict[int, int] = field(default_factory=dict)  # tokens in the cache
    tables: dict[int, list[int]] = field(default_factory=dict)
    free: list[int] = field(default_factory=list)
    epoch: int = 1

    def __post_init__(self) -> None:
        # Neither in order nor adjacent, as after a while of serving.
        order = np.random.default_rng(0).permutation(self.limits.num_blocks)
        self.free = order.tolist()

    def request(
        self,
        chunks: Sequence[tuple[int, Sequence[int]]],
        *,
        silent: Sequence[int] = (),
        temperatures: Sequence[float] | None = None,
        seeds: Sequence[int] | None = None,
    ) -> StepRequest:
        """A step that appends `chunks` (sequence, token ids); the sequences in `silent` sample
        nothing."""
        size = self.limits.block_size
        ids: list[int] = []
        positions: list[int] = []
        slots: list[int] = []
        tables: list[int] = []
        offsets = [0]
        for seq, tokens in chunks:
            start = self.contexts.get(seq, 0)
            self.contexts[seq] = end = start + len(tokens)
            table = self.tables.setdefault(seq, [])
            while len(table) * size < end:
                table.append(self.free.pop())
            ids += tokens
            positions += range(start, end)
            slots += [table[p // size] * size + p % size for p in range(start, end)]
            tables += table
            offsets.append(len(tables))
        self.step_id += 1
        rows = len(chunks)

        def i4(values: Sequence[int]) -> bytes:
            return np.array(values, "<i4").tobytes()

        return StepRequest(
            epoch=self.epoch,
            step_id=self.step_id,
            input_ids=i4(ids),
            positions=i4(positions),
            slot_mapping=i4(slots),
            query_lens=i4([len(tokens) for _, tokens in chunks]),
            context_lens=i4([self.contexts[seq] for seq, _ in chunks]),
            block_table=i4(tables),
            block_table_offsets=i4(offsets),
            samples=bytes(int(seq not in silent) for seq, _ in chunks),
            temperatures=np.array(temperatures or [0.0] * rows, "<f4").tobytes(),
            seeds=np.array(seeds or [0] * rows, "<u8").tobytes(),
        )

    def step(self, chunks: Sequence[tuple[int, Sequence[int]]], **kwargs: Any) -> Step:
        """The same, decoded. The step before counts as one with as many rows, all sampling."""
        request = self.request(chunks, **kwargs)
        request.step_id = 1
        known = np.maximum(np.frombuffer(request.input_ids, "<i4"), 0).tobytes()
        step = decode_step(_replaced(request, input_ids=known), self.limits, None)
        return Step(**{**step.__dict__, "input_ids": np.frombuffer(request.input_ids, "<i4")})


def _replaced(request: StepRequest, **fields: Any) -> StepRequest:
    other = StepRequest()
    other.CopyFrom(request)
    for name, value in fields.items():
        setattr(other, name, value)
    return other


def limits(**overrides: int) -> StepLimits:
    values = {
        "vocab_size": 301,
        "num_blocks": 256,
        "block_size": 16,
        "max_num_seqs": 64,
        "max_num_batched_tokens": 2048,
        "max_model_len": 512,
    }
    return StepLimits(**{**values, **overrides})
