"""Each pair of keywords, compared with the package jsonschema. `differential` tries more seeds."""

from __future__ import annotations

import pytest

from tests.scheduler_svc.grammar.schema.differential import check
from tests.scheduler_svc.grammar.schema.schemas import KEYWORDS, PAIRS

_STEP = 100


@pytest.mark.parametrize("start", range(0, len(PAIRS), _STEP))
def test_a_pair_of_keywords_is_rejected_or_enforced(start: int) -> None:
    for seed in range(start, min(start + _STEP, len(PAIRS))):
        check(seed)


def test_each_keyword_is_enforced_somewhere() -> None:
    """Else the comparison would say nothing about it."""
    rejected = {"not", "if", "contains", "dependentRequired", "dependentSchemas", "$dynamicRef"}
    left = {*KEYWORDS} - rejected
    for seed, pair in enumerate(PAIRS):
        if not left.isdisjoint(pair) and check(seed) == "enforced":
            left.difference_update(pair)
    assert not left
