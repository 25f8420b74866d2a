from __future__ import annotations

import warnings
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
    VOCAB_SIZES,
    by_device,
    cpu_only,
    generator,
)
from tests.worker_svc.kernels.triton.precision import poisoned_memory
from worker_svc.kernels.cpu.sampling import selection as cpu_selection
from worker_svc.kernels.triton.sampling import selection as module
from worker_svc.kernels.triton.sampling.selection import chunk_statistics, select_tokens
from worker_svc.layers.embedding import VocabPartition

ALMOST_ONE = 1 - 2**-53
# exp differs in its last bits between implementations, so a boundary between two tokens moves by
# about 1e-7, and a random number that falls right there may take either.
NUDGE = 1e-6
# The dtypes of models, and of the logits that features have changed.
DTYPES = torch.bfloat16, torch.float16, torch.float32
LARGER_THAN_ANY = 65_000


@dataclass(frozen=True)
class Implementation:
    name: str
    statistics: Callable[..., tuple[torch.Tensor, torch.Tensor]]
    select: Callable[..., torch.Tensor]
    device: torch.device

    def sample(
        self, logits: torch.Tensor, temperatures: torch.Tensor, uniforms: torch.Tensor, ranks: int
    ) -> list[int]:
        """Deals whole logits [N, vocab] to ranks, with anything as padding and NaN between the
        rows; exactly one rank must know each token."""
        logits, temperatures, uniforms = (
            x.to(self.device) for x in (logits, temperatures, uniforms)
        )
        parts, statistics = [], []
        for rank in range(ranks):
            vocab = VocabPartition(logits.shape[1], rank, ranks)
            local = logits.new_full((len(logits), vocab.shard_size + 16), torch.nan)
            local = local[:, : vocab.shard_size]
            local[:, ::2] = LARGER_THAN_ANY
            local[:, : vocab.num_tokens] = logits[:, vocab.start : vocab.start + vocab.num_tokens]
            parts.append((vocab, local))
            statistics.append(
                self.statistics(local, vocab.chunk_size, vocab.num_tokens, temperatures)
            )
        maxima, sums = (torch.cat(columns, dim=1) for columns in zip(*statistics, strict=True))
        answers = torch.stack(
            [
                self.select(
                    local,
                    vocab.chunk_size,
                    vocab.num_tokens,
                    maxima,
                    sums,
                    vocab.rank * vocab.num_chunks,
                    temperatures,
                    uniforms,
                )
                for vocab, local in parts
            ]
        )
        assert answers.dtype == torch.int32
        assert ((answers >= 0).sum(dim=0) == 1).all()
        assert (answers >= -1).all()
        return answers.amax(dim=0).tolist()


KERNEL = Implementation(
    "kernel", poisoned_memory()(chunk_statistics), poisoned_memory()(select_tokens), DEVICE
)
CPU = Implementation(
    "cpu", cpu_selection.chunk_statistics, cpu_selection.select_tokens, torch.device("cpu")
)


