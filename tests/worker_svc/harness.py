"""Small models, a block allocator that cannot fail, and steps built by hand."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedModel, Qwen3ForCausalLM

from shared.paging import Paging
from shared.pb.worker_pb2 import PromptLogprobs, SamplingFeatures, StepRequest
from shared.sampling_params import COLUMNS, SamplingNumbers
from tests.worker_svc.device import DEVICE
from worker_svc.devices.cpu import CpuPlatform
from worker_svc.model_runner import ModelRunner
from worker_svc.rank_models.rank_model import RankModel
from worker_svc.ranks.distributed import Ranks, TensorParallel
from worker_svc.settings import WorkerSettings
from worker_svc.step.arrays import StepArrays
from worker_svc.step.decode import StepLimits, decode_step

TINY: dict[str, Any] = {
    "vocab_size": 301,
    "hidden_size": 64,
    "intermediate_size": 112,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 512,
    "pad_token_id": None,
    "tie_word_embeddings": True,
}


def save_model(
    path: Path,
    *,
    family: type[PreTrainedModel] = Qwen3ForCausalLM,
    dtype: torch.dtype = torch.float32,
    max_shard_size: str = "5GB",
    std: float = 0.08,
    **overrides: Any,
) -> Any:
    """Writes a random model to `path` and returns it, ready to be asked for its logits."""
    torch.manual_seed(0)
    model = family(family.config_class(**{**TINY, **overrides})).eval()
    for parameter in model.parameters():  # not the rotary frequencies, which stay float32
        parameter.data = parameter.data.to(dtype)
    with torch.no_grad():  # defaults are 1 and 0, which would hide a norm or a bias left out
        for name, parameter in model.named_parameters():
            if "norm" in name:
                parameter.uniform_(0.5, 1.5)
            elif name.endswith("bias"):
                parameter.normal_(std=0.2)
            else:
                parameter.normal_(std=std)
    model.save_pretrained(path, max_shard_size=max_shard_size)
    return model


def worker_settings(model: Path, **overrides: Any) -> WorkerSettings:
    """The settings of a worker with one thread, and with an address for each rank."""
    addresses = tuple(
        f"unix:{rank}" for rank in range(overrides.get("tp", 1) * overrides.get("pp", 1))
    )
    settings = {"device": DEVICE.type, "threads": 1, "worker_addresses": addresses, **overrides}
    return WorkerSettings(model=str(model), **settings)


def load_rank(model: Path, tp: TensorParallel, **overrides: Any) -> RankModel:
    """Loads a rank's part of a model on a CPU."""
    of_rank = {"device": "cpu", "threads": "auto", "rank": tp.rank, "tp": tp.size}
    settings = worker_settings(model, **of_rank, **overrides)
    loaded = RankModel(settings, CpuPlatform(settings), Ranks(tp))
    loaded.load(max_model_len=512)
    return loaded


def i4(values: Sequence[int]) -> bytes:
    return np.array(values, "<i4").tobytes()


def f4(values: Sequence[float]) -> bytes:
    return np.array(values, "<f4").tobytes()


@dataclass(frozen=True)
class Asked(SamplingNumbers):
    """The features of one row; temperatures are the step's."""

    prompt_len: int = 0
    logprobs: int = -1
    bias: Mapping[int, float] = field(default_factory=dict)
    allowed: Sequence[int] | None = None  # None: no mask


