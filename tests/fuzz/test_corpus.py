"""The corpus keeps cases as they were."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.fuzz.corpus import Case, load_cases, save_case
from tests.fuzz.tally import Tally

CASES = [
    Case("Generate", (b"",)),
    Case("Generate", (b"\n\x00" * 60_000,)),
    Case("Connect", (b"\x01\x02\x03", b"\xff" * 11 + b"\x00" * 12, b"abc" * 500 + b"ab")),
    Case("Execute", (bytes(range(256)) * 3,)),
]


@pytest.mark.parametrize("case", CASES, ids=["empty", "repeated", "several", "long period"])
def test_a_case_is_read_as_it_was_kept(case: Case, tmp_path: Path) -> None:
    path = save_case("frontend", case, "It did\nharm.", tmp_path)
    assert path.read_text().startswith("# It did harm.\n")
    assert path.stat().st_size < 2_000
    assert load_cases("frontend", tmp_path) == [case]


@pytest.mark.parametrize("service", ["frontend", "scheduler", "worker"])
def test_there_are_cases_for_each_service(service: str) -> None:
    assert load_cases(service)


def test_harmful_cases_are_remembered() -> None:
    tally = Tally()
    tally.problem("other tokens", CASES[0])
    tally.problem("other tokens", "a description")
    assert tally.harmful == [("other tokens", CASES[0])]
    assert len(tally.problems) == 2