@pytest.fixture(autouse=True)
def small_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes the rows of a small vocabulary take several programs."""
    if not ON_GPU:
        monkeypatch.setattr(module, "TILE", 512)


both = pytest.mark.parametrize(
    "implementation",
    [KERNEL, pytest.param(CPU, marks=cpu_only)],
    ids=lambda each: each.name,
)


def random_rows(
    vocab: int, dtype: torch.dtype, seed: int, count: int = 21
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Logits with ties and impossible tokens, at temperatures and random numbers from the ordinary
    to the extreme."""
    print(f"seed {seed}")
    rng = np.random.default_rng(seed)
    temperatures = [0.0, 1e-45, 1e-6, 1e-3, 0.7, 2.0, 3e38]
    rows = [(t, u) for t in temperatures for u in (0.0, rng.random(), ALMOST_ONE)]
    rows = (rows + [(rng.choice([0, 1e-3, 0.6, 1.5]), rng.random()) for _ in range(count)])[:count]
    random = generator(seed)
    size, device = (len(rows), vocab), random.device
    logits = (4 * torch.randn(size, generator=random, device=device)).to(dtype)
    logits[::3] = logits[::3].round()
    logits[torch.rand(size, generator=random, device=device) < 0.1] = -torch.inf
    logits[torch.arange(len(rows)), torch.from_numpy(rng.integers(vocab, size=len(rows)))] = 5
    for all_equal in logits[2:14:11]:
        all_equal[:] = 1.0
    for one_possible in logits[5:17:11]:
        one_possible[:] = -torch.inf
        one_possible[vocab // 2] = 3.0
    for extreme in logits[17:18]:
        extreme[:] = -60_000
        extreme[1] = 60_000
    return (
        logits,
        torch.tensor([t for t, _ in rows], dtype=torch.float32, device=device),
        torch.tensor([u for _, u in rows], dtype=torch.float64, device=device),
    )


@pytest.mark.parametrize(
    ("ranks", "vocab", "dtype", "rows"),
    by_device(
        cpu=[
            (2, 2, torch.float32, 21),
            (4, 40, torch.float32, 21),
            (2, 1001, torch.float16, 21),
            (4, 1001, torch.bfloat16, 21),
        ],
        gpu=[(4, 40, torch.float32, 21), *product((2,), VOCAB_SIZES, DTYPES, ROWS)],
    ),
)
def test_gpu_and_cpu_sample_the_same_on_any_number_of_ranks(
    ranks: int, vocab: int, dtype: torch.dtype, rows: int
) -> None:
    """40 tokens are five chunks of eight: of four ranks the last has nothing but padding."""
    logits, temperatures, uniforms = random_rows(vocab, dtype, vocab, rows)
    tokens = KERNEL.sample(logits, temperatures, uniforms, ranks)
    assert KERNEL.sample(logits, temperatures, uniforms, ranks=1) == tokens
    first, last = (
        CPU.sample(logits, temperatures, (uniforms + off).clamp(0, ALMOST_ONE), ranks)
        for off in (-NUDGE, NUDGE)
    )
    assert CPU.sample(logits, temperatures, uniforms, 1) == CPU.sample(
        logits, temperatures, uniforms, ranks
    )
    assert all(low <= token <= high for low, token, high in zip(first, tokens, last, strict=True))
    assert (logits[range(rows), tokens] > -torch.inf).all()


@pytest.mark.parametrize("ranks", [1, 4])
def test_the_vocabulary_of_qwen3(ranks: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()  # with a GPU's tile
    logits = torch.randn(3, 151_936, generator=torch.Generator().manual_seed(ranks)).bfloat16()
    temperatures, uniforms = torch.tensor([0.0, 0.6, 1.0]), torch.tensor([0.3, 0.3, 0.99])
    rows = logits, temperatures, uniforms.double()
    assert KERNEL.sample(*rows, ranks) == CPU.sample(*rows, ranks)


@both
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("vocab", "rows"), [(36, 21), *by_device(cpu=[], gpu=product(VOCAB_SIZES, ROWS))]
)
def test_statistics(
    vocab: int, rows: int, dtype: torch.dtype, implementation: Implementation
) -> None:
    """By their definition in float64; the last chunk is half padding, and one is all padding."""
    logits, temperatures, _ = random_rows(vocab, dtype, seed=1, count=rows)
    size = VocabPartition(vocab, 0, 1).chunk_size
    logits[5:6, size : 2 * size] = -torch.inf
    usual = (temperatures == 0) | (temperatures > 1e-4)
    logits, temperatures = logits[usual], temperatures[usual]
    whole = -(-vocab // size) * size
    padded = logits.new_full((len(logits), whole + size), torch.nan)
    padded[:, :whole] = LARGER_THAN_ANY
    padded[:, :vocab] = logits
    maxima, sums = implementation.statistics(padded, size, vocab, temperatures)

    padded[:, vocab:] = -torch.inf
    chunks = padded.double().unflatten(1, (-1, size))
    expected = chunks.amax(dim=2)
    assert torch.equal(maxima, expected.float())
    scale = temperatures.double()[:, None, None]
    weights = ((chunks - expected.unsqueeze(2)) / scale).exp().nan_to_num(0)
    weights[temperatures == 0] = 0
    torch.testing.assert_close(sums.double(), weights.sum(dim=2), rtol=1e-5, atol=1e-12)


@both
@pytest.mark.parametrize("temperature", [1e-3, 0.3, 1.0, 2.0])
def test_inverts_the_cumulative_distribution(
    temperature: float, implementation: Implementation
) -> None:
    """Numbers in the middle of a token's part of [0, 1) give that token, and zero and the largest
    number below one the ends."""
    logits = 2 * torch.randn(301, generator=torch.Generator().manual_seed(3))
    probabilities = torch.softmax(logits.double() / temperature, dim=0)
    likely = (probabilities > by_device(cpu=1e-6, gpu=1e-5)).nonzero().squeeze(1)
    likely = likely[:: len(likely) // 10 + 1] if implementation is KERNEL else likely
    middles = (probabilities.cumsum(0) - probabilities / 2)[likely]
    ends = torch.tensor([0, ALMOST_ONE], dtype=torch.float64)
    uniforms = torch.cat((middles, ends))
    rows = logits.expand(len(uniforms), -1), torch.full((len(uniforms),), temperature), uniforms
    tokens = implementation.sample(*rows, ranks=2)
    assert tokens[:-2] == likely.tolist()
    possible = (((logits - logits.max()) / temperature).exp() > 0).nonzero().squeeze(1)
    if temperature >= 1 or not ON_GPU:  # whose exp may give 0 a little sooner
        assert tokens[-2] == possible[0]
    assert tokens[-2] <= likely[0]
    assert tokens[-1] == possible[-1] if temperature >= 1 else tokens[-1] >= likely[-1]


@both
@pytest.mark.parametrize("ranks", [1, 4])
def test_greedy_takes_the_first_of_the_largest(ranks: int, implementation: Implementation) -> None:
    logits = torch.randn(6, 1001, generator=torch.Generator().manual_seed(0)).bfloat16()
    logits[0] = 1.0
    logits[1, [40, 45, 700]] = 9.0
    logits[2, [1000, 999]] = 9.0
    expected = [row.tolist().index(row.max().item()) for row in logits]
    uniforms = torch.linspace(0, ALMOST_ONE, 6, dtype=torch.float64)
    assert implementation.sample(logits, torch.zeros(6), uniforms, ranks) == expected


@both
def test_impossible_tokens_are_never_sampled(implementation: Implementation) -> None:
    """Neither at the ends of [0, 1) nor where the parts of two tokens meet: there the numbers are
    exact, and those of the second token begin."""
    logits = torch.full((40,), -torch.inf)
    logits[[3, 9, 14, 33]] = 0.0
    uniforms = [0.0, 0.25, 0.5, 0.75, ALMOST_ONE]
    rows = logits.expand(5, 40), torch.ones(5), torch.tensor(uniforms, dtype=torch.float64)
    assert implementation.sample(*rows, ranks=1) == [3, 9, 14, 33, 33]


@both
def test_a_row_of_nothing_still_has_a_token(implementation: Implementation) -> None:
    """Padding rows of a graph hold anything; what they sample must still be a token."""
    logits = torch.tensor([-torch.inf, torch.nan]).repeat_interleave(2)[:, None].expand(4, 40)
    temperatures, uniforms = torch.tensor([0.0, 1.0, 0.0, 1.0]), torch.full((4,), 0.4).double()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # from the interpreter, of NaN
        tokens = implementation.sample(logits, temperatures, uniforms, ranks=2)
    assert all(0 <= token < 40 for token in tokens)


@both
def test_other_rows_change_nothing(implementation: Implementation) -> None:
    """Not even the last bit of a chunk's sum."""
    logits, temperatures, _ = random_rows(1001, torch.bfloat16, seed=2)
    logits, temperatures = logits[::3], temperatures[::3].contiguous()
    padded = torch.nn.functional.pad(logits, (0, 1024 - 1001), value=torch.nan)
    together = implementation.statistics(padded, 32, 1001, temperatures)
    alone = [
        implementation.statistics(padded[i : i + 1], 32, 1001, temperatures[i : i + 1])
        for i in range(len(logits))
    ]
    for whole, parts in zip(together, zip(*alone, strict=True), strict=True):
        assert torch.equal(whole, torch.cat(parts))
