from __future__ import annotations

from contextlib import nullcontext

import pytest

from bench import speculation
from bench.speculation import Case, Found, Run, read_prompts, table
from tests.bench.conftest import Bench
from tests.client.fake_server import FakeServer


def test_both_stacks_answer_every_prompt(
    server: FakeServer,
    bench: Bench,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    settings: list[str] = []

    def start(*_: object, speculation: str) -> nullcontext[FakeServer]:
        settings.append(speculation)
        return nullcontext(server)

    monkeypatch.setattr(speculation, "private_stack", start)
    words = "--mode speculation --model models/demo --groups stories json --streams 1 6"
    words += " --tokens 5 --pairs 2"
    cases = bench(words)["cases"]
    assert settings == ["none", "auto", "auto", "none"]
    assert len(cases) == 8  # 2 groups, 2 numbers of streams, 2 temperatures
    assert all(case["differing"] == 0 and len(case["ratios"]) == 2 for case in cases)
    assert "json, greedy" in capsys.readouterr().out


def test_ratios_and_differing_tokens() -> None:
    found = Found()
    for speed in (10.0, 15.0, 20.0):
        found.add(Run(10.0, [[1], [2, 3]]), Run(speed, [[1], [2, 4]]))
    assert found.differing == 3
    assert found.figures()["ratio"] == {
        "median": 1.5,
        "first_quartile": 1.25,
        "third_quartile": 1.75,
    }
    rows = table({Case("chats", 1, "greedy"): found})
    assert rows == [["chats, greedy", "1.50 (1.25 to 1.75)"]]


def test_all_groups_have_as_many_prompts() -> None:
    groups = read_prompts()
    assert {len(prompts) for prompts in groups.values()} == {8}
    assert all("schema" in prompt for prompt in groups["json"])
