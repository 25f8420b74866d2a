"""Which losses convict a completion that is harmless, and which do not."""

from __future__ import annotations

import pytest

from tests.simulation.cluster.engines import Owner
from tests.simulation.cluster.losses import FRONTENDS, Losses

ME, OTHER = Owner(1, 0), Owner(2, 0)
ALONE, TOGETHER = {ME}, {ME, OTHER}


@pytest.mark.parametrize(
    ("losses", "convict"),
    [
        ([(0, TOGETHER), (0, TOGETHER), (0, TOGETHER), (0, ALONE)], True),
        ([(0, TOGETHER), (0, TOGETHER), (0, TOGETHER), (0, set())], True),  # it was on its way
        ([(0, TOGETHER), (3, TOGETHER), (3, TOGETHER), (3, ALONE)], True),
        ([(0, TOGETHER), (0, TOGETHER), (0, ALONE), (3, ALONE)], False),  # it got tokens
        ([(0, TOGETHER), (0, ALONE), (0, ALONE)], False),
        ([(0, ALONE), (0, ALONE), (0, ALONE), (0, TOGETHER)], False),
        ([(0, ALONE), (0, ALONE), (0, ALONE), (0, {OTHER})], False),
        ([(0, TOGETHER), (0, TOGETHER), (4, TOGETHER), (4, ALONE)], False),  # it made progress
    ],
)
def test_a_completion_is_convicted_by_losses_without_progress(
    losses: list[tuple[int, set[Owner]]], convict: bool
) -> None:
    seen = Losses()
    for tokens, running in losses:
        seen.add(FRONTENDS, {ME: tokens, OTHER: 0}, running)
    assert seen.convict(ME) is convict


def test_each_scheduler_remembers_only_its_workers() -> None:
    seen = Losses()
    for scheduler in ("first", "first", "second"):
        seen.add(scheduler, {ME: 0}, ALONE)
    assert not seen.convict(ME)
    seen.add("first", {ME: 0}, ALONE)
    assert seen.convict(ME)
