"""A run of pytest over some files, within a time limit, which prints results as they come."""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from bench.gpu.modules import MODEL_SHAPE, ROOT, RUNS, WITH_MODEL, measures, module_name
from bench.gpu.plugin import VARIABLE
from bench.gpu.records import Result, append, as_json, read

LIMIT_S = 470.0
TEST_LIMIT_S, MEASUREMENT_LIMIT_S = 120, 170  # if there is no `pytest.mark.timeout`
SIDE_BY_SIDE = 6  # proving processes, which together fit into a GPU's memory
REHEARSED_MODEL = ("--shape", "tiny", "--set", "num_hidden_layers=1")
# Each of these variables makes the references' float32 products less exact.
ROUGH_PRODUCTS = ("TORCH_ALLOW_TF32_CUBLAS_OVERRIDE", "NVIDIA_TF32_OVERRIDE")
_POLL_S = 0.2
_MAX_LISTED, _LINE_LENGTH = 15, 118


class Run:
    """A run, its records and its log.

    Args:
        name: a key of `RUNS`. NAME.json, NAME.jsonl and NAME.log are written to `options.out`.
        options: the options of the command line.
        about: facts about the machine, for the JSON.
    """

    def __init__(self, name: str, options: argparse.Namespace, about: Mapping[str, Any]) -> None:
        self.name = name
        self.path = options.out / f"{name}.json"
        self._records = options.out.resolve() / f"{name}.jsonl"
        self._records.write_bytes(b"")
        self._log = self.path.with_suffix(".log").open("wb")
        self._options = options
        self._about = about
        self._files = list(RUNS[name])  # files that have not begun
        self._started = time.monotonic()
        self._told: set[str] = set()

    @property
    def results(self) -> dict[str, Result]:
        return read(self._records)

    @property
    def failed(self) -> bool:
        return any(result.failed for result in self.results.values())

    @property
    def not_run(self) -> list[str]:
        """The files that have not begun, and the tests of other files that have not ended."""
        return [*self._files, *(name for name, test in self.results.items() if not test.ended)]

    def run(self) -> None:
        """Runs the files until the time limit."""
        with tempfile.TemporaryDirectory(prefix="gpu-check-", ignore_cleanup_errors=True) as folder:
            model = self._options.model or Path(folder, MODEL_SHAPE)
            for files in self._turns():
                if time.monotonic() > self._started + LIMIT_S:
                    break
                if not model.exists() and WITH_MODEL & set(map(module_name, files)):
                    self._write_model(model)
                self._files = [file for file in self._files if file not in files]
                self._run_pytest(files, model)

    def fail(self, name: str, message: str) -> None:
        """Records a failure outside of the tests."""
        value = {"when": name, "outcome": "failed", "message": message, "seconds": 0.0}
        append(self._records, name, "report", value)
        self._tell()

    def end(self) -> None:
        """Writes the JSON and prints the summary."""
        self._write()
        print("\n".join(["", *self._summary()]), flush=True)
        self._log.close()

    def _turns(self) -> Iterator[list[str]]:
        """Yields files that run together. All files that prove run together. Each measurement has a
        separate process, so that the GPU's memory is free for it."""
        if proving := [file for file in self._files if not measures(file)]:
            yield proving
        yield from ([file] for file in self._files if measures(file))

    def _write_model(self, path: Path) -> None:
        shape = REHEARSED_MODEL if self._options.rehearse else ("--shape", MODEL_SHAPE)
        command = [sys.executable, "-m", "tools.make_model", *shape, "--out", str(path)]
        done = subprocess.run(command, cwd=ROOT, stdout=self._log, stderr=self._log, check=False)
        if done.returncode:
            self.fail("model", f"exit status {done.returncode}: see {self._log.name}")

    def _run_pytest(self, files: Sequence[str], model: Path) -> None:
        """Runs files in pytest's workers. Kills all processes when the time is up or when the user
        ends this program."""
        with subprocess.Popen(
            command(files),
            cwd=ROOT,
            env=environment(self._records, files, model, self._options),
            stdin=subprocess.DEVNULL,
            stdout=self._log,
            stderr=self._log,
            start_new_session=True,
        ) as process:
            try:
                while process.poll() is None and time.monotonic() < self._started + LIMIT_S:
                    self._tell()
                    time.sleep(_POLL_S)
            finally:
                with suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
        self._tell()

    def _tell(self) -> None:
        """Prints new results, and writes the JSON."""
        new = [test for test in self.results.values() if test.ended and test.name not in self._told]
        for test in new:
            self._told.add(test.name)
            seconds = time.monotonic() - self._started
            text = str(test).replace("\n", "\n           ")
            print(f"[{seconds:6.1f} s] {text}", flush=True)
        if new:
            self._write()

    def _write(self) -> None:
        content = {
            **self._about,
            "run": self.name,
            "passed": not self.failed,
            "seconds": time.monotonic() - self._started,
            "tests": {name: test.to_json() for name, test in self.results.items()},
            "not_run": self.not_run,
        }
        beside = self.path.with_suffix(".tmp")
        beside.write_text(json.dumps(as_json(content), indent=1) + "\n", encoding="utf-8")
        beside.replace(self.path)

    def _summary(self) -> Iterator[str]:
        """Yields the failures, the figures that have a target, and the tests that were not run."""
        tests = list(self.results.values())
        yield from _shortened(f"{each.outcome}: {_reason(each)}" for each in tests if each.failed)
        figures = [figure for test in tests for figure in test.figures]
        yield from _shortened(str(figure) for figure in figures if figure.target is not None)
        yield from _shortened(f"not run: {name}" for name in self.not_run)
        counts = Counter(each.outcome for each in tests if each.ended)
        verdict = ", ".join(f"{count} {outcome}" for outcome, count in counts.items())
        rehearsal = "; a rehearsal: no figure means anything" if self._options.rehearse else ""
        seconds = time.monotonic() - self._started
        yield f"{self.name}: {verdict or 'nothing was run'}, {seconds:.0f} s{rehearsal}"
        yield f"seed {self._options.seed}: {self.path}"


