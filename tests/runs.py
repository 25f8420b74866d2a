"""Long campaigns: `python -m tests.runs soak` and `python -m tests.runs stability`.

Each is a list of commands. They run one after another, and each one's result goes to a JSON file as
soon as it ends: the same command line continues where it was stopped. The exit status is 0 only if
every command's was. The machine should have nothing else to do, since core-seconds are counted over
all of its processes.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import secrets
import shlex
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

import psutil
from rich.console import Console
from rich.table import Table

from bench.machine import this_machine
from tests.stack import ROOT

_PYTHON = (sys.executable, "-m")
_SEED = "SEED"  # a word of a command that becomes a random number


@dataclass(frozen=True)
class Run:
    """A command of a campaign; `beside_burner`: while another process keeps a core busy."""

    name: str
    command: tuple[str, ...]
    beside_burner: bool = False


@dataclass(frozen=True)
class Outcome:
    name: str
    beside_burner: bool
    command: str  # with the seed that it had
    exit_status: int
    seconds: float
    core_seconds: float  # of all processes but the burner
    last_line: str  # of the output
    commit: str | None
    ended: str


def _soak() -> list[Run]:
    worlds = ("engine", "cluster", "successions", "prefix-index", "state-machines")
    services = ("frontend", "engine", "scheduler", "worker", "processes", "http")
    chaos = ("tests.chaos", "--faults", "200", "--seed", _SEED)
    modules = {
        **{
            f"simulation: {world}": ("tests.simulation", "--of", world, "--seed", _SEED)
            for world in worlds
        },
        "planted bugs": ("tests.simulation.mutations",),
        **{
            f"hostile messages: {service}": ("tests.fuzz", "--seed", _SEED, service)
            for service in services
        },
        "attacks": ("tests.abuse", "--check", "2"),
        "attacks on a stack without tokens": ("tests.abuse", "--check", "2", "--anonymous"),
        "chaos": chaos,
        "chaos, two engines": (*chaos, "--engines", "2", "--tp", "1"),
        "random cases": (
            *("pytest", "-q", "--seed=random", "--count=100"),
            *("tests/shared", "tests/scheduler_svc"),
        ),
        "tests marked soak": ("pytest", "-q", "-m", "soak"),
    }
    return [Run(name, (*_PYTHON, *words)) for name, words in modules.items()]


# Cases that once failed because of timing, luck or memory, or were built so that they could; all
# of a module where none is named.
_FLAKY = {
    "bench/gpu/test_run.py": ("test_the_time_limit_leaves_a_list_of_what_was_not_run",),
    "bench/test_modes.py": ("test_load", "test_routing"),
    "cli/test_generate.py": ("test_interrupted_batches_continue",),
    "client/test_resume.py": (),
    "deploy/dashboard/test_browser.py": ("test_an_answer_streams_outlives_its_worker_and_stops",),
    "deploy/test_supervisor.py": ("test_a_reused_pid",),
    "e2e/test_quantized.py": ("test_tokens_with_an_int8_cache",),
    "faults/test_clients.py": (),
    "faults/test_frontends.py": ("test_streams_of_other_frontends_are_untouched",),
    "faults/test_hung_worker.py": ("test_a_stopped_worker_is_replaced_and_the_other_rank_stays",),
    "faults/test_killed_scheduler.py": (
        "test_killed_mid_decode",
        "test_grammars_killed_mid_decode",
    ),
    "faults/test_killed_worker.py": ("test_killed_mid_decode",),
    "faults/test_lost_engine.py": (),
    "faults/test_partition.py": (
        "test_a_short_cut_and_a_long_one and scheduler-frontend",
        "test_a_scheduler_that_vanishes_with_its_host",
    ),
    "frontend/test_engines.py": ("test_limits_are_those_of_every_engine_and_capacity_is_of_all",),
    "frontend/test_two_tenants.py": ("test_a_flood_does_not_keep_another_waiting_or_out",),
    "scheduler_svc/grammar/test_grammars.py": (
        "test_a_process_that_dies_at_work_is_replaced",
        "test_one_whose_process_always_dies_is_convicted_alone",
        "test_its_processes_end_with_the_scheduler",
    ),
    "scheduler_svc/test_service.py": (
        "test_a_rank_that_falls_silent_in_its_first_step_is_given_up",
        "test_a_frontend_that_does_not_confirm_is_cut_off",
    ),
    "shared/test_connections.py": (),
    "shared/test_health.py": (),
    "shared/test_process.py": ("test_a_fork_that_hangs_is_replaced",),
}


def _stability() -> list[Run]:
    targets = [("test", number) for number in range(1, 6)]
    targets += [("test-system", number) for number in range(1, 5)]
    runs = [
        Run(f"make {target}, {number}", ("make", target), beside_burner=number % 2 == 0)
        for target, number in targets
    ]
    for module, cases in _FLAKY.items():
        chosen = ("-k", " or ".join(cases)) if cases else ()
        repeat = ("pytest", "-q", "--count=25", "--repeat-scope=session")
        repeated = (*_PYTHON, *repeat, f"tests/{module}", *chosen)
        runs += [Run(module, repeated), Run(module, repeated, beside_burner=True)]
    return runs


_CAMPAIGNS = {"soak": _soak, "stability": _stability}


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.runs")
    parser.add_argument("campaign", choices=_CAMPAIGNS)
    parser.add_argument("--out", type=Path, help="default: .run/CAMPAIGN.json")
    parser.add_argument("--only", default="", help="runs whose name contains this")
    args = parser.parse_args()
    out: Path = args.out or ROOT / ".run" / f"{args.campaign}.json"
    out.parent.mkdir(parents=True, exist_ok=True)
    done = _read(out)
    for run in _CAMPAIGNS[args.campaign]():
        known = any(
            (run.name, run.beside_burner) == (each.name, each.beside_burner) for each in done
        )
        if not known and args.only in run.name:
            print(f"{run.name}{' beside a burner' * run.beside_burner}", flush=True)
            done.append(_outcome(run, out.with_suffix(".log")))
            _write(out, done)
    Console(width=120).print(_table(done))
    return int(any(each.exit_status for each in done))


def _outcome(run: Run, log: Path) -> Outcome:
    """Runs a command; its output is added to `log`."""
    command = [str(secrets.randbits(32)) if word == _SEED else word for word in run.command]
    with log.open("ab") as output, _burner() if run.beside_burner else nullcontext(0) as burner:
        output.write(f"$ {shlex.join(command)}\n".encode())
        output.flush()
        started, busy = time.monotonic(), _busy_s(burner)
        status = subprocess.call(command, cwd=ROOT, stdout=output, stderr=subprocess.STDOUT)
        seconds, core_seconds = time.monotonic() - started, _busy_s(burner) - busy
    *_, last_line = log.read_text(errors="replace").splitlines()
    return Outcome(
        name=run.name,
        beside_burner=run.beside_burner,
        command=shlex.join(command),
        exit_status=status,
        seconds=round(seconds, 1),
        core_seconds=round(core_seconds, 1),
        last_line=last_line.strip(),
        commit=this_machine().commit,
        ended=datetime.now(UTC).isoformat(timespec="seconds"),
    )


@contextmanager
def _burner() -> Iterator[int]:
    """A process that keeps a core busy for as long as this one lives: its pid."""
    burn = f"import os\nwhile os.getppid() == {os.getpid()}: pass"
    with subprocess.Popen([sys.executable, "-c", burn]) as burner:
        try:
            yield burner.pid
        finally:
            burner.kill()


def _busy_s(burner: int) -> float:
    """Seconds for which this machine's cores were busy, without the burner's (0: none)."""
    times = psutil.cpu_times()
    of_burner = psutil.Process(burner).cpu_times() if burner else None
    return float(
        sum(times)
        - times.idle
        - times.iowait
        - times.guest
        - times.guest_nice
        - (of_burner.user + of_burner.system if of_burner else 0.0)
    )


def _read(path: Path) -> list[Outcome]:
    runs = json.loads(path.read_text())["runs"] if path.exists() else []
    return [Outcome(**each) for each in runs]


def _write(path: Path, done: list[Outcome]) -> None:
    machine = this_machine()
    report = {
        "machine": machine.machine,
        "versions": machine.versions,
        "runs": [dataclasses.asdict(each) for each in done],
    }
    path.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")


def _table(done: list[Outcome]) -> Table:
    table = Table("run", "burner", "minutes", "core-seconds", "status", "last line")
    for each in done:
        table.add_row(
            each.name,
            "yes" if each.beside_burner else "no",
            f"{each.seconds / 60:.1f}",
            f"{each.core_seconds:.0f}",
            str(each.exit_status),
            each.last_line,
        )
    return table


if __name__ == "__main__":
    raise SystemExit(main())
