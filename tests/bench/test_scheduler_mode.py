"""The scheduler's benchmark at a small size, through its real processes."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from bench.errors import BenchError
from bench.scheduler_mode import main
from bench.scheduler_planning import measure_planning
from bench.scheduler_processes import Sizes, running_scheduler
from tests.bench.command import status
from tests.waiting import WAIT_S

SMALL = ["--num-seqs", "4", "--context", "40", "--steps", "12", "--rounds", "2"]
SMALL += ["--waiting", "0", "5", "--long-prompts", "5", "--long-prompt-tokens", "300"]


@pytest.mark.system
def test_tables_and_json(tmp_path: Path) -> None:
    out = tmp_path / "figures.json"
    command = [sys.executable, "-m", "bench", "--mode", "scheduler", *SMALL, "--out", out]
    done = subprocess.run(command, capture_output=True, text=True, timeout=WAIT_S, cwd=tmp_path)

    assert done.returncode == 0, done.stderr
    for label in ("steps/s", "plan+apply", "first token of a short prompt"):
        assert label in done.stdout
    found = json.loads(out.read_text())
    assert found["mode"] == "scheduler"
    for key in ("steps_per_s", "tokens_per_s", "plan_ms_p50"):
        assert found[key] > 0
    assert [each["num_seqs"] for each in found["decode"]] == [4]
    for each in found["decode"]:
        assert each["mean_batch"] == each["num_seqs"]
        assert each["mean_context"] == pytest.approx(40, abs=30)
    cases = [(each["waiting"], each["context"]) for each in found["planning"]]
    assert cases == [(0, 40), (5, 40), (0, 100), (0, 4000)]
    burst = found["burst"]
    assert (burst["long_prompts"], burst["short_prompts"]) == (5, 2)
    assert burst["long_prompt_tokens"] == 300
    assert 0 < burst["gap_before_p50_ms"] <= burst["gap_before_max_ms"]
    assert 0 < burst["gap_during_p50_ms"] <= burst["gap_during_max_ms"]
    assert 0 < burst["short_ttft_p50_ms"] <= burst["long_ttft_max_ms"]
    assert found["machine"]["cores"] >= 1


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--steps", "0"], "--steps: must be at least 1"),
        (["--waiting", "-1"], "--waiting: must be at least 0"),
        (["--address", "127.0.0.1:1"], "unrecognized arguments: --address"),
    ],
)
def test_what_cannot_be_measured_is_a_plain_message(
    capsys: pytest.CaptureFixture[str], flags: list[str], message: str
) -> None:
    assert status(main, flags) == 2
    assert message in capsys.readouterr().err


async def test_a_scheduler_that_does_not_start_says_why() -> None:
    # The settings do not allow a step to have fewer tokens than sequences.
    sizes = Sizes(max_num_seqs=8, max_num_batched_tokens=4, max_model_len=64, num_blocks=64)
    with pytest.raises(BenchError, match=r"scheduler_svc ended:\n.*max_num_seqs: 8 sequences"):
        async with running_scheduler(sizes):
            pass


def test_every_case_is_measured_with_its_own_sequences() -> None:
    found = measure_planning([(0, 30), (7, 90)], num_seqs=3, steps=10, rounds=2)
    assert [(each.num_seqs, each.waiting, each.context) for each in found] == [
        (3, 0, 30),
        (3, 7, 90),
    ]
    for each in found:
        assert 0 < each.plan_ms_p50 <= each.plan_ms_p99
        assert each.plan_and_apply_ms_p50 >= each.apply_ms_p50
