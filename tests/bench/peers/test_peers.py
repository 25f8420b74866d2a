from __future__ import annotations

import json
import re
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from bench.__main__ import main
from bench.machine import cpu_s
from bench.peers import compare as program
from bench.peers import installed
from bench.peers.driver import ENTRIES, TINY, Entry, Job
from bench.workload import BenchError, read_tokens, text_workload
from tools.make_model import DEMO_MODEL


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty .peers/."""
    for module in (installed, program):
        monkeypatch.setattr(module, "HOME", tmp_path / "peers")
    return tmp_path / "peers"


def run(monkeypatch: pytest.MonkeyPatch, entries: Sequence[Entry], out: Path, rounds: int) -> int:
    """The whole program, with the fake driver for every entry."""
    monkeypatch.setattr(program, "ENTRIES", entries)
    monkeypatch.setattr(program, "driver_module", lambda entry: "tests.bench.peers.fake_driver")
    words = f"--mode peers --model {DEMO_MODEL} --out {out} --rounds {rounds} --tiny"
    return main(words.split())


def test_entries_take_turns_and_figures_are_medians(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
) -> None:
    turns: list[str] = []
    run_driver = program.run_driver

    def watched(entry: Entry, job: Job) -> dict[str, Any]:
        turns.append(entry.name)
        return run_driver(entry, job)

    entries = [Entry("one", "nano", "2", "bf16"), Entry("two", "nano", "10", "u8")]
    monkeypatch.setattr(program, "run_driver", watched)
    out = tmp_path / "result.json"

    assert run(monkeypatch, entries, out, rounds=2) == 0

    assert turns == ["one", "two", "one", "two"]
    requests = text_workload(TINY.shape, read_tokens(DEMO_MODEL))
    lengths = [request.output_len for request in requests]
    found = json.loads(out.read_text())
    for entry, first_ms in zip(found["entries"], (2, 10), strict=True):
        expected = sum(lengths) / (0.001 * (first_ms + max(lengths) - 1))
        assert entry["output_tokens_per_s"]["median"] == pytest.approx(expected)
        assert entry["single_stream_tokens_per_s"]["median"] == pytest.approx(1000)
        assert entry["ttft_1024_s"]["max"] == pytest.approx(0.001 * first_ms)
        assert 0 < entry["start_s"]["min"] <= entry["start_s"]["median"] < 60
        assert [each["error"] for each in entry["rounds"]] == [None, None]
        assert entry["rounds"][0]["answer"]["versions"] == {"fake": "1.0"}
        assert entry["rounds"][0]["answer"]["settings"] == {"model": str(DEMO_MODEL)}
    assert [entry["cache"] for entry in found["entries"]] == ["bf16", "u8"]
    assert found["workload"]["shape"]["num_seqs"] == TINY.shape.num_seqs
    said = capsys.readouterr().out
    assert "medians of 2" in said
    assert "1000.0" in said


def test_a_failed_entry_does_not_affect_the_others(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    home: Path,
) -> None:
    names = ("broken", "short", "2")
    entries = [Entry(f"with-{name}", "nano", name, "bf16") for name in names]
    out = tmp_path / "result.json"

    assert run(monkeypatch, entries, out, rounds=1) == 1

    broken, short, fine = json.loads(out.read_text())["entries"]
    assert "RuntimeError: no such weights" in broken["rounds"][0]["error"]
    assert "the figures would not be comparable" in short["rounds"][0]["error"]
    assert "output_tokens_per_s" not in broken
    assert fine["output_tokens_per_s"]["median"] > 0
    assert "failed" in capsys.readouterr().out
    assert "no such weights" in (home / "logs" / "with-broken.log").read_text()


@pytest.mark.parametrize(
    ("peer", "there", "missing"),
    [("openvino", [], "openvino/bin/python"), ("llama_cpp", ["llama_cpp"], "models/demo-away")],
)
def test_a_missing_server_or_model_is_named(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    home: Path,
    peer: str,
    there: list[str],
    missing: str,
) -> None:
    for each in there:
        (home / each / "bin").mkdir(parents=True)
        (home / each / "bin" / "python").touch()
    entries = [Entry("here", "nano", "2", "bf16"), Entry("away", peer, "int8", "u8")]
    out = tmp_path / "result.json"

    assert run(monkeypatch, entries, out, rounds=1) == 1

    said = "".join(capsys.readouterr())
    assert f"{missing} is missing; see docs/results/peers.md" in said.replace("\n", "")
    assert out.exists() == bool(there)  # without a server, the comparison does not begin


def test_a_driver_that_hangs_is_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(program, "TIMEOUT_S", 0.01)
    monkeypatch.setattr(program, "driver_module", lambda entry: "tests.bench.peers.fake_driver")
    entry = Entry("slow", "nano", "2", "bf16")
    with pytest.raises(BenchError, match=r"slow: .*timed out"):
        program.run_driver(entry, Job("model", [1, 2], entry, TINY, 0.0))


def test_every_entry_has_a_driver_that_can_read_its_job() -> None:
    directory = Path(program.__file__).parent
    for entry in ENTRIES:
        assert (directory / f"{entry.peer}.py").exists()
        job = Job("model", [1, 2], entry, TINY, 1.5)
        assert Job.from_json(job.to_json()) == job


def test_drivers_of_others_import_only_what_their_environments_have() -> None:
    for peer in {entry.peer for entry in ENTRIES} - {"nano"}:
        text = (Path(program.__file__).parent / f"{peer}.py").read_text()
        imported = re.findall(r"^from (\w+)[\w.]* import", text, re.MULTILINE)
        assert not {"deploy", "shared", "worker_svc", "nano_vllm_grpc"} & set(imported), peer


def test_cpu_time_of_descendants_counts_while_they_run_and_afterwards() -> None:
    before, own = cpu_s(), time.process_time()
    work = "sum(range(10**7)); print('done', flush=True); input()"
    command = ["sh", "-c", f'{sys.executable} -c "{work}"; :']
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe) as process:
        assert process.stdout
        process.stdout.readline()
        running = cpu_s() - before - (time.process_time() - own)
        process.communicate(b"\n")
    ended = cpu_s() - before - (time.process_time() - own)
    assert 0.05 < running < ended + 0.05  # of a clock with ticks of 10 ms
