"""Plants hand-written bugs, one at a time, in a copy of the code: which tests find them?

    python -m tests.simulation.mutations [--seeds 200] [--only WORD]

Prints a row per bug: whether the scheduler's unit tests and state machines find it, and how many
simulated seeds do. Exits with 1 if nothing finds a bug, or its text is no longer in the code.
"""

from __future__ import annotations

import argparse
import re
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

from tests.simulation.cluster.planted_bugs import CLUSTER_BUGS
from tests.simulation.planted_bugs import BUGS, Bug

ROOT = Path(__file__).parents[2]
_TESTS = "tests/scheduler_svc"
_UNIT = [
    f"{_TESTS}/test_{name}.py"
    for name in (
        "scheduler",
        "block_manager",
        "policy",
        "waiting_queue",
        "fair_queueing",
        "budgets",
        "held",
        "suspects",
    )
]
_UNIT += [f"{_TESTS}/forks/test_followers.py", f"{_TESTS}/edge/test_step_features.py"]
_OF_CLUSTERS = [
    f"tests/frontend/test_{name}.py" for name in ("engines", "prefix_index", "scheduler_client")
]
_STATE_MACHINES = [f"{_TESTS}/test_state_machines.py"]
_MAX_SECONDS = 600


@dataclass(frozen=True)
class Finding:
    unit_tests: bool
    state_machines: bool
    seeds: int

    def __bool__(self) -> bool:
        return self.unit_tests or self.state_machines or self.seeds > 0


def plant(bug: Bug, root: Path) -> None:
    """Replaces a bug's text in a copy of the code.

    Raises:
        LookupError: the text does not occur exactly once.
    """
    path = root / bug.package / bug.file
    text = path.read_text()
    if text.count(bug.old) != 1:
        raise LookupError(f"{bug.name}: {text.count(bug.old)} times in {bug.file}:\n{bug.old}")
    path.write_text(text.replace(bug.old, bug.new))


def find(bug: Bug | None, world: str, seeds: int) -> Finding:
    with tempfile.TemporaryDirectory() as directory:
        root = Path(directory)
        for name in ("scheduler_svc", "frontend", "shared", "deploy", "tests"):
            shutil.copytree(ROOT / name, root / name)
        shutil.copy(ROOT / "pyproject.toml", root)
        if bug is not None:
            plant(bug, root)
        failing_seeds = _failing_seeds(root, world, seeds)
        if world == "cluster":
            return Finding(_fails(root, "pytest", "-qx", *_OF_CLUSTERS), False, failing_seeds)
        return Finding(
            _fails(root, "pytest", "-qx", *_UNIT),
            _fails(root, "pytest", "-qx", "-ptests.simulation.no_shrinking", *_STATE_MACHINES),
            failing_seeds,
        )


def _fails(root: Path, module: str, *args: str) -> bool:
    return _run(root, module, *args).returncode != 0


def _failing_seeds(root: Path, world: str, seeds: int) -> int:
    result = _run(root, "tests.simulation", f"--of={world}", f"--seeds={seeds}", "--seed=0")
    counted = re.search(r"(\d+) fail$", result.stdout, re.MULTILINE)
    return int(counted[1]) if counted else seeds  # it did not start or did not end


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
    parser.add_argument("--only", default="", help="only bugs with this in their name")
    args = parser.parse_args()
    bugs = [bug for bug in (*BUGS, *CLUSTER_BUGS) if args.only in bug.name]
    if any(find(None, world, args.seeds) for world in {bug.world for bug in bugs}):
        print("something fails without a planted bug: fix that first")
        return 1
    print("| planted bug | unit tests | state machines | seeds |\n|---|---|---|---|", flush=True)
    all_found = True
    for bug in bugs:
        found = find(bug, bug.world, args.seeds)
        all_found = all_found and bool(found)
        unit, machines = ("found" if f else "-" for f in (found.unit_tests, found.state_machines))
        seeds = f"{found.seeds} of {args.seeds}"
        print(f"| {bug.name} | {unit} | {machines} | {seeds} |", flush=True)
    return 0 if all_found else 1


if __name__ == "__main__":
    raise SystemExit(main())
