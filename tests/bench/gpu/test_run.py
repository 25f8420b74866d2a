"""Runs of `bench.gpu`: their processes and records, on files that need no GPU."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest

from bench.gpu import __main__ as program
from bench.gpu import preflight
from bench.gpu import run as run_module
from bench.gpu.modules import MEASURE, PROVE, ROOT, RUNS, SMOKE
from bench.gpu.records import Figure, Result
from bench.gpu.run import Run, environment
from tests.waiting import WAIT_S, wait_for

ROUGH = """
import os
import threading
import pytest

def test_raises():
    raise ValueError("no such thing")

def test_loses_the_device():
    raise RuntimeError("CUDA error: an illegal memory access was encountered")

def test_takes_the_process_along():
    os._exit(9)

@pytest.mark.timeout(1)
def test_hangs(report):
    report.figure("before", 1.0, "ms")
    threading.Event().wait()

def test_needs_much_memory():
    raise RuntimeError("CUDA error: out of memory")

@pytest.mark.parametrize("n", [1, 2])
def test_passes(n, record_property):
    record_property("n", n)

@pytest.mark.skip(reason="not here")
def test_skips(): pass

@pytest.fixture
def broken(): raise LookupError("no fixture")

def test_with_it(broken): pass
"""
SPEED = """
def measure_speed(report):
    report.figure("speed", 90.0, "GB/s", 100.0, 0.8)
    report.figure("time", 2.0, "ms", 1.0, 0.8)
    report.figure("nothing", float("nan"), "ms", 1.0)
    report.note("all of it")
    report.detail("sweep", {"a": float("nan"), 2: 3})
"""
AFTER = """
def measure_after(report):
    assert report.value("speed") == 90.0
    assert report.value("sweep")["2"] == 3
    assert report.value("unknown") is None