def command(files: Sequence[str]) -> list[str]:
    """The command for pytest, with its own configuration and only the plugins named here. If a test
    kills its process, or hangs beyond its limit, another process continues with the other tests."""
    alone = measures(files[0])
    workers = 1 if alone else min(SIDE_BY_SIDE, os.cpu_count() or 1, len(files))
    return [
        *(sys.executable, "-m", "pytest", "-c", str(ROOT / "bench/gpu/pytest.ini")),
        *(f"--rootdir={ROOT}", f"--confcutdir={ROOT}", "--continue-on-collection-errors"),
        *("-p", "xdist.plugin", "-p", "pytest_timeout", "-p", "bench.gpu.plugin"),
        *("-n", str(workers), "--dist", "load" if alone else "loadfile"),
        *("--max-worker-restart", "1000", "--timeout-method", "thread"),
        *("--timeout", str(MEASUREMENT_LIMIT_S if alone else TEST_LIMIT_S)),
        *(str(ROOT / file) for file in files),
    ]


def environment(
    records: Path, files: Sequence[str], model: Path, options: argparse.Namespace
) -> dict[str, str]:
    """The environment of pytest, which can import the checkout but loads no installed plugins."""
    setup = {
        "model": str(model.resolve()),
        "peer": str(options.peer.resolve()) if options.peer else None,
        "trace": str(options.out.resolve() / "trace.json.gz"),
        "seed": options.seed,
        "rehearse": options.rehearse,
        "smoke": records.stem == "smoke",
    }
    paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    found = dict(os.environ) | {
        VARIABLE: json.dumps({"records": str(records), "setup": setup}),
        "PYTHONPATH": os.pathsep.join(paths),
        "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",
        "TEARDOWN_CUPTI": "0",  # else a process's second profile may be empty
    }
    for name in ("PYTEST_ADDOPTS", "TEST_DEVICE", "TRITON_INTERPRET", *ROUGH_PRODUCTS):
        found.pop(name, None)
    if options.rehearse:
        found["TRITON_INTERPRET"] = "1"
    elif not measures(files[0]):
        found["TEST_DEVICE"] = "cuda"  # for tests that otherwise run on a CPU
    return found


def _shortened(lines: Iterator[str]) -> list[str]:
    """The first lines, and a line with the number of the others."""
    found = [line[:_LINE_LENGTH] for line in lines]
    if len(found) > _MAX_LISTED:
        return [*found[: _MAX_LISTED - 1], f"... and {len(found) - _MAX_LISTED + 1} more"]
    return found


def _reason(test: Result) -> str:
    """A failed test's name, and the line of pytest's report that names the error."""
    lines = test.message.splitlines()
    errors = [line.removeprefix("E").strip() for line in lines if line.startswith("E ")]
    return f"{test.name.rpartition('/')[2]}: {(errors or lines[-1:] or [''])[0]}"
