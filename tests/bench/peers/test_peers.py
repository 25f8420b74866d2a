from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

import pytest

from bench.errors import BenchError
from bench.peers import __main__ as program
from bench.peers import driver, install
from bench.peers.calibration import Calibration, calibrate
from bench.peers.driver import Figures
from bench.peers.entries import ENTRIES, TINY, Entry, Job
from bench.peers.nano import settings
from bench.peers.report import Answer, Range
from bench.workload import reference_workload

SPEED = Calibration(10.0, 100.0, 400.0)


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty .peers/, on a machine whose speed is known."""
    for module in (install, program):
        monkeypatch.setattr(module, "HOME", tmp_path / "peers")
    monkeypatch.setattr(program, "calibrate", lambda: SPEED)
    return tmp_path / "peers"


@pytest.fixture
def model(tmp_path: Path) -> Path:
    directory = tmp_path / "model"
    directory.mkdir()
    (directory / "config.json").write_text('{"vocab_size": 1536}')
    return directory


def run(
    monkeypatch: pytest.MonkeyPatch, entries: Sequence[Entry], model: Path, out: Path, rounds: int
) -> int:
    """The whole program, with the fake driver for every entry."""
    monkeypatch.setattr(program, "ENTRIES", entries)
    monkeypatch.setattr(program, "driver_module", lambda entry: "tests.bench.peers.fake_driver")
    flags = ["--model", model, "--out", out, "--rounds", rounds, "--tiny"]
    return program.main([str(flag) for flag in flags])


def test_entries_take_turns_and_figures_are_medians(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    model: Path,
    tmp_path: Path,
) -> None:
    turns: list[str] = []
    run_driver = program.run_driver

    def watched(entry: Entry, job: Job) -> Answer:
        turns.append(entry.name)
        return run_driver(entry, job)

    entries = [Entry("one", "nano", "2", "bf16"), Entry("two", "nano", "10", "u8")]
    monkeypatch.setattr(program, "run_driver", watched)
    out = tmp_path / "result.json"

    assert run(monkeypatch, entries, model, out, rounds=2) == 0

    assert turns == ["one", "two", "one", "two"]
    requests = reference_workload(TINY.shape, 1536)
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
        assert entry["rounds"][0]["answer"]["settings"] == {"model": str(model)}
        assert entry["rounds"][0]["before"] == entry["rounds"][1]["after"] == asdict(SPEED)
    assert [entry["cache"] for entry in found["entries"]] == ["bf16", "u8"]
    assert found["workload"]["shape"]["num_seqs"] == TINY.shape.num_seqs
    assert found["machine"]["cores"] >= 1
    assert "commit" in found
    said = capsys.readouterr().out
    assert "medians of 2" in said
    assert "1000.0" in said
    assert "the machine meanwhile: read_gb_per_s 10," in said


def test_a_failure_leaves_the_others_their_figures(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    model: Path,
    tmp_path: Path,
    home: Path,
) -> None:
    names = ("broken", "short", "2")
    entries = [Entry(f"with-{name}", "nano", name, "bf16") for name in names]
    out = tmp_path / "result.json"

    assert run(monkeypatch, entries, model, out, rounds=1) == 1

    broken, short, fine = json.loads(out.read_text())["entries"]
    assert "RuntimeError: no such weights" in broken["rounds"][0]["error"]
    assert "the figures would not be comparable" in short["rounds"][0]["error"]
    assert "output_tokens_per_s" not in broken
    assert fine["output_tokens_per_s"]["median"] > 0
    assert "failed" in capsys.readouterr().out
    assert "no such weights" in (home / "logs" / "with-broken.log").read_text()


def test_a_server_that_is_not_installed_is_refused_before_anything_runs(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    model: Path,
    tmp_path: Path,
) -> None:
    entries = [Entry("here", "nano", "2", "bf16"), Entry("away", "openvino", "int8", "u8")]
    out = tmp_path / "result.json"

    assert run(monkeypatch, entries, model, out, rounds=1) == 1

    message = "openvino is not installed: python -m bench.peers.install openvino"
    assert message in capsys.readouterr().err
    assert not out.exists()


def test_only_names_entries(capsys: pytest.CaptureFixture[str], model: Path) -> None:
    flags = ["--model", str(model), "--out", "o", "--only"]
    assert program.parse_args([*flags, "vllm-bf16", "nano-bf16"]).only == ["vllm-bf16", "nano-bf16"]
    with pytest.raises(SystemExit):
        program.parse_args([*flags, "other"])
    assert "openvino-int4" in capsys.readouterr().err


def test_a_directory_without_a_model_is_refused(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    with pytest.raises(SystemExit):
        program.main(["--model", str(tmp_path), "--out", "o"])
    assert f"--model: {tmp_path} has no config.json" in capsys.readouterr().err


def test_a_driver_that_hangs_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(program, "TIMEOUT_S", 0.01)
    monkeypatch.setattr(program, "driver_module", lambda entry: "tests.bench.peers.fake_driver")
    entry = Entry("slow", "nano", "2", "bf16")
    with pytest.raises(BenchError, match=r"slow: .*timed out"):
        program.run_driver(entry, Job("model", 1536, entry, TINY, 0.0))


def test_every_entry_has_a_driver_and_a_job_survives_the_way_to_it() -> None:
    directory = Path(program.__file__).parent
    for entry in ENTRIES:
        assert (directory / f"{entry.peer}.py").exists()
        assert entry.peer == "nano" or entry.peer in install.PEERS
        job = Job("model", 1536, entry, TINY, 1.5)
        assert Job.from_json(job.to_json()) == job


def test_the_settings_of_this_server() -> None:
    assert settings(Entry("", "nano", "bf16", "bf16")) == {"NANO_DTYPE": "bfloat16"}
    assert settings(Entry("", "nano", "int8", "int8")) == {
        "NANO_DTYPE": "bfloat16",
        "NANO_QUANTIZATION": "int8",
        "NANO_KV_DTYPE": "int8",
    }


def test_a_model_is_converted_once_and_again_when_it_changes(
    monkeypatch: pytest.MonkeyPatch, model: Path, home: Path
) -> None:
    conversions: list[str] = []

    def convert(environment: Path, model: Path, weights: str, out: Path) -> None:
        out.write_text("unfinished")
        conversions.append(weights)
        if weights == "int4":
            raise BenchError("no space left")

    monkeypatch.setitem(install.PEERS, "fake", install.Peer((), convert=convert))
    entry = Entry("", "fake", "int8", "u8")

    first = install.converted(entry, model)
    assert first.exists()
    assert install.converted(entry, model) == first
    assert conversions == ["int8"]

    with pytest.raises(BenchError, match="no space left"):
        install.converted(Entry("", "fake", "int4", "u8"), model)
    with pytest.raises(BenchError, match="no space left"):  # and not taken for converted
        install.converted(Entry("", "fake", "int4", "u8"), model)

    (model / "model.safetensors").write_text("other weights")
    assert install.converted(entry, model) != first
    assert conversions == ["int8", "int4", "int4", "int8"]


def test_a_command_that_fails_says_why(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install.environment("fake").mkdir(parents=True)
    monkeypatch.setitem(install.PEERS, "fake", install.Peer(("./no-such-package",)))
    with pytest.raises(BenchError, match="no-such-package"):
        install.install("fake")
    with pytest.raises(BenchError, match="fake is not installed"):
        install.python("fake")
    assert sys.executable == str(install.python("nano"))


def test_a_command_may_print_bytes_that_are_not_utf_8() -> None:
    """As llama-quantize does, whose vocabulary has parts of characters."""
    prints = "import os, sys; os.write(1, b'token \\xe2\\x96'); sys.exit(int(sys.argv[1]))"
    install._run(sys.executable, "-c", prints, "0")
    with pytest.raises(BenchError, match=r"status 3 of .*\ntoken \uFFFD"):
        install._run(sys.executable, "-c", prints, "3")


def test_the_machine_has_a_speed() -> None:
    speed = calibrate()
    assert min(speed.read_gb_per_s, speed.float32_gflop_per_s, speed.int8_gop_per_s) > 0


def test_processes_below_count_while_they_run_and_afterwards() -> None:
    before, own = driver.cpu_s(), time.process_time()
    work = "sum(range(10**7)); print('done', flush=True); input()"
    command = ["sh", "-c", f'{sys.executable} -c "{work}"; :']
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe) as process:
        assert process.stdout
        process.stdout.readline()
        running = driver.cpu_s() - before - (time.process_time() - own)
        process.communicate(b"\n")
    ended = driver.cpu_s() - before - (time.process_time() - own)
    assert 0.05 < running < ended + 0.05  # of a clock with ticks of 10 ms


def test_ranges() -> None:
    assert Range.of([3.0, 1.0, 8.0]) == Range(3.0, 1.0, 8.0)
    assert Range.of([3.0, 1.0, 8.0]).show("{:.1f}") == "3.0 (1.0–8.0)"
    assert Range.of([2.0]).show("{:.1f}") == "2.0"


def test_an_answer_is_read_as_it_is_written() -> None:
    figures = {
        "output_tokens_per_s": 1.0,
        "cores_busy": 1.5,
        "single_stream_tokens_per_s": 2.0,
        "ttft_1024_s": 3.0,
        "start_s": 4.0,
    }
    text = json.dumps({"figures": figures, "versions": {"a": "1"}, "settings": {}})
    assert Answer.from_json(text) == Answer(Figures(1.0, 1.5, 2.0, 3.0, 4.0), {"a": "1"}, {})
