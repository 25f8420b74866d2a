"""Runs of `bench.gpu`: their processes and records, on files that need no GPU."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from argparse import Namespace
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

from bench.gpu import __main__ as program
from bench.gpu import preflight
from bench.gpu import run as run_module
from bench.gpu.records import Report, outcomes, read
from bench.gpu.run import MEASURE, PROVE, ROOT, RUNS, SMOKE, environment
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
STUCK = """
import threading
from pathlib import Path

def test_stuck():
    Path(__file__).with_suffix(".begun").touch()
    threading.Event().wait()

def test_left(): pass
"""


@pytest.fixture
def run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> Callable[[dict[str, str]], tuple[Path, dict[str, str], str]]:
    """Runs files with these texts; those that end in _speed.py measure -> the records, the outcomes
    by test, and the output."""

    def run(texts: dict[str, str]) -> tuple[Path, dict[str, str], str]:
        for name, text in texts.items():
            (tmp_path / name).write_text(text)
        monkeypatch.setitem(RUNS, "some", tuple(str(tmp_path / name) for name in texts))
        monkeypatch.setattr(run_module, "measures", lambda path: path.endswith("_speed.py"))
        options = Namespace(rehearse=True, seed=1, peer=None, model=None, out=tmp_path)
        records = tmp_path / "some.jsonl"
        run_module.run("some", options, records)
        print(*program.summary("some", records, rehearsal=False), sep="\n")
        found = {test.rpartition("::")[2]: how for test, how in outcomes(records).items()}
        return records, found, capfd.readouterr().out

    return run


def test_a_failing_test_stops_no_other_test(run: Any) -> None:
    records, found, output = run(
        {"test_rough.py": ROUGH, "test_broken.py": "import no_such_package"}
    )
    assert found == {
        "": "failed",  # test_broken.py: outside of the checkout, a file has no name
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
    messages = [record.get("message", "") for record in read(records)]
    for text in ("ValueError: no such thing", "not here", "No module named 'no_such_package'"):
        assert any(text in message for message in messages)
    assert {"n": 2} in [record.get("properties") for record in read(records)]
    assert Report(records, "").value("before") == 1.0  # reported before the test hung
    assert output.count("replacing crashed worker") == 3  # too little memory needs no new process
    assert "crashed: ::test_hangs" in output


def test_measurements_have_a_process_each_and_share_their_figures(run: Any) -> None:
    records, found, output = run({"fine_speed.py": SPEED, "after_speed.py": AFTER})
    assert found == {"measure_speed": "passed", "measure_after": "passed"}
    figures = [record for record in read(records) if "unit" in record]
    assert [figure["ratio"] for figure in figures] == [0.9, 0.5, None]
    assert [figure["below"] for figure in figures] == [False, True, False]
    assert Report(records, "").value("sweep") == {"a": None, "2": 3}
    first, second, last, _ = output.splitlines()[-4:]
    assert first.split()[:3] == ["speed", "90", "GB/s"]
    assert second.endswith("target 0.80 BELOW")
    assert last == "some: 2 passed"


def test_the_time_limit_leaves_a_list_of_what_was_not_run(
    run: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Clock:
        """Jumps ahead once a test is running."""

        sleep = staticmethod(time.sleep)

        def monotonic(self) -> float:
            return time.monotonic() + 1e6 * (tmp_path / "test_stuck.begun").exists()

    monkeypatch.setattr(run_module, "time", Clock())
    _, found, output = run({"test_stuck.py": STUCK, "late_speed.py": SPEED})
    files = [str(tmp_path / name) for name in ("test_stuck.py", "late_speed.py")]
    assert found == dict.fromkeys([*files, "test_stuck", "test_left"], "not run")
    assert output.count("not run: ") == 4


def processes_of(text: str) -> list[int]:
    found = psutil.process_iter(["cmdline"])
    return [each.pid for each in found if text in " ".join(each.info["cmdline"] or ())]


STOPPED = """
import sys
from bench.gpu import __main__ as program
from bench.gpu.run import RUNS
RUNS["some"] = RUNS["other"] = (sys.argv[1] + "/test_stuck.py",)
sys.exit(program.main(["some", "other", "--rehearse", "--out", sys.argv[1]]))
"""


def test_a_signal_ends_all_processes_and_keeps_the_results(tmp_path: Path) -> None:
    path = tmp_path / "test_stuck.py"
    path.write_text("def test_fine(): pass\n" + STUCK)
    command = [sys.executable, "-c", STOPPED, tmp_path]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=ROOT) as process:
        assert process.stdout is not None
        wait_for(path.with_suffix(".begun").exists, "the test that hangs")
        process.send_signal(signal.SIGTERM)
        output = process.stdout.read()
        assert process.wait(WAIT_S) == 1
    assert processes_of(str(path)) == []
    assert "1 passed" in output.splitlines()[-2]
    found = outcomes(tmp_path / "some.jsonl")
    assert found.pop(str(path)) == "not run"
    assert list(found.values()) == ["passed", "not run", "not run"]
    assert not (tmp_path / "other.jsonl").exists()


def test_the_command_line(capsys: pytest.CaptureFixture[str]) -> None:
    options = program.parse_args([])
    assert (options.runs, options.out) == (["prove", "measure"], Path("gpu-check"))
    runs = ["smoke", "attention", "step", "sweeps", "prove", "stack"]
    assert program.parse_args([*runs, "--out", "a"]).runs == runs
    with pytest.raises(SystemExit):
        program.parse_args(["prof"])
    assert "prof: unknown run; the runs are smoke, prove, measure, rms_norm" in (
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


def test_the_preflight_finds_no_missing_package_here() -> None:
    found = preflight.examine()
    assert (found["obstacles"], found["missing"]) == ([], [])
    assert found.get("name") or "no CUDA device" in found["no_gpu"]


def test_without_a_gpu_nothing_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    found = {"obstacles": [], "missing": [], "no_gpu": "torch finds no CUDA device"}
    monkeypatch.setattr(preflight, "examine", lambda: found)
    assert program.main(["--out", str(tmp_path / "out")]) == 2
    assert "nothing was run, because\n  torch finds no CUDA device" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
