"""`make gpu-check` as far as it goes without a GPU: its runner, plugin and preflight, and a
rehearsal of what it measures."""

from __future__ import annotations

import gzip
import json
import os
import signal
import subprocess
import sys
import threading
import time
from argparse import Namespace
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from bench.gpu import __main__ as program
from bench.gpu import decode_speed, preflight, prompt_speed, stack_speed
from bench.gpu import phase as phases
from bench.gpu.modules import MODULES, ROOT, Module
from bench.gpu.phase import Phase
from bench.gpu.records import Figure, Journal, Records, Report, Result
from bench.gpu.requirements import requirements, satisfies
from bench.gpu.runner import ModuleRun, Plan
from bench.gpu.setup import REHEARSAL, Heads, Setup, make_setup
from bench.gpu.steps import snapshot
from bench.gpu.summary import LINE_LENGTH, MAX_LINES, summary
from bench.workload import Shape, reference_workload
from tools.make_model import make_model

# The runner, with modules that need no GPU.

ROUGH = """
import os, time
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

@pytest.mark.timeout(1)
def test_hangs(report):
    report.figure("before", 1.0, "ms")
    time.sleep(100)

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
STUCK = "import time\ndef test_stuck(): time.sleep(100)\ndef test_left(): pass\n"


def make_plan(module: Module, journal_file: int, compile_only: bool) -> Plan:
    options = Namespace(rehearse=True, seed=1, peer=None, out=Path())
    return program.make_plan(module, journal_file, compile_only, options, Path("no-model"))


def write_module(directory: Path, name: str, text: str, limit_s: float = 60) -> Module:
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
        write_module(directory, "test_stuck.py", STUCK, limit_s=4),
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
        "test_hangs": "out of time",
        "test_passes[1]": "passed",
        "test_passes[2]": "passed",
        "test_skips": "skipped",
        "test_with_it": "failed",
    }
    found = messages(records)
    assert "ValueError: no such thing" in found["test_raises"]
    assert found["test_takes_the_process_along"].startswith("exit status 9\n")
    assert found["test_takes_the_process_along"].endswith("last words")
    assert "in test_hangs" in found["test_hangs"]  # where it was
    assert found["test_skips"] == "not here"
    assert "setup: " in found["test_with_it"]
    tests = {name.rpartition("::")[2]: test for name, test in records.tests.items()}
    assert tests["test_passes[2]"].properties == {"n": 2}
    assert tests["test_hangs"].figures  # what it knew before
    assert not rough.passed


def test_a_test_after_a_lost_device_has_a_new_process(rough: Phase) -> None:
    """One each for what is lost, crashes and hangs, and for the rest; not for little memory."""
    log = rough.path.with_suffix(".log").read_text()
    assert log.count("rough: rootdir: ") == 4


def test_modules_that_do_not_begin_or_end_well(rough: Phase) -> None:
    results = rough.results
    assert outcomes(results["fine"]) == {"test_fine": "passed"}
    assert outcomes(results["broken"]) == {"start": "crashed"}
    assert "No module named 'no_such_package'" in messages(results["broken"])["start"]
    assert outcomes(results["empty"]) == {"start": "crashed"}
    assert outcomes(results["stuck"]) == {"test_stuck": "out of time", "test_left": "out of time"}
    assert "it had not begun" in messages(results["stuck"])["test_left"]
    assert outcomes(results["exit"]) == {"test_fine": "passed", "exit": "crashed"}
    assert "SIGABRT" in messages(results["exit"])["exit"]


def test_the_json_has_it_all(rough: Phase) -> None:
    content = json.loads(rough.path.read_text())
    assert (content["seed"], content["passed"]) == (1, False)
    assert list(content["modules"]) == ["rough", "broken", "fine", "stuck", "empty", "exit"]
    found = content["modules"]["rough"]
    assert found["verdict"] == "2 passed, 1 skipped, 4 failed, 1 crashed, 1 out of time"
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
    assert not phase.passed  # for want of a model; not for a target


def test_what_has_not_begun_at_the_deadline_is_out_of_time(tmp_path: Path) -> None:
    modules = [write_module(tmp_path, f"test_{name}.py", STUCK) for name in ("one", "two")]
    phase = Phase("prove", tmp_path, {}, make_plan, threading.Event(), limit_s=3)
    phase.prove(modules, side_by_side=1)
    assert phase.seconds < 6
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
        while not processes_of(f"{tmp_path}/test_stuck.py"):
            time.sleep(0.05)
        process.send_signal(number)
        output = process.stdout.read()
        assert process.wait(20) == 1
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


# Records, and their summary.


def test_records_that_several_processes_append(tmp_path: Path) -> None:
    file = os.open(tmp_path / "journal", os.O_RDWR | os.O_APPEND | os.O_CREAT)
    mine, yours = Journal(file), Journal(file)
    mine.write("a", "plan", tests=["x", "y", "z"])
    mine.write("a", "start", test="x", limit_s=None)
    os.write(file, b'{"module": "a", ')  # of a line that is still being written
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


# Before anything starts.


GOOD = preflight.Facts(
    python="3.12.3",
    packages={"grpcio": "1.85.1", "torch": "2.11.0", "pytest": "9.2"},
    interpret=None,
    compiler="/usr/bin/gcc",
    python_header=True,
    obstacles=[],
    free_bytes=1 << 40,
    torch={
        "cuda": "13.0",
        "gpus": 1,
        "gpu": "A GPU",
        "capability": [9, 0],
        "memory_bytes": 1 << 36,
        "modules": ["triton", "flash_attn"],
    },
    driver="580.1",
)
NEEDED = {"grpcio": [">=1.70", ">=1.85.1"], "torch": ["~=2.10"], "pytest": [">=8.3"]}


def test_nothing_is_wrong_where_all_is_there() -> None:
    assert preflight.problems(GOOD, NEEDED) == []
    machine = preflight.machine(GOOD)
    assert (machine["FlashAttention 2"], machine["FlashAttention 3"]) == (True, False)
    assert preflight.in_words(machine).startswith("A GPU, driver 580.1, CUDA 13.0, torch 2.11.0")


def test_everything_that_is_wrong_is_named_at_once() -> None:
    found = preflight.Facts(
        python="3.10.1",
        packages={"grpcio": "1.84.2", "torch": "2.9.1", "pytest": None},
        interpret="1",
        compiler=None,
        python_header=False,
        obstacles=["/out cannot be written to: Read-only file system: give another with --out"],
        free_bytes=1 << 30,
        torch={"cuda": None, "gpus": 0, "modules": []},
    )
    text = "\n".join(preflight.problems(found, NEEDED))
    for part in (
        "grpcio>=1.70,>=1.85.1 is needed, 1.84.2 is installed",
        "torch~=2.10 is needed, 2.9.1 is installed",
        "pytest>=8.3 is not installed",
        "-m pip install 'grpcio>=1.70,>=1.85.1' 'torch~=2.10' 'pytest>=8.3'",
        "Python 3.11 or newer",
        "TRITON_INTERPRET is 1",
        "no C compiler",
        "/out cannot be written to: Read-only file system: give another with --out",
        "1.0 GiB left",
        "torch is built without CUDA",
        "triton cannot be imported",
    ):
        assert part in text


@pytest.mark.parametrize(
    ("torch", "problem"),
    [
        ({"cuda": "13.0", "modules": ["triton"]}, "torch finds no CUDA device"),
        (GOOD.torch | {"capability": [7, 5]}, "A GPU has compute capability 7.5: at least 8.0"),
        ({}, "torch cannot be imported"),
    ],
)
def test_what_is_wrong_with_the_gpu(torch: dict[str, Any], problem: str) -> None:
    (found,) = preflight.problems(replace(GOOD, torch=torch), NEEDED)
    assert problem in found
    assert preflight.problems(replace(GOOD, torch=torch), NEEDED, gpu=False) == []


def test_python_headers_are_missing() -> None:
    (found,) = preflight.problems(replace(GOOD, python_header=False), NEEDED)
    assert "python3-dev" in found


def test_requirements_are_those_of_the_extras_and_the_stubs() -> None:
    needed = requirements()
    assert needed.keys() > {"grpcio", "torch", "pydantic-settings", "jinja2", "supervisor"}
    assert not needed.keys() & {"nano-vllm-grpc", "xgrammar", "matplotlib", "mypy", "ruff"}
    header = (ROOT / "shared/pb/worker_pb2_grpc.py").read_text()
    generated = header.split("GRPC_GENERATED_VERSION = '")[1].split("'")[0]
    assert f">={generated}" in needed["grpcio"]
    assert len(needed["protobuf"]) == 2  # of pyproject.toml, and of the stubs
    assert needed["pytest"] == [">=8.3"]
    found = preflight.facts(needed, ROOT, ask_torch=False)
    assert preflight.problems(found, needed, gpu=False) == []


@pytest.mark.parametrize("packaging", [True, False])
def test_versions(packaging: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if not packaging:
        monkeypatch.setitem(sys.modules, "packaging.specifiers", None)
    assert satisfies("2.11.0+cu130", ">=2.10")
    assert satisfies("2.10", "~=2.10")
    assert not satisfies("2.9.1", ">=2.10")
    assert not satisfies("1.85.0", ">=1.85.1")
    assert not satisfies("2.9", "~=2.10")


def test_where_results_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    needed = {"torch": [">=2"]}
    found = preflight.facts(needed, tmp_path / "file" / "out", ask_torch=False)
    (problem,) = found.obstacles
    assert problem.endswith("cannot be written to: Not a directory: give another with --out")
    assert preflight.facts(needed, tmp_path / "new" / "out", ask_torch=False).obstacles == []
    assert not (tmp_path / "new").exists()


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_it_says_so(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "bench.gpu", "--out", tmp_path / "out"],
        capture_output=True,
        text=True,
        timeout=60,
        env={k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"},
    )
    assert done.returncode == 2
    assert done.stderr.startswith("gpu-check: nothing was run, since\n")
    assert "CUDA" in done.stderr
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("module", MODULES[:1] + MODULES[-1:], ids=lambda module: module.name)
def test_the_environment_of_a_module(module: Module, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (("PYTHONPATH", "/a:/b"), ("TEST_DEVICE", "cpu")):
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    found = program.environment(module, rehearse=False)
    assert found["PYTHONPATH"] == f"{ROOT}:/a:/b"
    assert found.get("TEST_DEVICE") == (None if module.measures else "cuda")
    assert "TRITON_INTERPRET" not in found
    found = program.environment(module, rehearse=True)
    assert (found["TRITON_INTERPRET"], found.get("TEST_DEVICE")) == ("1", None)


# The command line.


def test_choice_of_modules() -> None:
    def names(*phases: str, only: str | None = None) -> dict[str, list[str]]:
        found = program.choose(phases, only)
        return {phase: [module.name for module in modules] for phase, modules in found.items()}

    assert list(names()) == ["prove", "measure"]
    assert list(names("measure")) == ["measure"]
    assert names(only="sampling,filters") == {"prove": ["sampling", "filters"]}
    assert names("measure", only="stack,ceilings") == {"measure": ["ceilings", "stack"]}
    every = [module.name for module in MODULES]
    assert len(set(every)) == len(every)


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--only", "kernels,speed"], "no module kernels, speed; there are rms_norm,"),
        (["prove", "--only", "stack"], "no module stack; there are rms_norm,"),
        (["prof"], "no phase prof; there are prove, measure"),
    ],
)
def test_what_is_unknown_is_named(
    args: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as error:
        program.parse_args(args)
    assert error.value.code == 2
    assert message in capsys.readouterr().err


def test_out_is_a_directory_or_a_file_in_it(tmp_path: Path) -> None:
    assert program.parse_args([]).out == Path("gpu-check")
    assert program.parse_args(["--out", str(tmp_path)]).out == tmp_path
    assert program.parse_args(["--out", str(tmp_path / "a.json")]).out == tmp_path
    (tmp_path / "b.json").mkdir()
    assert program.parse_args(["--out", str(tmp_path / "b.json")]).out == tmp_path / "b.json"


def test_every_module_is_there() -> None:
    for module in MODULES:
        assert (ROOT / module.path).is_file(), module.path
        assert module.measures == module.path.startswith("bench/gpu/")


def test_each_phase_can_end_in_nine_minutes() -> None:
    assert phases.LIMIT_S + 10 <= 540
    assert max(module.limit_s for module in MODULES) <= phases.LIMIT_S


# A rehearsal: what is measured on a GPU, on a CPU and in small.


@pytest.fixture(scope="module")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("gpu") / "tiny"
    return make_model(path, "tiny", {"num_hidden_layers": 1})


def tiny_setup(model: Path, **options: Any) -> Setup:
    return make_setup(model=str(model), seed=1, rehearse=True, **options)


def test_measurements_run(tmp_path: Path, tiny_model: Path) -> None:
    """All that need no stack, in one process: torch is imported once."""
    options = Namespace(rehearse=True, seed=1, peer=None, out=tmp_path)
    file = os.open(tmp_path / "journal", os.O_RDWR | os.O_APPEND | os.O_CREAT)
    modules = [module for module in MODULES if module.measures and module.name != "stack"]
    plan = program.make_plan(modules[0], file, False, options, tiny_model)
    command = [*plan.command, *(str(ROOT / module.path) for module in modules[1:])]
    plan = replace(plan, command=command, limit_s=110, test_limit_s=60)
    log = os.open(tmp_path / "log", os.O_WRONLY | os.O_CREAT)
    running = ModuleRun(plan, Journal(file), log, time.monotonic() + 110)
    while not running.poll():
        time.sleep(0.05)

    tests = running.records.tests.values()
    assert [(test.name, test.message) for test in tests if test.failed] == []
    names = [figure.name for test in tests for figure in test.figures]
    assert len(names) == len(set(names))
    assert set(names) >= {
        "bandwidth",
        "matrix product",
        "decode attention, triton, tiny, 1 x 9",
        "decode attention, triton, tiny, 2 x 9",
        "decode attention, triton, tiny, 3 mixed",
        "prompt attention, triton, tiny, 2 x 3 of 12",
        "step, 2 x 9: on the GPU",
        "step, 3 mixed: back to back",
        "step, 2 + 6 of a prompt: its kernels",
        "step, 1 x 6 tokens: launches",
        "in process, triton, 64 prompt tokens",
        "in process",
        "penalize, batch 2",
        "top_k 20, top_p 0.95, batch 2",
    }
    details = {name: value for test in tests for name, value in test.details.items()}
    assert set(details["ways to move bytes, GB/s"]) > {"copy, in a graph", "copy, on the stream"}
    kinds = details["triton, 16 prompt tokens, round 1"]["kinds"]
    assert sum(kind["rows"] for kind in kinds.values()) >= sum(each.output_len for each in SMALL)
    wanted = {"steps", "rows", "tokens", "launch_cpu_s", "gpu_s"}
    assert all(wanted <= kind.keys() for kind in kinds.values())
    assert details["serving, triton, 16 prompt tokens"]["attention"] == "triton"
    assert {test.message for test in tests if "fa3" in test.name} > set()
    with gzip.open(tmp_path / "trace.json.gz", "rt") as trace:
        assert json.load(trace)["traceEvents"]


SMALL = reference_workload(REHEARSAL.workload, 100)


def test_rates_are_of_the_bytes_and_operations(tiny_model: Path) -> None:
    heads = Heads(4, 2, 16)
    load = decode_speed.make_load(tiny_setup(tiny_model), "triton", heads, [20, 7])
    size = (20 + 7) * 2 * 2 * 16 * 4  # tokens, keys and values, KV heads, head_dim, bytes
    assert load.rate(lambda cache: None) == pytest.approx(size / 1e-3 / 1e9)
    pairs = 7 + 8 + 9  # that the last three of nine see
    assert prompt_speed.attention_flops(heads, 3, 9) == 2 * 2 * 4 * 16 * pairs


def test_the_workload_halfway() -> None:
    contexts = snapshot(Shape())
    assert contexts == snapshot(Shape())
    requests = reference_workload(Shape(), 1)
    assert all(
        len(request.prompt) < context <= len(request.prompt) + request.output_len
        for request, context in zip(requests, contexts, strict=True)
    )
    assert 750 < sum(contexts) / len(contexts) < 950


def test_the_stack_is_measured(tmp_path: Path) -> None:
    """The program itself, through a real stack."""
    done = subprocess.run(
        [
            *(sys.executable, "-m", "bench.gpu", "measure", "--rehearse", "--only", "stack"),
            *("--out", tmp_path / "out" / "gpu.json"),
        ],
        env=os.environ | {"NANO_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=110,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    last = done.stdout.splitlines()[-4:]
    assert last[0] == "1 passed, 1 skipped"
    assert [line[:10] for line in last[1:3]] == ["stack     ", "one stream"]
    assert "a rehearsal: no figure means anything" in last[-1]
    content = json.loads((tmp_path / "out" / "measure.json").read_text())
    assert content["rehearsal"] is True
    tests = content["modules"]["stack"]["tests"]
    stack, peer = tests.values()
    assert peer["message"] == "no checkout of nano-vLLM, see --peer"
    rounds = [stack["details"][f"round {number}"] for number in range(2)]
    assert [each["cached_prompt_tokens"] for each in rounds] == [0, 0]
    for process in ("client", "frontend", "scheduler_svc", "worker_svc"):
        used = [found["cpu_s"][process] for found in (*rounds, stack["details"]["one stream"])]
        assert min(used) >= 0
        assert sum(used) > 0
    assert len(list((tmp_path / "out").iterdir())) == 3


def test_the_peer_runs_the_same_workload(tmp_path: Path, tiny_model: Path) -> None:
    """A package that stands in for it, beside a module `bench` as it has one."""
    (tmp_path / "bench.py").write_text("raise AssertionError")
    (tmp_path / "nanovllm.py").write_text(STAND_IN)
    journal = Journal(os.memfd_create("journal"))
    report = Report(journal, "stack", "peer")
    report.figure("stack", 300.0, "tokens/s")
    stack_speed.measure_peer(tiny_setup(tiny_model, peer=str(tmp_path)), report)
    found = journal.of("stack").tests["peer"]
    assert len(found.details["rounds"]) == 2
    assert found.figures[-1].name == "stack / nano-vLLM"
    assert found.figures[-1].against == report.value("nano-vLLM")


STAND_IN = """
from collections import namedtuple
from types import SimpleNamespace
fields = "temperature max_tokens ignore_eos"
SamplingParams = namedtuple("SamplingParams", fields, defaults=[1, 64, 0])
class LLM:
    def __init__(self, model, enforce_eager, max_model_len):
        config = SimpleNamespace(hf_config=SimpleNamespace(vocab_size=1536))
        self.model_runner = SimpleNamespace(config=config)
        self.calls = []
    def generate(self, prompts, params, use_tqdm=True):
        self.calls.append(prompts)
        if len(self.calls) == 1:
            return
        assert len(prompts) == 256 and sum(each.max_tokens for each in params) == 133966
        assert all(each.ignore_eos and each.temperature == 0.6 for each in params)
        assert prompts not in self.calls[:-1]
"""
