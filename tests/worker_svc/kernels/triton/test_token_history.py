from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from itertools import product

import numpy as np
import pytest
import torch

from tests.worker_svc.device import (
    DEVICE,
    ON_GPU,
    ROWS,
    TOKENS,
    VOCAB_SIZES,
    by_device,
    int32,
    of_cpu,
)
from tests.worker_svc.thread_ranks import on_parts
from worker_svc.kernels.triton.sampling import token_history as module
from worker_svc.kernels.triton.sampling.token_history import (
    penalize,
    store_tokens,
)
from worker_svc.layers.embedding import VocabPartition

PENALIZE = [penalize, *of_cpu("cpu.sampling.tokens", "penalize")]
STORE = [store_tokens, *of_cpu("cpu.sampling.tokens", "store_tokens")]


@pytest.fixture(autouse=True)
def small_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes a few tokens take several programs, and several rounds of one."""
    if not ON_GPU:
        monkeypatch.setattr(module, "STORED", 4)
        monkeypatch.setattr(module, "TILE", 8)
        monkeypatch.setattr(module, "PROGRAMS", 2)


@pytest.mark.parametrize("store", STORE)
def test_tokens_lie_in_their_slots(store: Callable[..., None]) -> None:
    """Given tokens and sampled ones; -1 is nowhere, whatever the id; nothing else changes."""
    cache = torch.full((12,), 99, dtype=torch.int32, device=DEVICE)
    store(cache, int32(3, -1, 0, 11, 7, -1), int32(5, 6, -1, -3, 0, -9), int32(70, 71, 72))
    assert cache.tolist() == [70, 99, 99, 5, 99, 99, 99, 0, 99, 99, 99, 72]


@pytest.mark.parametrize("size", by_device(cpu=[9], gpu=TOKENS))
def test_many_tokens(size: int) -> None:
    rng = np.random.default_rng(size)
    last = rng.integers(50_000, size=256)
    sampled, given = -1 - rng.integers(256, size=size), rng.integers(50_000, size=size)
    slots = np.maximum(rng.permutation(2 * size)[:size] - size // 4, -1)
    ids = np.where(slots % 3, given, sampled)
    expected = np.full(2 * size, -7)
    for slot, token in zip(slots, ids, strict=True):
        if slot >= 0:
            expected[slot] = token if token >= 0 else last[-1 - token]
    actual = torch.full((2 * size,), -7, dtype=torch.int32, device=DEVICE)
    store_tokens(actual, int32(*slots), int32(*ids), int32(*last))
    assert actual.tolist() == expected.tolist()


@pytest.mark.parametrize("store", STORE)
def test_the_first_step_has_no_last_tokens(store: Callable[..., None]) -> None:
    cache = int32(0, 0, 0, 0)
    store(cache, int32(1, 2), int32(8, 9), int32())
    assert cache.tolist() == [0, 8, 9, 0]


@dataclass(frozen=True)
class Batch:
    """Sequences of a step, of which some rows have penalties; the blocks that they do not use, and
    what follows a sequence in its last one, hold tokens too."""

    histories: list[list[int]]
    rows: list[int]
    prompt_lens: list[int]
    penalties: list[tuple[float, float, float]]  # repetition, presence, frequency
    logits: torch.Tensor  # [F, vocab]
    block_size: int
    tokens: torch.Tensor
    block_table: torch.Tensor
    table_offsets: torch.Tensor

    def penalized(self, function: Callable[..., None], ranks: int) -> torch.Tensor:
        def penalize(part: torch.Tensor, vocab: VocabPartition) -> None:
            function(
                part,
                vocab.start,
                vocab.num_tokens,
                self.tokens,
                self.block_size,
                self.block_table,
                self.table_offsets,
                int32(*self.rows),
                int32(*map(len, self.histories)),
                int32(*self.prompt_lens),
                *torch.tensor(self.penalties, dtype=torch.float32, device=DEVICE).T.contiguous(),
            )

        return on_parts(self.logits.to(DEVICE), ranks, penalize).cpu()

    def expected(self) -> torch.Tensor:
        """Penalizes logit by logit, from the definition."""
        out = self.logits.double()
        for f, row in enumerate(self.rows):
            repetition, presence, frequency = self.penalties[f]
            history = self.histories[row]
            times = Counter(history[self.prompt_lens[f] :])
            for token in set(history):
                logit = float(out[f, token])
                logit = logit / repetition if logit > 0 else logit * repetition
                out[f, token] = logit - frequency * times[token] - presence * (times[token] > 0)
        return out.float()


def random_batch(seed: int, vocab: int, block_size: int, lengths: list[int]) -> Batch:
    rng = np.random.default_rng(seed)
    # Few tokens, so that they repeat, within the prompt and after it.
    histories = [rng.choice(rng.integers(vocab, size=100), length).tolist() for length in lengths]
    needed = [-(-length // block_size) for length in lengths]
    table = rng.permutation(sum(needed) + 3)[: sum(needed)]
    offsets = np.cumsum([0, *needed])
    tokens = rng.integers(0, vocab, (sum(needed) + 3) * block_size)
    for history, begin in zip(histories, offsets, strict=False):
        position = np.arange(len(history))
        slots = table[begin + position // block_size] * block_size + position % block_size
        tokens[slots] = history
    rows = sorted(rng.permutation(len(lengths))[: len(lengths) - 1].tolist())
    prompt_lens = [int(rng.integers(0, lengths[row] + 1)) for row in rows]
    logits = 4 * rng.standard_normal((len(rows), vocab))
    logits[:, ::5] = -np.inf
    logits[:, 1::7] = 0
    return Batch(
        histories=histories,
        rows=rows,
        prompt_lens=prompt_lens,
        penalties=[tuple(rng.uniform((0.5, -2, -2), (2, 2, 2))) for _ in rows],
        logits=torch.from_numpy(logits).float(),
        block_size=block_size,
        tokens=torch.from_numpy(tokens).int().to(DEVICE),
        block_table=torch.from_numpy(table).int().to(DEVICE),
        table_offsets=torch.from_numpy(offsets).int().to(DEVICE),
    )


@pytest.mark.parametrize("function", PENALIZE)
@pytest.mark.parametrize("ranks", [1, 2, 4])
@pytest.mark.parametrize(
    ("vocab", "rows", "seed"),
    [
        *[(301, 4, 0), (40, 4, 1), (40, 4, 2)],
        *by_device(cpu=[], gpu=product(VOCAB_SIZES, ROWS, [0])),
    ],
)
def test_penalties(
    function: Callable[..., None], ranks: int, vocab: int, rows: int, seed: int
) -> None:
    """40 tokens are five chunks of eight: of four ranks the last has nothing but padding."""
    block_size, lengths = 5 if seed else 16, [1, 33, 16, 40, 7]
    if vocab > 301:
        lengths = np.random.default_rng(rows).integers(1, 4096, rows + 1).tolist()
    batch = random_batch(seed, vocab, block_size, lengths)
    actual = batch.penalized(function, ranks)
    torch.testing.assert_close(actual, batch.expected(), rtol=1e-6, atol=1e-5)
    one_rank = batch.penalized(function, 1)
    assert torch.equal(actual, one_rank)  # bit for bit


@pytest.mark.parametrize("function", PENALIZE)
def test_neutral_penalties_change_nothing(function: Callable[..., None]) -> None:
    batch = random_batch(4, 301, 16, lengths=[30, 20, 9])
    same = batch.__class__(**{**vars(batch), "penalties": [(1.0, 0.0, 0.0)] * len(batch.rows)})
    assert torch.equal(same.penalized(function, 2), batch.logits)


@pytest.mark.parametrize("function", PENALIZE)
def test_other_rows_change_nothing(function: Callable[..., None]) -> None:
    """Not even the last bit."""
    batch = random_batch(5, 301, 16, lengths=[30, 20, 9, 50])
    together = batch.penalized(function, 1)
    for f in range(len(batch.rows)):
        alone = {
            name: getattr(batch, name)[f : f + 1]
            for name in ("rows", "prompt_lens", "penalties", "logits")
        }
        found = batch.__class__(**{**vars(batch), **alone}).penalized(function, 1)
        assert torch.equal(found[0], together[f])
