"""Planted bugs are found: some here, all of them by `python -m tests.simulation.mutations`."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from tests.simulation.mutations import ROOT, find
from tests.simulation.planted_bugs import BUGS

SEEDS = 60
SOME = (
    "blocks are freed while a step is in flight",
    "eviction forgets to unname a block",
    "a step is planned beyond max_tokens",
    "the requeued lose their first",
    "tables have no partly filled block",
    "a fork's copy is forgotten",
    "lost copies are not made again",
    "a slot of an unanswered step is trusted",
    "a cache is kept that workers were lost with twice",
    "log-probabilities of a prompt are lost with its last token",
    "a promise is not withdrawn",
    "an engine that is forgotten keeps a block",
    "a released completion is not aborted",
)


def test_every_bug_can_be_planted(tmp_path: Path) -> None:
    for bug in BUGS.values():
        original, file = ROOT / bug.file, tmp_path / bug.file
        file.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(original, file)
        bug.plant(tmp_path)
        assert file.read_text() != original.read_text()


@pytest.mark.system
@pytest.mark.parametrize("name", SOME)
def test_a_simulated_seed_finds_it(name: str) -> None:
    assert find(BUGS[name], SEEDS, processes=1).startswith("seed ")