def sampling_features(asked: Mapping[int, Asked], vocab_size: int) -> SamplingFeatures:
    """Encodes the features of rows in ascending order."""
    each = list(asked.values())
    masked = [i for i, row in enumerate(each) if row.allowed is not None]
    masks = np.zeros((len(masked), -(-vocab_size // 32) * 32), np.uint8)
    for mask, i in zip(masks, masked, strict=True):
        mask[list(each[i].allowed or ())] = 1
    return SamplingFeatures(
        rows=i4(list(asked)),
        prompt_lens=i4([row.prompt_len for row in each]),
        num_logprobs=i4([row.logprobs for row in each]),
        bias_offsets=i4(np.cumsum([0] + [len(row.bias) for row in each]).tolist()),
        bias_ids=i4([token for row in each for token in row.bias]),
        bias_values=f4([value for row in each for value in row.bias.values()]),
        masked=i4(masked),
        masks=np.packbits(masks, axis=1, bitorder="little").tobytes(),
        **{
            number.column: (i4 if number.whole else f4)([getattr(row, name) for row in each])
            for name, number in COLUMNS.items()
        },
    )


def prompt_logprobs(targets: Mapping[int, Sequence[int]], k: int) -> PromptLogprobs:
    """Encodes the targets of rows in ascending order."""
    return PromptLogprobs(
        rows=i4(list(targets)),
        num_logprobs=i4([k] * len(targets)),
        target_offsets=i4(np.cumsum([0] + [len(each) for each in targets.values()]).tolist()),
        targets=i4([token for each in targets.values() for token in each]),
    )


@dataclass
class Batch:
    """Sequences with block tables of their own, turned into steps of any mix. Blocks that no later
    token sees are used again at once, if they are of a second table."""

    limits: StepLimits
    step_id: int = 0
    contexts: dict[int, int] = field(default_factory=dict)  # tokens in the cache
    tables: dict[int, list[int]] = field(default_factory=dict)
    second_tables: dict[int, list[int]] = field(default_factory=dict)
    free: list[int] = field(default_factory=list)
    epoch: int = 1

    def __post_init__(self) -> None:
        # Neither in order nor adjacent, as after serving for a while.
        order = np.random.default_rng(0).permutation(self.limits.num_blocks)
        self.free = order.tolist()

    def request(
        self,
        chunks: Sequence[tuple[int, Sequence[int]]],
        *,
        silent: Sequence[int] = (),
        temperatures: Sequence[float] | None = None,
        seeds: Sequence[int] | None = None,
        copies: Sequence[tuple[int, int]] = (),
        features: Mapping[int, Asked] | None = None,
        targets: Mapping[int, Sequence[int]] | None = None,
        num_prompt_logprobs: int = 0,
        graph: bool = False,
        room: int = 1,
    ) -> StepRequest:
        """Makes a step that appends `chunks` (sequence, token ids); the sequences in `silent`
        sample nothing. Features and prompt targets are by row. Several chunks may be of one
        sequence. The blocks have room for a run of `room` steps."""
        spans: list[tuple[int, range]] = []  # sequences, and the positions of their tokens
        for seq, tokens in chunks:
            start = self.contexts.get(seq, 0)
            self.contexts[seq] = start + len(tokens)
            spans.append((seq, range(start, start + len(tokens))))
        slots: list[int] = []
        tables: list[int] = []
        offsets = [0]
        for number in range(len(self.limits.paging.tables)):
            for seq, places in spans:
                first = next(each.start for other, each in spans if other == seq)
                table = self._table(number, seq, first, places.stop + room - 1)
                size = self.limits.paging.tables[number].block_size
                slot_of_block = self.limits.paging.slots_per_block
                slots += [table[p // size] * slot_of_block + p % size for p in places]
                tables += table
                offsets.append(len(tables))
        ids = [token for _, tokens in chunks for token in tokens]
        self.step_id += 1
        rows = len(chunks)

        return StepRequest(
            epoch=self.epoch,
            step_id=self.step_id,
            input_ids=i4(ids),
            positions=i4([place for _, places in spans for place in places]),
            slot_mapping=i4(slots),
            query_lens=i4([len(tokens) for _, tokens in chunks]),
            context_lens=i4([places.stop for _, places in spans]),
            block_table=i4(tables),
            block_table_offsets=i4(offsets),
            samples=bytes(int(seq not in silent) for seq, _ in chunks),
            temperatures=f4(temperatures or [0.0] * rows),
            seeds=np.array(seeds or [0] * rows, "<u8").tobytes(),
            copies=i4([block for pair in copies for block in pair]),
            features=sampling_features(features, self.limits.vocab_size) if features else None,
            prompt_logprobs=prompt_logprobs(targets, num_prompt_logprobs) if targets else None,
            graph=graph,
        )

    def _table(self, number: int, seq: int, start: int, end: int) -> list[int]:
        """A table of a sequence with blocks for `end` tokens, of which a step begins at `start`."""
        kind = self.limits.paging.tables[number]
        tables = self.second_tables if number else self.tables
        table = tables.setdefault(seq, [])
        while len(table) * kind.block_size < end:
            table.append(self.free.pop())
        if number:
            first = kind.first_needed(start)
            unseen, table[:first] = {*table[:first]}, table[first : first + 1] * first
            self.free += unseen.difference(*tables.values())
        return table

    def step(self, chunks: Sequence[tuple[int, Sequence[int]]], **kwargs: Any) -> StepArrays:
        """Does the same and decodes it, as if all rows of the step before had sampled."""
        request = self.request(chunks, **kwargs)
        rows = self.limits.max_num_seqs
        before: Any = SimpleNamespace(
            step_id=request.step_id - 1, num_seqs=rows, samples=np.ones(rows, np.bool_)
        )
        return decode_step(request, self.limits, before)


def limits(block_size: int = 16, **overrides: Any) -> StepLimits:
    values: dict[str, Any] = {
        "vocab_size": 301,
        "num_blocks": 256,
        "paging": Paging(block_size),
        "max_num_seqs": 64,
        "max_num_batched_tokens": 2048,
        "max_model_len": 512,
    }
    return StepLimits(**{**values, **overrides})


def batch_for(runner: ModelRunner, num_blocks: int) -> Batch:
    """A batch within the limits of a runner with this many blocks."""
    info = runner.info
    return Batch(
        limits(
            vocab_size=info.vocab_size,
            num_blocks=num_blocks,
            paging=info.paging,
            max_num_seqs=runner._settings.max_num_seqs,
            max_num_batched_tokens=2**20,
            max_model_len=info.max_model_len,
            drafts=runner.drafts,
            graph_tokens=runner._configured[1],
        )
    )
