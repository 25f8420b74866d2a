"""A phase: its modules' processes, their common deadline, and the files for the results."""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from bench.gpu.modules import Module
from bench.gpu.records import COMPILING, Journal, Records, as_json
from bench.gpu.runner import ModuleRun, Plan
from bench.gpu.summary import compiled_json, details, module_json, verdict

LIMIT_S = 470.0
COMPILE_LIMIT_S = 120.0
POLL_S = 0.05

# How to run a module, or only to compile it.
MakePlan = Callable[[Module, int, bool], Plan]


class Stopped(Exception):
    """The user wants everything to stop."""


class Phase:
    """
    Args:
        directory: gets NAME.json, NAME.jsonl and NAME.log. A file that cannot be written is
            reported, and nothing else is lost.
        about: facts of the whole run, for the JSON.
        make_plan: takes a module, the journal's descriptor, and whether only to compile.
        stop: is set when the user wants everything to stop.
    """

    def __init__(
        self,
        name: str,
        directory: Path,
        about: Mapping[str, Any],
        make_plan: MakePlan,
        stop: threading.Event,
        limit_s: float = LIMIT_S,
    ) -> None:
        self.name = name
        self.path = directory / f"{name}.json"
        self._about = about
        self._make_plan = make_plan
        self._stop = stop
        self._started = time.monotonic()
        self._deadline = self._started + limit_s
        self._log = _open(directory / f"{name}.log")
        self._journal_file = _open(directory / f"{name}.jsonl")
        self._journal = Journal(self._journal_file)
        self._names: list[str] = []  # as in the journal, in the order of the table
        self._told: set[tuple[str, str]] | None = None  # tests by module, if each is told
        self._unwritten = ""  # why

    @property
    def seconds(self) -> float:
        return time.monotonic() - self._started

    @property
    def results(self) -> dict[str, Records]:
        """The records by module, without the runs that only compiled."""
        return {name: self._journal.of(name) for name in self._names}

    @property
    def passed(self) -> bool:
        """Whether nothing failed; missing a target is not a failure."""
        return not any(records.failed for records in self.results.values())

    def fail(self, name: str, reason: str) -> None:
        """Records the failure of something that is no module."""
        self._names.append(name)
        self._journal.end(name, name, "failed", reason, 0.0)
        self.say(f"{name}: failed: {reason}")

    def tell_each(self) -> None:
        """From now on, prints and writes each test's result as soon as it ends."""
        self._told = set()

    def prove(self, modules: Sequence[Module], side_by_side: int) -> None:
        """
        Raises:
            Stopped: as it was told to; all processes have ended.
        """
        self._names += [module.name for module in modules]
        longest_first = sorted(modules, key=lambda module: -module.limit_s)
        plans = [self._make_plan(module, self._journal_file, False) for module in longest_first]
        self._run(plans, side_by_side, self._deadline)

    def measure(
        self, modules: Sequence[Module], side_by_side: int, model: Callable[[], str | None]
    ) -> None:
        """Runs all modules at once, just to compile their kernels, then one by one.

        Args:
            model: returns None until the model is there or never will be; then why it is missing,
                empty if it is there.

        Raises:
            Stopped: as it was told to; all processes have ended.
        """
        self._names += [module.name for module in modules]
        deadline = min(self._deadline, time.monotonic() + COMPILE_LIMIT_S)
        compiled = [module for module in modules if module.compiles]
        plans = [self._make_plan(module, self._journal_file, True) for module in compiled]
        waiting = {p.name for p, m in zip(plans, compiled, strict=True) if m.needs_model}
        self._run(
            plans, side_by_side, deadline, lambda p: p.name not in waiting or model() is not None
        )
        for module in modules:
            while module.needs_model and model() is None and time.monotonic() < deadline:
                self._wait()
            obstacle = model() if model() is not None else "the model was not written in time"
            if module.needs_model and obstacle:
                self._journal.end(module.name, "model", "failed", obstacle, 0.0)
                self._tell(module.name, 0.0)
            else:
                self._run([self._make_plan(module, self._journal_file, False)], 1, self._deadline)

    def end_stopped(self) -> None:
        """Records everything that has no record yet as stopped."""
        for name, records in self.results.items():
            if records.planned is None and not records.tests:
                self._journal.end(name, "start", "stopped", "it had not begun", 0.0)
        self.write()

    def write(self) -> None:
        """Writes the whole JSON."""
        modules = {name: module_json(records) for name, records in self.results.items()}
        compiled = {
            name.removeprefix(COMPILING): compiled_json(records)
            for name, records in self._journal.read().items()
            if name.startswith(COMPILING)
        }
        result = {"passed": self.passed, "seconds": self.seconds}
        content = {**self._about, **result, "modules": modules, "compiled": compiled}
        text = json.dumps(as_json(content), indent=1) + "\n"
        beside = self.path.with_suffix(".tmp")
        try:
            beside.write_text(text, encoding="utf-8")
            beside.replace(self.path)
        except OSError as error:
            beside.unlink(missing_ok=True)
            if not self._unwritten:
                print(f"gpu-check: {self.path} cannot be written: {error}", file=sys.stderr)
            self._unwritten = str(error)

    def say(self, text: str) -> None:
        print(f"[{self.seconds:6.1f} s] {text}", flush=True)

    def _run(
        self,
        plans: Sequence[Plan],
        side_by_side: int,
        deadline: float,
        ready: Callable[[Plan], bool] = lambda plan: True,
    ) -> None:
        """Runs plans in order, `side_by_side` at a time; those that are not ready wait."""
        waiting, running = list(plans), list[ModuleRun]()
        try:
            while waiting or running:
                for plan in filter(ready, list(waiting)):
                    if len(running) < side_by_side and time.monotonic() < deadline:
                        waiting.remove(plan)
                        running.append(ModuleRun(plan, self._journal, self._log, deadline))
                for run in list(running):
                    ended = run.poll()
                    self._tell_tests(run.plan.name)
                    if ended:
                        running.remove(run)
                        self._tell(run.plan.name, time.monotonic() - run.started)
                if time.monotonic() > deadline:
                    for plan in waiting:
                        self._journal.end(plan.name, "start", "out of time", "it had not begun", 0)
                        self._tell(plan.name, 0.0)
                    waiting.clear()
                self._wait()
        except BaseException:
            for run in running:
                run.stop("stopped", "the run was stopped")
            raise

    def _wait(self) -> None:
        if self._stop.wait(POLL_S):
            raise Stopped

    def _tell_tests(self, module: str) -> None:
        if self._told is None:
            return
        for name, test in list(self._journal.of(module).tests.items()):
            if test.outcome != "running" and (module, name) not in self._told:
                self._told.add((module, name))
                self.say("\n           ".join(details(test)))
                self.write()

    def _tell(self, name: str, seconds: float) -> None:
        self.say(f"{name}: {verdict(self._journal.of(name))} ({seconds:.1f} s)")
        self.write()


def _open(path: Path) -> int:
    """Opens an empty file for appending, in memory if it cannot be written."""
    try:
        return os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_TRUNC, 0o644)
    except OSError as error:
        print(f"gpu-check: {path} cannot be written: {error}", file=sys.stderr)
        return os.memfd_create(path.name)
