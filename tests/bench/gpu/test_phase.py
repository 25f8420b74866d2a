"""Phases and their runner, plugin, records and summary, on modules that need no GPU."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from argparse import Namespace
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from bench.gpu import __main__ as program
from bench.gpu import phase as phase_module
from bench.gpu import runner
from bench.gpu.modules import ROOT, Module
from bench.gpu.phase import Phase
from bench.gpu.records import Figure, Journal, Records, Result
from bench.gpu.runner import Plan
from bench.gpu.summary import LINE_LENGTH, MAX_LINES, summary
from tests.waiting import WAIT_S, wait_for

ROUGH = """
import os
import pytest

def test_raises():
    raise ValueError("no such thing")

def test_loses_the_device():
    raise RuntimeError("CUDA error: an illegal memory access was encountered")

def test_takes_the_process_along():
    print("last words", flush=True)
    os._exit(9)

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
FINE = """
def measure_speed(report):
    assert report.value("speed") is None  # not that of the pass which compiles
    report.figure("speed", 90.0, "GB/s", 100.0, 0.8)
    report.figure("time", 2.0, "ms", 1.0, 0.8)
    report.figure("nothing", float("nan"), "ms", 1.0)
    report.note("all of it")
    report.detail("sweep", {"a": float("nan"), 2: 3})
    assert report.value("speed") == 90.0

def measure_after(report):
    assert report.value("time") == 2.0
    assert report.value("sweep") == {"a": None, "2": 3}
    assert report.value("unknown") is None
"""
HANGS = """
import threading
import pytest

@pytest.mark.timeout(1000)
def test_hangs(report):
    report.figure("before", 1.0, "ms")
    threading.Event().wait()

def test_after(): pass
"""
STUCK = "import threading\ndef test_stuck(): threading.Event().wait()\ndef test_left(): pass\n"


def make_plan(module: Module, journal_file: int, compile_only: bool) -> Plan:
    options = Namespace(rehearse=True, seed=1, peer=None, out=Path())
    return program.make_plan(module, journal_file, compile_only, options, Path("no-model"))


def write_module(directory: Path, name: str, text: str, limit_s: float = 110) -> Module:
    path = directory / name
    path.write_text(text)
    return Module(str(path), limit_s, measures=name.endswith("_speed.py"))


@pytest.fixture(scope="module")
def rough(tmp_path_factory: pytest.TempPathFactory) -> Phase:
    directory = tmp_path_factory.mktemp("rough")
    modules = [
        write_module(directory, "test_rough.py", ROUGH),
        write_module(directory, "test_broken.py", "import no_such_package"),
        write_module(directory, "test_fine.py", "def test_fine(): pass"),
        write_module(directory, "test_empty.py", ""),
        write_module(directory, "test_exit.py", EXIT),
    ]
    phase = Phase("prove", directory, {"seed": 1}, make_plan, threading.Event())
    phase.prove(modules, side_by_side=3)
    return phase


EXIT = "import atexit, os\natexit.register(os.abort)\ndef test_fine(): pass\n"


def outcomes(records: Records) -> dict[str, str]:
    return {name.rpartition("::")[2]: test.outcome for name, test in records.tests.items()}


def messages(records: Records) -> dict[str, str]:
    return {name.rpartition("::")[2]: test.message for name, test in records.tests.items()}


def test_a_test_that_fails_takes_no_other_along(rough: Phase) -> None:
    records = rough.results["rough"]
    assert outcomes(records) == {
        "test_raises": "failed",
        "test_loses_the_device": "failed",
        "test_takes_the_process_along": "crashed",
        "test_needs_much_memory": "failed",
        "test_passes[1]": "passed",
        "test_passes[2]": "passed",
        "test_skips": "skipped",
        "test_with_it": "failed",
    }
    found = messages(records)
    assert "ValueError: no such thing" in found["test_raises"]
    assert found["test_takes_the_process_along"].startswith("exit status 9\n")
    assert found["test_takes_the_process_along"].endswith("last words")
    assert found["test_skips"] == "not here"
    assert "setup: " in found["test_with_it"]
    tests = {name.rpartition("::")[2]: test for name, test in records.tests.items()}
    assert tests["test_passes[2]"].properties == {"n": 2}
    assert not rough.passed


