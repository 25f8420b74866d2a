"""The preflight and the command line: everything before anything starts."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from bench.gpu import __main__ as program
from bench.gpu import phase as phases
from bench.gpu import preflight
from bench.gpu.modules import MODULES, ROOT, Module
from bench.gpu.requirements import UNUSED, requirements, satisfies

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
    assert needed.keys() > {"grpcio", "torch", "pydantic-settings", "jinja2"}
    unused = {"smg", "smg-grpc-proto", "starlette", "uvicorn", "opentelemetry-sdk", *UNUSED}
    assert not needed.keys() & {"nano-vllm-grpc", "mypy", "ruff", *unused}
    header = (ROOT / "shared/pb/worker_pb2_grpc.py").read_text()
    generated = header.split("GRPC_GENERATED_VERSION = '")[1].split("'")[0]
    assert f">={generated}" in needed["grpcio"]
    assert len(needed["protobuf"]) == 2  # from pyproject.toml and from the stubs
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
        (["smoke"], "smoke: --out is missing: give a directory for the results"),
        (["smoke", "--out", ""], "--out: the directory for the results has no name"),
        (["prof"], "no phase prof; there are smoke, prove, measure"),
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


def test_each_phase_can_end_in_eight_minutes() -> None:
    assert phases.LIMIT_S + 10 <= 480
    assert max(module.limit_s for module in MODULES) <= phases.LIMIT_S
