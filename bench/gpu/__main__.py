"""`make gpu-check`: proves the worker's GPU path against references, then measures it.
`smoke` does a little of both in two minutes.

The exit status is 0 if everything passed, 1 if something failed, 2 if nothing was run for want of a
GPU or a package. See docs/gpu-check.md.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

from bench.gpu import preflight
from bench.gpu.modules import MODEL_SHAPE, MODULES, ROOT, SMOKE, Module
from bench.gpu.phase import COMPILE_LIMIT_S, Phase, Stopped
from bench.gpu.records import COMPILING
from bench.gpu.requirements import requirements
from bench.gpu.runner import TEST_LIMIT_S, Plan
from bench.gpu.summary import summary

PHASES = ("prove", "measure")  # the default
SMOKE_PHASE = "smoke"
DEFAULT_PEER = Path(".peers/nano-vllm")
TEST_DEVICE = "TEST_DEVICE"  # for tests that otherwise run on a CPU
# Either makes the references' float32 products less exact.
ROUGH_PRODUCTS = ("TORCH_ALLOW_TF32_CUBLAS_OVERRIDE", "NVIDIA_TF32_OVERRIDE")
REHEARSED_MODEL = ["--shape", "tiny", "--set", "num_hidden_layers=1"]
SIDE_BY_SIDE = 6  # proving modules at a time, which fit into a GPU's memory
FAILED, NOTHING_RUN = 1, 2


def parse_args(args: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m bench.gpu", description=(__doc__ or "").partition("\n")[0]
    )
    parser.add_argument(
        "phases", nargs="*", metavar="PHASE", help="smoke, prove, measure (default: the last two)"
    )
    parser.add_argument(
        "--out",
        type=_directory,
        help="directory for the results, or a .json file in it (default but for smoke: gpu-check)",
    )
    parser.add_argument("--only", metavar="NAME,...", help="only these modules")
    parser.add_argument("--seed", type=int, help="for the random inputs (default: random)")
    parser.add_argument(
        "--peer", type=Path, help=f"a checkout of nano-vLLM (default: {DEFAULT_PEER}, if there)"
    )
    parser.add_argument("--model", type=Path, help=f"default: {MODEL_SHAPE} with random weights")
    parser.add_argument(
        "--rehearse", action="store_true", help="on the CPU with small sizes; figures mean nothing"
    )
    options = parser.parse_args(args)
    if unknown := set(options.phases) - {SMOKE_PHASE, *PHASES}:
        there = ", ".join((SMOKE_PHASE, *PHASES))
        parser.error(f"no phase {', '.join(sorted(unknown))}; there are {there}")
    if options.out is None:
        if SMOKE_PHASE in options.phases:
            parser.error("smoke: --out is missing: give a directory for the results")
        options.out = Path("gpu-check")
    try:
        options.modules = choose(options.phases, options.only)
    except ValueError as error:
        parser.error(str(error))
    if options.out.suffix == ".json" and not options.out.is_dir():
        options.out = options.out.parent
    if options.peer is None and DEFAULT_PEER.is_dir():
        options.peer = DEFAULT_PEER
    if options.seed is None:
        options.seed = random.SystemRandom().randrange(2**31)
    return options


def _directory(text: str) -> Path:
    if not text:
        raise argparse.ArgumentTypeError("the directory for the results has no name")
    return Path(text)


def choose(phases: Sequence[str], only: str | None) -> dict[str, list[Module]]:
    """The modules to run, by phase, without phases that have none.

    Raises:
        ValueError: there is no such module.
    """
    chosen = {
        phase: list(SMOKE)
        if phase == SMOKE_PHASE
        else [module for module in MODULES if module.measures == (phase == "measure")]
        for phase in phases or PHASES
    }
    if only is None:
        return chosen
    names = [name for name in only.split(",") if name]
    known = [module.name for modules in chosen.values() for module in modules]
    if unknown := [name for name in names if name not in known]:
        raise ValueError(f"no module {', '.join(unknown)}; there are {', '.join(known)}")
    found = {p: [module for module in chosen[p] if module.name in names] for p in chosen}
    return {phase: modules for phase, modules in found.items() if modules}


def make_plan(
    module: Module,
    journal_file: int,
    compile_only: bool,
    options: argparse.Namespace,
    model: Path,
) -> Plan:
    """Plans a module's run by pytest, without the checkout's usual configuration."""
    name = COMPILING + module.name if compile_only else module.name
    given: dict[str, Any] = {"journal": journal_file, "module": name}
    if module.measures:
        given["setup"] = {
            "model": str(model),
            "peer": str(options.peer.resolve()) if options.peer else None,
            "trace": str(options.out.resolve() / "trace.json.gz"),
            "seed": options.seed,
            "rehearse": options.rehearse,
            "compile_only": compile_only,
            "smoke": module.smoke,
        }
    command = [sys.executable, "-m", "pytest", "-c", str(ROOT / "bench/gpu/pytest.ini")]
    command += [f"--rootdir={ROOT}", f"--confcutdir={ROOT}", "-p", "bench.gpu.plugin"]
    limit_s = COMPILE_LIMIT_S if compile_only else module.limit_s
    return Plan(
        name=name,
        command=[*command, "--gpu", json.dumps(given), str(ROOT / module.path)],
        limit_s=limit_s,
        environment=environment(module, rehearse=options.rehearse),
        journal_file=journal_file,
        test_limit_s=limit_s if module.measures else TEST_LIMIT_S,
    )


def environment(module: Module, *, rehearse: bool) -> dict[str, str]:
    """A module's environment variables: it sees the checkout, but no plugins that are installed."""
    paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    found = dict(os.environ) | {
        "PYTHONPATH": os.pathsep.join(paths),
        "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",
        "TEARDOWN_CUPTI": "0",  # else a process's second profile may be empty
    }
    for name in ("PYTEST_ADDOPTS", TEST_DEVICE, *ROUGH_PRODUCTS):
        found.pop(name, None)
    if rehearse:
        found["TRITON_INTERPRET"] = "1"
    elif not module.measures:
        found[TEST_DEVICE] = "cuda"
    return found