def test_a_test_after_a_lost_device_has_a_new_process(rough: Phase) -> None:
    """A process each after the loss and the crash, besides the first; too little memory needs
    none."""
    log = rough.path.with_suffix(".log").read_text()
    assert log.count("rough: rootdir: ") == 3


def test_modules_that_do_not_begin_or_end_well(rough: Phase) -> None:
    results = rough.results
    assert outcomes(results["fine"]) == {"test_fine": "passed"}
    assert outcomes(results["broken"]) == {"start": "crashed"}
    assert "No module named 'no_such_package'" in messages(results["broken"])["start"]
    assert outcomes(results["empty"]) == {"start": "crashed"}
    assert outcomes(results["exit"]) == {"test_fine": "passed", "exit": "crashed"}
    assert "SIGABRT" in messages(results["exit"])["exit"]


def test_the_json_has_it_all(rough: Phase) -> None:
    content = json.loads(rough.path.read_text())
    assert (content["seed"], content["passed"]) == (1, False)
    assert list(content["modules"]) == ["rough", "broken", "fine", "empty", "exit"]
    found = content["modules"]["rough"]
    assert found["verdict"] == "2 passed, 1 skipped, 4 failed, 1 crashed"
    assert {path.suffix for path in rough.path.parent.glob("prove*")} == {".json", ".jsonl", ".log"}


def test_measurements_come_one_by_one_after_a_pass_that_compiles(tmp_path: Path) -> None:
    modules = [
        write_module(tmp_path, "fine_speed.py", FINE),
        replace(write_module(tmp_path, "two_speed.py", FINE), compiles=False),
        replace(write_module(tmp_path, "model_speed.py", FINE), needs_model=True),
    ]
    phase = Phase("measure", tmp_path, {}, make_plan, threading.Event())
    phase.measure(modules, 2, lambda: "no space left")
    content = json.loads(phase.path.read_text())
    assert list(content["compiled"]) == ["fine", "model"]
    assert outcomes(phase.results["fine"]) == {"measure_speed": "passed", "measure_after": "passed"}
    assert messages(phase.results["model"]) == {"model": "no space left"}
    tests = content["modules"]["fine"]["tests"]
    speed = next(test for name, test in tests.items() if name.endswith("measure_speed"))
    assert [figure["ratio"] for figure in speed["figures"]] == [0.9, 0.5, None]
    assert [figure["below"] for figure in speed["figures"]] == [False, True, False]
    assert speed["details"] == {"sweep": {"a": None, "2": 3}}
    assert not phase.passed  # for lack of a model, not because of a target


class Clock:
    """The program's, which runs away as long as `its_time` holds."""

    def __init__(self, its_time: Callable[[], bool], step_s: float) -> None:
        self._its_time = its_time
        self._step_s = step_s
        self._ahead_s = 0.0

    def monotonic(self) -> float:
        if self._its_time():
            self._ahead_s += self._step_s
        return time.monotonic() + self._ahead_s


def prove(
    modules: list[Module],
    monkeypatch: pytest.MonkeyPatch,
    hangs: Callable[[Result], object],
    step_s: float,
    limit_s: float = 1e9,
) -> Phase:
    """Runs modules one by one; the clock runs away, by steps, while the first one's running test
    `hangs`."""

    def its_time() -> bool:
        running = phase.results[modules[0].name].running if phase.results else None
        return bool(running and hangs(running))

    directory = Path(modules[0].path).parent
    phase = Phase("prove", directory, {}, make_plan, threading.Event(), limit_s)
    clock = Clock(its_time, step_s)
    for each in (phase_module, runner):
        monkeypatch.setattr(each, "time", clock)
    phase.prove(modules, side_by_side=1)
    return phase


