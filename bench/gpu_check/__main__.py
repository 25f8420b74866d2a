"""`make gpu-check`: proves the worker's GPU path against references, then measures it.

The file written says what was found; the exit status is 1 if something failed, 2 without a GPU.
See docs/gpu-check.md.
"""

from __future__ import annotations

import argparse
import os
import random
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, nullcontext
from datetime import UTC, datetime
from pathlib import Path

from bench.gpu_check.records import Part, Records, append, read
from bench.gpu_check.runner import SectionRun
from bench.gpu_check.sections import SECTIONS, Section
from bench.gpu_check.summary import passed, table, verdict, write_json
from bench.machine import this_machine

ROOT = Path(__file__).parents[2]
DEFAULT_PEER = Path(".peers/nano-vllm")
SIDE_BY_SIDE = 4
MODEL = "qwen3-0.6b"
MODEL_LIMIT_S = 120.0

Command = Callable[[Section, Path], Sequence[str]]


def parse_args(args: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m bench.gpu_check", description=(__doc__ or "").partition("\n")[0]
    )
    names = ", ".join(section.name for section in SECTIONS)
    parser.add_argument("--only", metavar="NAME,...", help=f"sections: {names}")
    parser.add_argument("--skip", metavar="NAME,...", default="", help="sections")
    parser.add_argument("--out", type=Path, default=Path("gpu-check.json"), help="%(default)s")
    parser.add_argument(
        "--peer", type=Path, help=f"a checkout of nano-vLLM (default: {DEFAULT_PEER}, if there)"
    )
    parser.add_argument("--model", type=Path, help=f"default: {MODEL} with random weights")
    parser.add_argument("--seed", type=int, help="of the random inputs (default: random)")
    options = parser.parse_args(args)
    try:
        options.sections = choose(options.only, options.skip)
    except ValueError as error:
        parser.error(str(error))
    if options.peer is None and DEFAULT_PEER.is_dir():
        options.peer = DEFAULT_PEER
    if options.seed is None:
        options.seed = random.SystemRandom().randrange(2**31)
    return options


def choose(only: str | None, skip: str) -> list[Section]:
    """
    Raises:
        ValueError: there is no such section.
    """
    skipped = _split(skip)
    wanted = [section.name for section in SECTIONS] if only is None else _split(only)
    known = [section.name for section in SECTIONS]
    if unknown := (set(wanted) | set(skipped)).difference(known):
        raise ValueError(f"no section {', '.join(sorted(unknown))}; there are {', '.join(known)}")
    return [each for each in SECTIONS if each.name in wanted and each.name not in skipped]


class GpuCheck:
    """A run of some sections.

    Args:
        command: of a section's process, which writes to the given file of records.
    """

    def __init__(self, sections: Sequence[Section], command: Command, directory: Path) -> None:
        self._sections = sections
        self._command = command
        self._directory = directory
        self._started = time.monotonic()
        self._stop = threading.Event()

    @property
    def seconds(self) -> float:
        return time.monotonic() - self._started

    def run(self, model: ModelFiles | None = None) -> dict[str, Records]:
        """Those that prove side by side, then those that measure one by one.

        Args:
            model: of the sections that need one, if it is not there yet.
        """
        found: dict[Section, Records] = {}
        with ThreadPoolExecutor(SIDE_BY_SIDE) as pool:
            try:
                proving = [section for section in self._sections if not section.measures]
                found.update(zip(proving, pool.map(self._run_section, proving), strict=True))
            except BaseException:
                self._stop.set()
                raise
        for section in self._sections:
            if section.measures:
                reason = model.wait() if model and section.needs_model else ""
                found[section] = self._run_section(section, reason)
        return {section.name: found[section] for section in self._sections}

    def _run_section(self, section: Section, obstacle: str = "") -> Records:
        records = self._directory / f"{section.name}.jsonl"

        def progress(part: Part) -> None:
            self.say(f"{section.name}/{part.name}: {verdict(part)} ({part.seconds:.1f} s)")

        if obstacle:
            append(records, "end", name="model", status="error", message=obstacle, seconds=0.0)
            return read(records)
        return SectionRun(
            command=self._command(section, records),
            records=records,
            log=records.with_suffix(".log"),
            limit_s=section.limit_s,
            stop=self._stop,
        )(progress)

    def say(self, text: str) -> None:
        print(f"[{self.seconds:6.1f} s] {text}", flush=True)


class ModelFiles:
    """The model of the sections that need one, written by another process in the meantime."""

    def __init__(self, path: Path) -> None:
        self._log = path.with_name(f"{path.name}.log")
        command = [sys.executable, "-m", "tools.make_model", "--shape", MODEL, "--out", str(path)]
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(command, stdout=log, stderr=log)

    def wait(self) -> str:
        """-> why it is not there, nothing if it is."""
        try:
            status = self._process.wait(MODEL_LIMIT_S)
        except subprocess.TimeoutExpired:
            return f"tools.make_model took over {MODEL_LIMIT_S:.0f} s"
        return self._log.read_text(encoding="utf-8") if status else ""

    def close(self) -> None:
        self._process.kill()
        self._process.wait()


def main(args: Sequence[str]) -> int:
    options = parse_args(args)
    from bench.gpu_check.gpu_info import gpu_info, has_gpu, versions  # imports torch

    if not has_gpu():
        print(
            "gpu-check: torch finds no CUDA device, so there is nothing to check", file=sys.stderr
        )
        return 2
    # For the processes that it starts, where the project is not installed.
    paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    os.environ["PYTHONPATH"] = os.pathsep.join(paths)
    with tempfile.TemporaryDirectory(prefix="gpu-check-") as name:
        directory = Path(name)
        path = options.model or directory / MODEL

        def command(section: Section, records: Path) -> Sequence[str]:
            command = [sys.executable, "-m", "bench.gpu_check.section", section.name]
            command += ["--records", str(records), "--directory", str(directory)]
            command += ["--model", str(path), "--seed", str(options.seed)]
            return [*command, "--peer", str(options.peer)] if options.peer else command

        check = GpuCheck(options.sections, command, directory)
        gpu, machine = gpu_info(), this_machine()
        check.say(f"{gpu['name']}, seed {options.seed}")
        needed = options.model is None and any(each.needs_model for each in options.sections)
        with closing(ModelFiles(path)) if needed else nullcontext() as model:
            found = check.run(model)
    about = {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "seconds": check.seconds,
        "seed": options.seed,
        "gpu": gpu,
        "machine": machine.machine,
        "versions": machine.versions | versions(),
        "commit": machine.commit,
    }
    write_json(options.out, about, found)
    print()
    print("\n".join(table(found)))
    word = "passed" if passed(found) else "FAILED"
    print(f"\n{word} in {check.seconds:.0f} s; written: {options.out}")
    return 0 if passed(found) else 1


def _split(names: str) -> list[str]:
    return [name for name in names.split(",") if name]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