@contextmanager
def model_files(path: Path, arguments: Sequence[str]) -> Iterator[Callable[[], str | None]]:
    """Has another process write the model -> the `model` argument of `Phase.measure`.

    Args:
        arguments: for `tools.make_model`.
    """
    log = path.with_name("model.log")
    command = [sys.executable, "-m", "tools.make_model", *arguments]
    with log.open("wb") as output:
        process = subprocess.Popen(
            [*command, "--out", str(path)], cwd=ROOT, stdout=output, stderr=output
        )

    def obstacle() -> str | None:
        status = process.poll()
        if status:
            return log.read_text(errors="replace") or f"tools.make_model: exit status {status}"
        return None if status is None else ""

    try:
        yield obstacle
    finally:
        process.kill()
        process.wait()


def run(
    name: str,
    modules: Sequence[Module],
    about: dict[str, Any],
    options: argparse.Namespace,
    stop: threading.Event,
) -> int:
    """Runs a phase and prints its summary -> the exit status."""
    with tempfile.TemporaryDirectory(prefix="gpu-check-", ignore_cleanup_errors=True) as directory:
        written = options.model is None and any(module.needs_model for module in modules)
        path = options.model or Path(directory, MODEL_SHAPE)
        plan = partial(make_plan, options=options, model=path.resolve())
        phase = Phase(name, options.out, {"phase": name, **about}, plan, stop)
        phase.say(f"{name}: {about['gpu']['name']}, seed {options.seed}")
        phase.write()
        if name == SMOKE_PHASE:
            phase.tell_each()
            if about["problems"]:
                phase.fail("preflight", "\n".join(about["problems"]))
        try:
            if name == "prove":
                phase.prove(modules, min(SIDE_BY_SIDE, os.cpu_count() or 1))
            else:
                arguments = REHEARSED_MODEL if options.rehearse else ["--shape", MODEL_SHAPE]
                with model_files(path, arguments) if written else nullcontext(str) as model:
                    phase.measure(modules, os.cpu_count() or 1, model)
        except Stopped:
            phase.end_stopped()
    word = "stopped" if stop.is_set() else "passed" if phase.passed else "FAILED"
    if options.rehearse:
        word += ", a rehearsal: no figure means anything"
    end = f"{name} {word}, {phase.seconds:.0f} s, seed {options.seed}: {phase.path}"
    print()
    print("\n".join(summary(phase.results, end)), flush=True)
    return 0 if phase.passed else FAILED


def check(options: argparse.Namespace) -> dict[str, Any] | None:
    """Describes the machine for the JSON; if anything is missing, says what and returns None. The
    smoke begins nevertheless, since most of it may run."""
    needed = requirements()
    found = preflight.facts(needed, options.out)
    wrong = preflight.problems(found, needed, gpu=not options.rehearse)
    if wrong and options.phases != [SMOKE_PHASE]:
        print("gpu-check: nothing was run, since", file=sys.stderr)
        print("\n".join(f"  {line}" for line in wrong), file=sys.stderr)
        return None
    options.out.mkdir(parents=True, exist_ok=True)
    from bench.machine import this_machine  # needs psutil

    here = this_machine()
    return {
        "rehearsal": options.rehearse,
        "problems": wrong,
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "seed": options.seed,
        "gpu": preflight.machine(found),
        "machine": here.machine,
        "versions": here.versions,
        "commit": here.commit,
    }


def main(args: Sequence[str]) -> int:
    options = parse_args(args)
    started = time.monotonic()
    about = check(options)
    if about is None:
        return NOTHING_RUN
    seconds = time.monotonic() - started
    print(f"{preflight.in_words(about['gpu'])}; found in {seconds:.1f} s", flush=True)

    stop = threading.Event()
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda *_: stop.set())
    status = 0
    for name, modules in options.modules.items():
        if not stop.is_set():
            status = max(status, run(name, modules, about, options, stop))
    return FAILED if stop.is_set() else status


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
