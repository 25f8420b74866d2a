"""`make gpu-check` as far as it goes without a GPU: its checks in Triton's interpreter, and all
that is around them."""

from __future__ import annotations

import importlib
import json
import math
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from bench.gpu_check import decode_speed, prompt_speed, step_speed
from bench.gpu_check.__main__ import GpuCheck, ModelFiles, choose, parse_args
from bench.gpu_check.inputs import count_differences, relative_error
from bench.gpu_check.parts import run_parts
from bench.gpu_check.records import Check, Records, Report
from bench.gpu_check.sections import SECTIONS, Section
from bench.gpu_check.setup import Heads, Setup, Sizes
from bench.gpu_check.summary import passed, table, write_json
from bench.workload import Shape
from tests.worker_svc.interpreted import InterpretedPlatform
from tools.make_model import make_model
from worker_svc.kernels.paged_attention import Tiling
from worker_svc.kernels.rms_norm import rms_norm_reference
from worker_svc.kernels.sampling import select_tokens

HEADS = Heads(4, 2, 16)
TINY = Sizes(
    dtypes=(torch.float16,),
    widths=(40,),
    tokens=(1, 5),
    heads=(HEADS,),
    vocab_sizes=(301,),
    rows=(1, 5),
    block_sizes=(16, 5),
    decode_batches=(2,),
    splits=(1, 2),
    longest=40,
    large_cache_elements=2**20,
    model=(("num_hidden_layers", 1), ("vocab_size", 1537)),
    texts=(2, 9),
    decodes=2,
    graph_batches=(2,),
    graph_prompt=5,
    copy_bytes=2**10,
    rotated_bytes=1,
    speed_heads=(("tiny", HEADS),),
    speed_batches=(1, 2),
    speed_contexts=(9,),
    matmul=16,
    prompts=((1, 9, 9), (2, 3, 12)),
    max_model_len=1100,
    max_num_batched_tokens=64,
    prompt_steps=((1, 6),),
    repeats=1,
    workload=Shape(num_seqs=3, min_input=4, max_input=9, min_output=3, max_output=6),
    cache_tokens=2048,
)


class Stub:
    """Runs everything once and measures nothing."""

    def in_graph(self, runs: Sequence[Callable[[], object]]) -> float:
        for run in runs:
            run()
        return 1e-3

    def eager(self, run: Callable[[], object]) -> float:
        run()
        return 1e-3


def tiny_setup(directory: Path, model: Path | None = None) -> Setup:
    return Setup(
        device=torch.device("cpu"),
        platform=lambda s: InterpretedPlatform(s, captures=not s.enforce_eager),
        uncaptured=InterpretedPlatform,
        timer=Stub(),
        directory=directory,
        model=model or directory,
        peer=None,
        seed=1,
        sizes=TINY,
    )


def run_section(module: str, setup: Setup, only: str | None = None) -> Records:
    parts = importlib.import_module(f"bench.gpu_check.{module}").parts(setup)
    report = Report(setup.directory / f"{module}.jsonl")
    run_parts([part for part in parts if only in (None, part.name)], setup, report)
    return report.read()


def failures(records: Records) -> list[object]:
    """What a test prints of parts that failed."""
    failed = [part for part in records.parts.values() if part.failed]
    return [
        (part.name, part.status, part.message, [c for c in part.checks if not c.passed])
        for part in failed
    ]


@pytest.mark.parametrize("module", ["kernels", "backends", "model", "graphs"])
def test_correctness_sections_pass_in_the_interpreter(module: str, tmp_path: Path) -> None:
    setup = tiny_setup(tmp_path)
    if module != "kernels":
        setup = replace(setup, sizes=replace(TINY, dtypes=(torch.float32,)))
    records = run_section(module, setup)
    assert failures(records) == []
    ours = [part for part in records.parts.values() if part.status == "done"]
    assert ours
    assert all(part.checks for part in ours)
    if module != "kernels":
        assert {name: part.status for name, part in records.parts.items()} == {
            "triton": "done",
            "fa3": "skipped",
            "flash_attn": "skipped",
            "auto": "skipped",  # since it is triton
        }


