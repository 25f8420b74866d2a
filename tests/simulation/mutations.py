"""Plants hand-written bugs, one at a time, in a copy of the code, and shows what finds each.

    python -m tests.simulation.mutations [--seeds 200] [--only NAME ...]

Prints a row per bug: the first of the simulated seeds from 0 on that fails; if none does, whether
Hypothesis's state machine or the unit tests fail. Exits with 1 if nothing finds a bug, if the
bug's text is no longer in the code, or if something fails without a bug.
"""

from __future__ import annotations

import argparse
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.simulation.planted_bugs import BUGS, Bug

ROOT = Path(__file__).parents[2]
_MACHINES = 40  # seeds of the state machines
# Of all that a bug of a world might break.
_UNIT_TESTS = {
    "engine": [
        *("test_scheduler", "test_block_manager", "test_policy", "test_waiting_queue"),
        *("test_fair_queueing", "test_budgets", "test_paused", "test_suspects"),
        *("forks/test_followers", "forks/test_beams", "rpc/test_step_features"),
        *("test_drafted_steps", "test_runs", "test_windows"),
    ],
    "cluster": [
        *("test_engines", "test_placement", "test_prefix_index", "test_recovery"),
        *("test_scheduler_client", "test_trials"),
    ],
    "successions": ["test_connect_alone"],
}
_FOLDERS = {
    "engine": "tests/scheduler_svc",
    "cluster": "tests/frontend",
    "successions": "tests/scheduler_svc",
}
_MAX_SECONDS = 600


def find(bug: Bug, seeds: int, processes: int | None = None) -> str:
    """Says what finds a planted bug; empty if nothing does.

    Raises:
        LookupError: the bug's text does not occur exactly once.
    """
    with _copy_of_the_code() as root:
        bug.plant(root)
        return _problem(root, bug.world, seeds, processes)


@contextmanager
def _copy_of_the_code() -> Iterator[Path]:
    with tempfile.TemporaryDirectory() as directory:
        root = Path(directory)
        for name in ("nano_vllm_grpc", "scheduler_svc", "frontend", "shared", "deploy", "tests"):
            shutil.copytree(ROOT / name, root / name)
        shutil.copy(ROOT / "pyproject.toml", root)
        yield root


def _problem(root: Path, world: str, seeds: int, processes: int | None) -> str:
    """The first check that fails; the cheapest run first."""
    if found := _failing_seed(root, world, seeds, processes):
        return found
    if world == "engine" and (found := _failing_seed(root, "state-machines", _MACHINES, processes)):
        return f"state machine, {found}"
    modules = [f"{_FOLDERS[world]}/{name}.py" for name in _UNIT_TESTS[world]]
    return "unit tests" if _run(root, "pytest", "-qx", *modules).returncode else ""


def _failing_seed(root: Path, world: str, seeds: int, processes: int | None) -> str:
    how = ["-x", f"--of={world}", f"--seeds={seeds}", "--seed=0"]
    how += [f"--processes={processes}"] if processes else []
    result = _run(root, "tests.simulation", *how)
    if found := re.search(r"seed (\d+) fails$", result.stdout, re.MULTILINE):
        return f"seed {found[1]}"
    return "it does not start, or does not end" if result.returncode else ""


def _run(root: Path, module: str, *args: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", module, *args]
    try:
        return subprocess.run(
            command, cwd=root, capture_output=True, text=True, timeout=_MAX_SECONDS
        )
    except subprocess.TimeoutExpired:
        return subprocess.CompletedProcess(command, 1, "", "")


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.simulation.mutations")
    parser.add_argument("--seeds", type=int, default=200)
    parser.add_argument("--only", nargs="+", choices=BUGS, metavar="NAME", help="only these bugs")
    args = parser.parse_args()
    bugs = [BUGS[name] for name in args.only or BUGS]
    with _copy_of_the_code() as root:
        for world in sorted({bug.world for bug in bugs}):
            if problem := _problem(root, world, args.seeds, None):
                print(f"without a planted bug, this fails: {world}, {problem}")
                return 1
    print("| planted bug | found by |\n|---|---|", flush=True)
    missed = 0
    for bug in bugs:
        found = find(bug, args.seeds)
        missed += not found
        print(f"| {bug.name} | {found or 'nothing'} |", flush=True)
    print(f"{len(bugs)} planted, {missed} not found")
    return 1 if missed else 0


if __name__ == "__main__":
    raise SystemExit(main())
