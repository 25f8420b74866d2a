"""Gives workers a step that they cannot run: one whose tokens contain `TRIGGER`. Every Python
process that has this directory in PYTHONPATH runs this as it starts; only workers are affected.

The variable WORKER_FAULT says what such a step does: `exit` ends the process at once, every time;
`hang:PATH` creates the file PATH and hangs forever, unless PATH already exists.
"""

from __future__ import annotations

import importlib.abc
import importlib.util
import os
import sys
import time
from typing import Any

TRIGGER = (1500, 1501, 1500)


def _fail() -> None:
    kind, _, path = os.environ["WORKER_FAULT"].partition(":")
    if kind == "exit":
        os._exit(1)
    try:
        os.close(os.open(path, os.O_CREAT | os.O_EXCL))
    except FileExistsError:
        return
    while True:
        time.sleep(60)


def _patch(runner: Any) -> None:
    launch = runner.launch

    def faulty(self: Any, step: Any) -> Any:
        ids = step.input_ids.tolist()
        if any(tuple(ids[i : i + len(TRIGGER)]) == TRIGGER for i in range(len(ids))):
            _fail()
        return launch(self, step)

    runner.launch = faulty


class _Finder(importlib.abc.MetaPathFinder):
    """Patches the module once it is loaded: importing it here would load torch everywhere."""

    def find_spec(self, name: str, *_: object) -> Any:
        if name != "worker_svc.model_runner":
            return None
        sys.meta_path.remove(self)
        spec: Any = importlib.util.find_spec(name)
        load = spec.loader.exec_module

        def exec_module(module: Any) -> None:
            load(module)
            _patch(module.ModelRunner)

        spec.loader.exec_module = exec_module
        return spec


if "WORKER_FAULT" in os.environ:
    sys.meta_path.insert(0, _Finder())
