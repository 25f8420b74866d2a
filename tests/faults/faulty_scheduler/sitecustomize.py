"""Gives schedulers requests that they die of: those whose prompt begins with one of these tokens.
Every Python process that has this directory in PYTHONPATH runs this as it starts; only schedulers
are affected.

The variable SCHEDULER_FAULT names a file, to which each death adds a byte.
"""

from __future__ import annotations

import importlib.abc
import importlib.util
import os
import signal
import sys
from typing import Any

# The scheduler dies while the request is read, when it is first scheduled, or with its fifth token;
# or it is not killed, but the engine fails when the request is scheduled.
READ, STEP, TOKEN, FAILURE = 901, 902, 903, 904
_DEADLY_TOKEN = 5


def _note() -> None:
    with open(os.environ["SCHEDULER_FAULT"], "ab") as file:
        file.write(b".")


def _die() -> None:
    _note()
    os.kill(os.getpid(), signal.SIGKILL)


def _patch_reading(module: Any) -> None:
    read_sequence = module.read_sequence

    def faulty(*args: Any) -> Any:
        seq = read_sequence(*args)
        if seq.tokens[0] == READ:
            _die()
        return seq

    module.read_sequence = faulty


def _patch_scheduler(module: Any) -> None:
    schedule, apply = module.Scheduler.schedule, module.Scheduler.apply

    def faulty_schedule(self: Any, now: float = 0.0) -> Any:
        step = schedule(self, now)
        for row in step.rows if step else ():
            if row.seq.tokens[0] == STEP:
                _die()
            if row.seq.tokens[0] == FAILURE:
                _note()
                raise RuntimeError("planted failure")
        return step

    def faulty_apply(self: Any, step: Any, answer: Any) -> Any:
        outputs = apply(self, step, answer)
        for output in outputs:
            if output.seq.tokens[0] == TOKEN and output.offset + 1 == _DEADLY_TOKEN:
                _die()
        return outputs

    module.Scheduler.schedule, module.Scheduler.apply = faulty_schedule, faulty_apply


_PATCHES = {
    "scheduler_svc.rpc.frontend_messages": _patch_reading,
    "scheduler_svc.core.scheduler": _patch_scheduler,
}


class _Finder(importlib.abc.MetaPathFinder):
    """Patches a module once it is loaded."""

    def find_spec(self, name: str, *_: object) -> Any:
        if name not in _PATCHES:
            return None
        patch = _PATCHES.pop(name)
        spec: Any = importlib.util.find_spec(name)
        load = spec.loader.exec_module

        def exec_module(module: Any) -> None:
            load(module)
            patch(module)

        spec.loader.exec_module = exec_module
        return spec


if "SCHEDULER_FAULT" in os.environ:
    sys.meta_path.insert(0, _Finder())