def test_a_test_that_hangs_is_ended_and_the_next_begins(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = write_module(tmp_path, "test_rough.py", HANGS, limit_s=1e6)
    phase = prove([module], monkeypatch, lambda running: running.figures, step_s=2000)
    records = phase.results["rough"]
    assert outcomes(records) == {"test_hangs": "out of time", "test_after": "passed"}
    assert "in test_hangs" in messages(records)["test_hangs"]  # where it hung
    hung = next(test for name, test in records.tests.items() if name.endswith("test_hangs"))
    assert hung.figures  # recorded before it hung
    assert not phase.passed


def test_a_module_has_a_limit_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    module = write_module(tmp_path, "test_stuck.py", STUCK, limit_s=1e5)
    records = prove([module], monkeypatch, bool, step_s=1e6).results["stuck"]
    assert outcomes(records) == {"test_stuck": "out of time", "test_left": "out of time"}
    assert "it had not begun" in messages(records)["test_left"]


def test_what_has_not_begun_at_the_deadline_is_out_of_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    modules = [write_module(tmp_path, f"test_{name}.py", STUCK, 1e9) for name in ("one", "two")]
    phase = prove(modules, monkeypatch, bool, step_s=1e6, limit_s=1e5)
    assert outcomes(phase.results["one"])["test_stuck"] == "out of time"
    assert outcomes(phase.results["two"]) == {"start": "out of time"}


def test_the_json_is_there_after_each_module(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    seen: list[list[str]] = []

    class Watched(Phase):
        def write(self) -> None:
            super().write()
            modules = json.loads(self.path.read_text())["modules"]
            seen.append([name for name, module in modules.items() if module["tests"]])

    text = "def test_it(): pass"
    modules = [write_module(tmp_path, f"test_{name}.py", text) for name in ("a", "b")]
    Watched("prove", tmp_path, {}, make_plan, threading.Event()).prove(modules, side_by_side=1)
    assert seen == [["a"], ["a", "b"]]
    assert [line.split("] ")[1][:11] for line in capsys.readouterr().out.splitlines()] == [
        "a: 1 passed",
        "b: 1 passed",
    ]


def test_each_result_is_told_before_the_next_test_begins(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """As in the smoke. The second test waits until the first one's result is in the JSON."""
    result = tmp_path / "smoke.json"
    text = f"""
import time
from pathlib import Path
def measure_first(report):
    report.figure("speed", 90.0, "GB/s")
    raise ValueError("no such thing")
def measure_second():
    while "ValueError: no such thing" not in Path({str(result)!r}).read_text():
        time.sleep(0.01)
"""
    module = replace(write_module(tmp_path, "a_speed.py", text), measures=True, compiles=False)
    phase = Phase("smoke", tmp_path, {}, make_plan, threading.Event())
    phase.tell_each()
    phase.fail("preflight", "grpcio is not installed")
    phase.write()
    phase.measure([module], 1, lambda: "")
    assert not phase.passed
    assert outcomes(phase.results["a"]) == {"measure_first": "failed", "measure_second": "passed"}
    printed = capsys.readouterr().out.splitlines()
    told = [
        next(n for n, line in enumerate(printed) if part in line)
        for part in (
            "preflight: failed: grpcio is not installed",
            "] measure_first: failed (",
            "speed   ",
            "ValueError: no such thing",
            "] measure_second: passed (",
            "] a: 1 passed, 1 failed (",
        )
    ]
    assert told == sorted(told)


def processes_of(text: str) -> list[int]:
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            if text.encode() in path.read_bytes():
                found.append(int(path.parent.name))
        except OSError:
            continue
    return found


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_all_processes_and_leaves_what_is_known(
    tmp_path: Path, number: signal.Signals
) -> None:
    write_module(tmp_path, "test_fine.py", "def test_fine(): pass")
    write_module(tmp_path, "test_stuck.py", STUCK)
    command = [sys.executable, "-c", STOPPED, tmp_path]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=ROOT) as process:
        assert process.stdout is not None
        assert any("fine: 1 passed" in line for line in process.stdout)
        wait_for(lambda: processes_of(f"{tmp_path}/test_stuck.py"), "the test that hangs")
        process.send_signal(number)
        output = process.stdout.read()
        assert process.wait(WAIT_S) == 1
    assert processes_of(f"{tmp_path}/test_stuck.py") == []
    assert output.splitlines()[-1].startswith("prove stopped, ")
    content = json.loads((tmp_path / "prove.json").read_text())["modules"]
    assert content["fine"]["verdict"] == "1 passed"
    assert "stopped" in content["stuck"]["verdict"]
    assert content["late"]["verdict"] == "1 stopped"


STOPPED = """
import sys
from pathlib import Path
from bench.gpu import __main__ as program, preflight
from bench.gpu.modules import Module
directory = Path(sys.argv[1])
names = ("fine", "stuck", "late")
modules = [Module(str(directory / f"test_{name}.py"), 60) for name in names]
program.choose = lambda *_: {"prove": modules}
program.SIDE_BY_SIDE = 1
sys.exit(program.main(["--rehearse", "--out", str(directory)]))
"""


def test_results_are_printed_where_nothing_can_be_written(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    modules = [write_module(tmp_path, "test_it.py", "def test_it(): pass")]
    options = Namespace(
        rehearse=True, seed=1, peer=None, model=None, out=tmp_path / "gone" / "away"
    )
    about = {"gpu": {"name": "none"}}
    assert program.run("prove", modules, about, options, threading.Event()) == 0
    said = capsys.readouterr()
    assert "1 passed" in said.out.splitlines()[-2]
    assert said.out.splitlines()[-1].startswith("prove passed")
    for suffix in ("json", "jsonl", "log"):
        assert f"prove.{suffix} cannot be written" in said.err


# Records and their summary.


def test_records_that_several_processes_append(tmp_path: Path) -> None:
    file = os.open(tmp_path / "journal", os.O_RDWR | os.O_APPEND | os.O_CREAT)
    mine, yours = Journal(file), Journal(file)
    mine.write("a", "plan", tests=["x", "y", "z"])
    mine.write("a", "start", test="x", limit_s=None)
    os.write(file, b'{"module": "a", ')  # a line that is still being written
    records = yours.of("a")
    assert records.running is records.tests["x"]
    os.write(file, b'"kind": "end", "test": "x", "outcome": "passed"}\n')
    assert yours.of("a") is records
    assert (records.running, records.left, records.ended) == (None, ["y", "z"], 1)


def test_the_summary_is_short(capsys: pytest.CaptureFixture[str]) -> None:
    def module(failed: int, targets: int) -> Records:
        tests = [
            Result(f"m::failed{n}", "failed", "call: f.py:3\nE   Bad: no") for n in range(failed)
        ]
        figures = [Figure(f"target {n}", 1.0, "GB/s", 2.0, 0.8) for n in range(targets)]
        tests.append(Result("m::measures", "passed", figures=[*figures, Figure("other", 1, "s")]))
        return Records(tests={test.name: test for test in tests})

    for failed, targets in ((0, 0), (3, 4), (50, 0), (0, 50), (50, 50), (13, 5), (9, 9), (10, 9)):
        lines = summary({"m": module(failed, targets)}, "the end")
        assert len(lines) <= MAX_LINES
        assert all(len(line) <= LINE_LENGTH for line in lines)
        assert lines[-1] == "the end"
        assert sum(line.startswith("failed: m: failed") for line in lines) >= min(failed, 8)
        assert sum(line.startswith("target ") for line in lines) >= min(targets, 8)
    lines = summary({"m": module(1, 1)}, "the end")
    assert lines[:2] == ["1 passed, 1 failed", "failed: m: failed0: Bad: no"]
    assert " ".join(lines[2].split()) == "target 0 1 GB/s of 2 0.50 target 0.80 BELOW"
    assert summary({}, "the end") == ["nothing was run", "the end"]


def test_ratios() -> None:
    assert Figure("", 90.0, "GB/s", 100.0, 0.9).ratio == pytest.approx(0.9)
    assert Figure("", 2.0, "ms", 1.0, 0.6).ratio == pytest.approx(0.5)
    assert Figure("", 2.0, "ms", 1.0, 0.6).below
    assert not Figure("", 2.0, "ms", 1.0).below
    assert Figure("", float("nan"), "ms", 1.0).ratio is None
