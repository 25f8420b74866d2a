"""Several rows of one sequence in a captured step, with known and with drafted tokens."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.worker_svc.device import cpu_only
from tests.worker_svc.drafting import Speculation
from tests.worker_svc.gpu_path.small_model import NUM_BLOCKS, VOCAB, make_runner
from tests.worker_svc.harness import batch_for
from tests.worker_svc.test_model_runner import prompts
from worker_svc.model_runner import ModelRunner

# On a GPU, steps of other sizes round differently, so that other tokens are sampled.
pytestmark = [pytest.mark.timeout(240), cpu_only]

TEXTS = prompts(VOCAB, [5, 9])
LENGTH = 9


def start(runner: ModelRunner) -> Speculation:
    started = Speculation(runner, TEXTS, 0.7, batch_for(runner, NUM_BLOCKS))
    started.prefill()
    return started


@pytest.fixture(scope="module")
def runner(small_dir: Path) -> ModelRunner:
    """A runner with graphs of 1, 2, 4 and 6 rows, and of prompts of up to 20 tokens, whose model
    drafts for itself."""
    runner, _ = make_runner(small_dir, block_size=16, max_num_seqs=6, speculation=str(small_dir))
    runner.configure(2, NUM_BLOCKS, graph_tokens=20)
    return runner


@pytest.fixture(scope="module")
def plain(runner: ModelRunner) -> list[list[int]]:
    """The tokens of decodes, one row per sequence."""
    started = start(runner)
    for _ in range(LENGTH - 1):
        started.step({0: 0, 1: 0})
    return started.tokens


def test_known_rows_of_one_sequence(runner: ModelRunner, plain: list[list[int]]) -> None:
    started = start(runner)
    last = len(TEXTS[1])
    started.tokens[1] = plain[1][: last + 3]
    started.step({1: 0, 0: 0}, [(1, [token]) for token in plain[1][last : last + 2]])
    assert started.tokens[1] == plain[1][: last + 4]
    assert started.tokens[0] == plain[0][: len(TEXTS[0]) + 2]


def test_drafted_rows(runner: ModelRunner, plain: list[list[int]]) -> None:
    """The second step has five rows, and is padded. It refers to the tokens of the first."""
    started = start(runner)
    for depths in ({0: 2, 1: 2}, {1: 3, 0: 0}, {0: 1, 1: 0}):
        started.step(depths, known=depths == {0: 2, 1: 2})
    for found, expected in zip(started.tokens, plain, strict=True):
        length = min(len(found), len(expected))
        assert found[:length] == expected[:length]
    assert started.num_accepted == started.num_drafted


@pytest.mark.parametrize("graph", [False, True])
def test_drafted_rows_beside_a_prompt(
    runner: ModelRunner, plain: list[list[int]], graph: bool
) -> None:
    started = start(runner)
    started.step({1: 2, 0: 1}, [(7, TEXTS[0])], graph=graph)
    assert started.tokens[1] == plain[1][: len(started.tokens[1])]
    assert started.num_accepted == started.num_drafted