"""
STUCK = "import threading\ndef test_stuck(): threading.Event().wait()\ndef test_left(): pass\n"


def make_run(
    directory: Path, monkeypatch: pytest.MonkeyPatch, texts: dict[str, str], **options: Any
) -> Run:
    """A run of files with these texts; those that end in _speed.py measure."""
    for name, text in texts.items():
        (directory / name).write_text(text)
    monkeypatch.setitem(RUNS, "some", tuple(str(directory / name) for name in texts))
    monkeypatch.setattr(run_module, "measures", lambda path: path.endswith("_speed.py"))
    chosen = {"rehearse": True, "seed": 1, "peer": None, "model": None, "out": directory}
    return Run("some", Namespace(**chosen | options), {"seed": 1})


def by_test(run: Run) -> dict[str, Result]:
    return {name.rpartition("::")[2]: result for name, result in run.results.items()}


def test_a_test_that_fails_takes_no_other_along(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    texts = {"test_rough.py": ROUGH, "test_broken.py": "import no_such_package"}
    run = make_run(tmp_path, monkeypatch, texts)
    run.run()
    run.end()
    found = by_test(run)
    broken = found.pop("")  # outside of the checkout, a file has no name
    assert {name: result.outcome for name, result in found.items()} == {
        "test_raises": "failed",
        "test_loses_the_device": "failed",
        "test_takes_the_process_along": "crashed",
        "test_hangs": "crashed",
        "test_needs_much_memory": "failed",
        "test_passes[1]": "passed",
        "test_passes[2]": "passed",
        "test_skips": "skipped",
        "test_with_it": "failed",
    }
    assert "ValueError: no such thing" in found["test_raises"].message
    assert "setup: " in found["test_with_it"].message
    assert found["test_skips"].message == "not here"
    assert found["test_passes[2]"].details == {"n": 2}
    assert found["test_hangs"].figures  # recorded before it hung
    assert "No module named 'no_such_package'" in broken.message
    assert run.failed
    assert run.not_run == []
    log = (tmp_path / "some.log").read_text()
    assert log.count("replacing crashed worker") == 3  # too little memory needs no new process
    assert "in test_hangs" in log  # where it hung
    said = capsys.readouterr().out
    assert "test_raises: ValueError: no such thing" in said
    assert "crashed: ::test_hangs: worker 'gw" in said
    content = json.loads(run.path.read_text())
    assert (content["seed"], content["passed"], content["not_run"]) == (1, False, [])
    assert len(content["tests"]) == 10


def test_measurements_have_a_process_each_and_share_their_figures(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run = make_run(tmp_path, monkeypatch, {"fine_speed.py": SPEED, "after_speed.py": AFTER})
    run.run()
    run.end()
    found = by_test(run)
    assert [result.outcome for result in found.values()] == ["passed", "passed"]
    tests = json.loads(run.path.read_text())["tests"]
    speed = next(test for name, test in tests.items() if name.endswith("measure_speed"))
    assert [figure["ratio"] for figure in speed["figures"]] == [0.9, 0.5, None]
    assert [figure["below"] for figure in speed["figures"]] == [False, True, False]
    assert speed["details"] == {"sweep": {"a": None, "2": 3}}
    assert not run.failed  # a missed target is no failure
    *_, first, second, last, _ = capsys.readouterr().out.splitlines()
    assert first.split()[:3] == ["speed", "90", "GB/s"]
    assert second.endswith("target 0.80 BELOW")
    assert last.startswith("some: 2 passed, ")


def test_what_the_time_limit_cuts_off_is_listed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run = make_run(tmp_path, monkeypatch, {"test_stuck.py": STUCK, "late_speed.py": SPEED})

    class Clock:
        """Runs away once a test is running."""

        sleep = staticmethod(time.sleep)

        def monotonic(self) -> float:
            runs = any(result.outcome == "running" for result in run.results.values())
            return time.monotonic() + 1e6 * runs

    monkeypatch.setattr(run_module, "time", Clock())
    run.run()
    run.end()
    late, stuck, left = run.not_run
    assert late.endswith("late_speed.py")
    assert stuck.endswith("::test_stuck")
    assert left.endswith("::test_left")
    assert capsys.readouterr().out.count("not run: ") == 3


def processes_of(text: str) -> list[int]:
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            if text.encode() in path.read_bytes():
                found.append(int(path.parent.name))
        except OSError:
            continue
    return found


STOPPED = """
import sys
from bench.gpu import __main__ as program
from bench.gpu.modules import RUNS
RUNS["some"] = RUNS["other"] = (sys.argv[1] + "/test_stuck.py",)
sys.exit(program.main(["some", "other", "--rehearse", "--out", sys.argv[1]]))
"""


def test_a_signal_ends_all_processes_and_leaves_what_is_known(tmp_path: Path) -> None:
    path = tmp_path / "test_stuck.py"
    path.write_text("def test_fine(): pass\n" + STUCK)
    command = [sys.executable, "-c", STOPPED, tmp_path]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=ROOT) as process:
        assert process.stdout is not None
        assert any("test_fine: passed" in line for line in process.stdout)
        wait_for(lambda: processes_of(str(path)), "the test that hangs")
        process.send_signal(signal.SIGTERM)
        output = process.stdout.read()
        assert process.wait(WAIT_S) == 1
    assert processes_of(str(path)) == []
    assert output.splitlines()[-2].startswith("some: 1 passed, ")
    content = json.loads((tmp_path / "some.json").read_text())
    assert [name.rpartition("::")[2] for name in content["not_run"]] == ["test_stuck", "test_left"]
    assert not (tmp_path / "other.json").exists()


def test_ratios() -> None:
    assert Figure("", 90.0, "GB/s", 100.0, 0.9).ratio == pytest.approx(0.9)
    assert Figure("", 2.0, "ms", 1.0, 0.6).ratio == pytest.approx(0.5)
    assert Figure("", 2.0, "ms", 1.0, 0.6).below
    assert not Figure("", 2.0, "ms", 1.0).below
    assert Figure("", float("nan"), "ms", 1.0).ratio is None


def test_the_command_line(capsys: pytest.CaptureFixture[str]) -> None:
    options = program.parse_args([])
    assert (options.runs, options.out) == (["prove", "measure"], Path("gpu-check"))
    runs = ["smoke", "decode", "step", "sweeps", "prove", "stack"]
    assert program.parse_args([*runs, "--out", "a"]).runs == runs
    with pytest.raises(SystemExit):
        program.parse_args(["prof"])
    assert "no run prof; there are smoke, prove, measure, sweeps, rms_norm" in (
        capsys.readouterr().err
    )


def test_every_file_is_there() -> None:
    files = [*PROVE, *MEASURE, *SMOKE]
    assert [path for path in files if not (ROOT / path).is_file()] == []


@pytest.mark.parametrize("path", [PROVE[0], MEASURE[0]])
def test_the_environment(path: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"PYTHONPATH": "/a:/b", "TEST_DEVICE": "cpu"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    options = Namespace(out=tmp_path, seed=1, peer=None, rehearse=False)
    found = environment(tmp_path / "smoke.jsonl", [path], tmp_path, options)
    assert found["PYTHONPATH"] == f"{ROOT}:/a:/b"
    assert found.get("TEST_DEVICE") == (None if path in MEASURE else "cuda")
    assert "TRITON_INTERPRET" not in found
    options.rehearse = True
    found = environment(tmp_path / "smoke.jsonl", [path], tmp_path, options)
    assert (found["TRITON_INTERPRET"], found.get("TEST_DEVICE")) == ("1", None)


def test_this_machine_has_all_but_perhaps_a_gpu() -> None:
    found = preflight.look()
    assert (found["obstacles"], found["missing"]) == ([], [])
    assert found.get("name") or "no CUDA device" in found["no_gpu"]


def test_without_a_gpu_nothing_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    found = {"obstacles": [], "missing": [], "no_gpu": "torch finds no CUDA device"}
    monkeypatch.setattr(preflight, "look", lambda: found)
    assert program.main(["--out", str(tmp_path / "out")]) == 2
    assert "nothing was run, since\n  torch finds no CUDA device" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
