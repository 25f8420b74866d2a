"""Faults of services. Every Python process that has this directory in PYTHONPATH runs this as it
starts; variables of the environment say what it does.

WORKER_FAULT: what workers do at a step whose tokens contain `TRIGGER`. `exit` ends the process at
once, every time; `hang:PATH` creates the file PATH and hangs forever, unless PATH already exists.

WORKER_HOLD: a file. While it exists, a worker runs as many steps that sample tokens as it says, and
waits with the next step. A new file counts from the beginning.

SCHEDULER_FAULT: a file, to which each death adds a byte. Schedulers die of requests whose prompt
begins with READ, STEP or TOKEN, and their engine fails at one that begins with FAILURE. Trials of
suspects may take long.

EXPORT_TIMEOUT_S: the seconds that a collector has to accept spans.

KEEPALIVE_S: the seconds of silence on a connection until a ping.

USUAL_GARBAGE: processes collect old objects as often as Python does by itself, whatever
`shared.process.run` asks for.
"""

from __future__ import annotations

import gc
import importlib.abc
import importlib.util
import os
import signal
import sys
import time
from typing import Any

TRIGGER = (1500, 1501, 1500)
# The scheduler dies while the request is read, when it is first scheduled, or with its fifth token;
# or it is not killed, but the engine fails when the request is scheduled.
READ, STEP, TOKEN, FAILURE = 901, 902, 903, 904
DEADLY_TOKEN = 5
_TRIAL_S = 60.0


def _fail_worker() -> None:
    kind, _, path = os.environ["WORKER_FAULT"].partition(":")
    if kind == "exit":
        os._exit(1)
    try:
        os.close(os.open(path, os.O_CREAT | os.O_EXCL))
    except FileExistsError:
        return
    while True:
        time.sleep(60)


def _note() -> None:
    with open(os.environ["SCHEDULER_FAULT"], "ab") as file:
        file.write(b".")


def _die() -> None:
    _note()
    os.kill(os.getpid(), signal.SIGKILL)


class _Hold:
    """How many steps that sample tokens a file allows."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._version: tuple[int, int] | None = None
        self._steps = 0

    def wait(self, *, samples: bool) -> None:
        """Returns once one more step may run."""
        while self._wait_is_on():
            time.sleep(0.002)
        self._steps -= samples

    def _wait_is_on(self) -> bool:
        try:
            with open(self._path) as file:
                status = os.fstat(file.fileno())
                version = status.st_ino, status.st_mtime_ns
                if version != self._version:
                    self._version, self._steps = version, int(file.read())
        except FileNotFoundError:
            return False
        return self._steps <= 0


def _patch_worker(module: Any) -> None:
    launch, hold = module.ModelRunner.launch, _Hold(os.environ.get("WORKER_HOLD", ""))
    may_fail = "WORKER_FAULT" in os.environ

    def faulty(self: Any, step: Any, *args: Any) -> Any:
        hold.wait(samples=step.samples.any())
        ids = step.input_ids.tolist() if may_fail else []
        if any(tuple(ids[i : i + len(TRIGGER)]) == TRIGGER for i in range(len(ids))):
            _fail_worker()
        return launch(self, step, *args)

    module.ModelRunner.launch = faulty


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
            if output.seq.tokens[0] == TOKEN and output.offset + 1 == DEADLY_TOKEN:
                _die()
        return outputs

    module.Scheduler.schedule, module.Scheduler.apply = faulty_schedule, faulty_apply


def _patch_trials(module: Any) -> None:
    module.DeathRecord.trial_s = _TRIAL_S


def _patch_tracing(module: Any) -> None:
    module._EXPORT_TIMEOUT_S = float(os.environ["EXPORT_TIMEOUT_S"])


def _patch_channels(module: Any) -> None:
    module.KEEPALIVE_S = float(os.environ["KEEPALIVE_S"])


_PATCHES: dict[str, Any] = {}  # by module
if "WORKER_FAULT" in os.environ or "WORKER_HOLD" in os.environ:
    _PATCHES["worker_svc.model_runner"] = _patch_worker
if "SCHEDULER_FAULT" in os.environ:
    _PATCHES["scheduler_svc.rpc.frontend_messages"] = _patch_reading
    _PATCHES["scheduler_svc.core.scheduler"] = _patch_scheduler
    _PATCHES["frontend.engines.deaths"] = _patch_trials
if "EXPORT_TIMEOUT_S" in os.environ:
    _PATCHES["shared.telemetry.tracing"] = _patch_tracing
if "KEEPALIVE_S" in os.environ:
    _PATCHES["nano_vllm_grpc.channels"] = _patch_channels
if "USUAL_GARBAGE" in os.environ:
    gc.set_threshold = lambda *_: None  # type: ignore[assignment]


class _Finder(importlib.abc.MetaPathFinder):
    """Patches a module once it is loaded: importing it here would load it everywhere."""

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


if _PATCHES:
    sys.meta_path.insert(0, _Finder())