def wrong_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    out = torch.empty_like(x)
    out[:, 1:] = rms_norm_reference(x, weight, eps)[:, 1:]  # one column is not written
    return out


def wrong_tokens(*args: object) -> torch.Tensor:
    return 1 + select_tokens(*args)


def keeping_all(*_: object) -> None:
    """Masks and penalizes nothing."""


def raising(*_: object) -> None:
    raise ValueError("no such thing")


@pytest.mark.parametrize(
    ("module", "name", "function", "part", "failing"),
    [
        ("kernels", "rms_norm", wrong_norm, "rms_norm", "1 x 40 float16"),
        ("kernels_sampling", "select_tokens", wrong_tokens, "sampling", "1 x 301 float16, tokens"),
        ("kernels", "store_kv", raising, "store_kv", None),
        ("kernels_features", "keep_likely", keeping_all, "filters", "1 x 301, 20 0.95 0.05, top_k"),
        ("kernels_features", "apply_masks", keeping_all, "token masks", "1 x 301"),
        ("kernels_features", "penalize", keeping_all, "token history", "penalize 1 x 301"),
    ],
)
def test_what_is_wrong_fails(
    module: str,
    name: str,
    function: Callable[..., object],
    part: str,
    failing: str | None,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(f"bench.gpu_check.{module}.{name}", function)
    section = module.partition("_")[0]
    setup = replace(tiny_setup(tmp_path), sizes=replace(TINY, tokens=(1,), rows=(1,)))
    found = run_section(section, setup, only=part).parts[part]
    assert found.failed
    if failing:
        assert failing in [check.name for check in found.checks if not check.passed]
    else:
        assert found.status == "error"
        assert found.message.endswith("ValueError: no such thing\n")


def test_errors() -> None:
    exact = torch.tensor([[3.0, 4.0], [0.0, 0.0]])
    assert relative_error(exact.half(), exact) == 0
    assert relative_error(torch.tensor([[3.0, 4.5], [0.0, 0.0]]), exact) == pytest.approx(0.1)
    assert relative_error(torch.tensor([[3.0, 4.0], [0.0, 1e-9]]), exact) == math.inf
    nan = torch.tensor([[3.0, math.nan], [0.0, 0.0]])
    assert math.isnan(relative_error(nan, exact))
    assert not Check("", relative_error(nan, exact), 1).passed
    assert count_differences(nan, nan.clone()) == 0
    assert count_differences(nan, exact) == 1


@pytest.fixture(scope="module")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("gpu-check") / "tiny"
    return make_model(path, "tiny", {"num_hidden_layers": 1})


@pytest.mark.parametrize(
    ("module", "figures"),
    [
        ("decode_speed", ["copy", "tiny, batch 1, context 9", "tiny, batch 2, context 9"]),
        ("prompt_speed", ["matrix product", "tiny, 1 x 9 of 9", "tiny, 2 x 3 of 12"]),
        ("step_speed", ["batch 2, context 9, on the GPU", "1 x 6 tokens", "penalize, batch 2"]),
    ],
)
def test_measuring_sections_run(
    module: str,
    figures: list[str],
    tmp_path: Path,
    tiny_model: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(decode_speed, "TILINGS", [Tiling(16, 4, 2)])
    monkeypatch.setattr(decode_speed, "SPLITS", [1, 2])
    monkeypatch.setattr(prompt_speed, "TILINGS", [Tiling(16, 4, 2)])
    monkeypatch.setattr(step_speed, "WARM_UPS", 1)
    records = run_section(module, tiny_setup(tmp_path, tiny_model))
    assert failures(records) == []
    found = [figure.name for part in records.parts.values() for figure in part.figures]
    assert set(figures) <= set(found)
    assert len(found) == len(set(found))


def test_rates_are_of_the_bytes_and_operations(tmp_path: Path) -> None:
    load = decode_speed.make_load(tiny_setup(tmp_path), "triton", HEADS, 2, 20)
    size = 2 * 20 * 2 * 2 * 16 * 2  # sequences, tokens, keys and values, KV heads, head_dim, bytes
    assert load.rate(lambda cache: None) == pytest.approx(size / 1e-3 / 1e9)
    pairs = 7 + 8 + 9  # that the last three of nine see
    assert prompt_speed.attention_flops(HEADS, 3, 9) == 2 * 2 * 4 * 16 * pairs


def test_workload_section(
    tmp_path: Path, tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Through a real stack and in process, on the CPU."""
    for name, value in (("THREADS", "1"), ("DEVICE", "cpu"), ("DTYPE", "float32")):
        monkeypatch.setenv(f"NANO_{name}", value)
    setup = tiny_setup(tmp_path, tiny_model)
    setup = replace(setup, sizes=replace(TINY, dtypes=(torch.float32,)))
    records = run_section("workload_speed", setup)
    assert failures(records) == []
    figures = {f.name: f for part in records.parts.values() for f in part.figures}
    assert list(figures) == ["stack", "one stream", "in process", "stack / in process"]
    ratio = figures["stack"].value / figures["in process"].value
    assert figures["stack / in process"].ratio == pytest.approx(ratio)
    assert records.parts["nano-vLLM"].status == "skipped"
    rounds = [records.parts["stack"].details[f"round {number}"] for number in range(2)]
    assert [each["cached_prompt_tokens"] for each in rounds] == [0, 0]


def test_the_peer_runs_the_same_workload(tmp_path: Path, tiny_model: Path) -> None:
    """A package that stands in for it, beside a module `bench` as it has one."""
    (tmp_path / "bench.py").write_text("raise AssertionError")
    (tmp_path / "nanovllm.py").write_text(STAND_IN)
    setup = replace(tiny_setup(tmp_path, tiny_model), peer=tmp_path)
    part = run_section("workload_speed", setup, only="nano-vLLM").parts["nano-vLLM"]
    assert (part.status, part.message) == ("done", "")
    assert len(part.details["rounds"]) == 2


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


# What is around the sections, with sections that need no GPU.


CHILD = """
import os, sys, time
from pathlib import Path
from bench.gpu_check.parts import PartPlan, run_parts
from bench.gpu_check.records import Report, SkipPart

def good(_, report):
    report.check("exact", 0, 0)
    report.check("close", 1e-3, 2e-3)
    report.figure("speed", 90.0, "GB/s", 100.0, 0.8)
    report.figure("time", 2.0, "ms", 1.0)
    report.detail("sweep", {"a": float("nan")})

def off(_, report):
    report.check("first", float("nan"), 1e-3)
    report.check("second", 7, 0, "tokens that differ")

def hanging(_, report):
    report.check("before", 0, 0)
    time.sleep(100)

def dying(_, report):
    print("last words", flush=True)
    os._exit(9)

def raising(_, report):
    raise ValueError("no such thing")

def losing_the_device(_, report):
    raise RuntimeError("CUDA error: an illegal memory access was encountered")

def skipping(_, report):
    raise SkipPart("not here")

PARTS = {
    "fine": [good, skipping],
    "rough": [raising, off, losing_the_device, dying, hanging, good],
    "slow": [good],
    "stuck": [hanging, good],
}
limit = 1 if sys.argv[1] == "rough" else 20
parts = [PartPlan(f.__name__, f, limit if f is hanging else 20) for f in PARTS[sys.argv[1]]]
run_parts(parts, None, Report(Path(sys.argv[2])))
"""
RUN = [
    Section("fine", "", 30, measures=False),
    Section("rough", "", 30, measures=False),
    Section("unstartable", "", 30, measures=False),
    Section("slow", "", 30, measures=True),
]


def child(section: Section, records: Path) -> list[str]:
    return [sys.executable, "-c", CHILD, section.name, str(records)]


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Records]:
    return GpuCheck(RUN, child, tmp_path_factory.mktemp("sections")).run()


def test_a_part_that_fails_takes_no_other_along(found: dict[str, Records]) -> None:
    assert {name: part.status for name, part in found["rough"].parts.items()} == {
        "raising": "error",
        "off": "done",
        "losing_the_device": "error",
        "dying": "crashed",
        "hanging": "out of time",
        "good": "done",
    }
    assert "last words" in found["rough"].parts["dying"].message
    assert found["rough"].parts["hanging"].checks  # what it knew before
    assert {name: part.status for name, part in found["fine"].parts.items()} == {
        "good": "done",
        "skipping": "skipped",
    }
    assert found["slow"].parts["good"].status == "done"
    start = found["unstartable"].parts["start"]
    assert start.status == "crashed"
    assert "KeyError: 'unstartable'" in start.message


def test_table_and_json(found: dict[str, Records], tmp_path: Path) -> None:
    lines = {line.split("  ")[0]: line for line in table(found)}
    assert "pass " in lines["fine/good"]
    assert "2 checks, worst 1.0e-03 of 2.0e-03 (close)" in lines["fine/good"]
    assert lines["fine/skipping"].split(maxsplit=1)[1] == "skipped      not here"
    assert "FAILED" in lines["rough/off"]
    assert "    second: 7, bound 0 tokens that differ" in table(found)
    assert lines["rough/raising"].endswith("error        ValueError: no such thing")
    assert "out of time" in lines["rough/hanging"]
    assert lines["fine/good: speed"].split()[-5:] == ["90", "GB/s", "100", "0.90", "0.80"]
    assert lines["fine/good: time"].split()[-4:] == ["2", "ms", "1", "0.50"]

    out = tmp_path / "out.json"
    write_json(out, {"seed": 1}, found)
    content = json.loads(out.read_text())
    assert (content["seed"], content["passed"]) == (1, False)
    rough = content["sections"]["rough"]
    assert rough["off"]["checks"][0] == {
        "name": "first",
        "error": None,
        "bound": 1e-3,
        "detail": "",
        "passed": False,
    }
    assert "ValueError: no such thing" in rough["raising"]["message"]
    assert content["sections"]["fine"]["good"]["figures"][0]["ratio"] == pytest.approx(0.9)
    assert content["sections"]["fine"]["good"]["details"] == {"sweep": {"a": None}}
    assert passed({"fine": found["fine"]})
    assert not passed({"rough": found["rough"]})


def test_a_section_ends_when_its_time_is_up(tmp_path: Path) -> None:
    section = Section("stuck", "", 3, measures=True)
    parts = GpuCheck([section], child, tmp_path).run()["stuck"].parts
    assert parts["hanging"].status == "out of time"
    assert (parts["good"].status, parts["good"].message) == ("out of time", "it had not begun")


def test_a_model_that_cannot_be_made_fails_what_needs_it(tmp_path: Path) -> None:
    class NoModel(ModelFiles):
        def __init__(self) -> None:
            pass

        def wait(self) -> str:
            return "no space left"

    sections = [Section("slow", "", 9, measures=True, needs_model=True), RUN[-1]]
    sections[1] = replace(sections[1], name="fine")
    check = GpuCheck(sections, child, tmp_path)
    records = check.run(NoModel())
    assert records["slow"].parts["model"].message == "no space left"
    assert not passed(records)
    assert records["fine"].parts["good"].status == "done"


@pytest.mark.parametrize(
    ("only", "skip", "expected"),
    [
        ("kernels,tp", "", ["kernels", "tp"]),
        ("tp,kernels", "tp", ["kernels"]),
        (None, "kernels,attention,model,graphs,tp,decode,prompt,step", ["workload"]),
    ],
)
def test_choice_of_sections(only: str | None, skip: str, expected: list[str]) -> None:
    assert [section.name for section in choose(only, skip)] == expected


def test_an_unknown_section_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as error:
        parse_args(["--only", "kernels,speed"])
    assert error.value.code == 2
    assert "no section speed; there are kernels, attention," in capsys.readouterr().err


def test_the_whole_takes_8_minutes_at_most() -> None:
    proving = max(section.limit_s for section in SECTIONS if not section.measures)
    assert proving + sum(section.limit_s for section in SECTIONS if section.measures) <= 480


def test_every_section_has_parts(tmp_path: Path) -> None:
    for section in SECTIONS:
        parts = importlib.import_module(section.module).parts(tiny_setup(tmp_path))
        names = [part.name for part in parts]
        assert names
        assert len(names) == len(set(names))


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_it_says_so(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "bench.gpu_check", "--out", tmp_path / "out.json"],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 2
    assert done.stderr == "gpu-check: torch finds no CUDA device, so there is nothing to check\n"
    assert not (tmp_path / "out.json").exists()
