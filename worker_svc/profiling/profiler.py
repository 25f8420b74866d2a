"""Records steps with torch's profiler and writes them as traces that Perfetto and Chrome show."""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from pathlib import Path

import structlog

# torch.profiler would import torch's compiler, over 100 MB, at its first start.
from torch.autograd.profiler import profile, record_function

from shared.errors import FailedPreconditionError, InvalidArgumentError
from worker_svc.profiling.trace_file import TraceFile
from worker_svc.step.decode import Step

log = structlog.get_logger(__name__)

MAX_STEPS = 1000
# Recorded events stay in memory, 2 KB each, until torch processes them. That takes 3 to 8 us per
# event and holds Python's lock. A step of 28 layers on a CPU has 3,500 events, so processing the
# events of all steps at once would look like a hang.
PIECE_STEPS = 10


@dataclass(frozen=True)
class ProfileOptions:
    """The contents of a profile. `activities` are among CPU, GPU and MEM. If there are none, the
    CPU is recorded, and so is the GPU if the device is one."""

    num_steps: int = MAX_STEPS
    activities: frozenset[str] = frozenset()
    with_stack: bool = False
    record_shapes: bool = False


@dataclass
class _Profile:
    """A profile in progress. `recorder` has the steps since the last piece."""

    new_recorder: Callable[[], profile]
    recorder: profile
    file: TraceFile
    steps_left: int


class Profiler:
    """Records at most one profile at a time.

    Call it between steps from the thread that runs them, because torch records the thread that
    starts the recorder.

    Args:
        directory: the directory for traces. If it is empty, profiling is off.
    """

    def __init__(self, directory: str, rank: int) -> None:
        self._directory = Path(directory).absolute() if directory else None
        self._rank = rank
        self._profile: _Profile | None = None
        self._writes = ThreadPoolExecutor(1, thread_name_prefix="profile")
        self._piece: Future[None] | None = None  # being written
        self._written: Future[Path] | None = None  # a trace that `stop` has not returned yet

    def start(self, options: ProfileOptions, device: str) -> Path:
        """Begins to record as many steps as the options say -> the path of the future trace.

        Raises:
            FailedPreconditionError: there is no directory, or a profile is already in progress.
            InvalidArgumentError: the options cannot be fulfilled on `device`.
        """
        if self._directory is None:
            raise FailedPreconditionError("profiling is off: profile_directory is unset")
        if self._profile is not None:
            raise FailedPreconditionError("a profile is in progress: StopProfile ends it")
        _check(options, device)
        name = f"rank-{self._rank}-{datetime.now(UTC):%Y%m%dT%H%M%S.%f}.json.gz"
        try:
            self._directory.mkdir(0o700, parents=True, exist_ok=True)
            file = TraceFile(self._directory / name)
        except OSError as error:
            raise FailedPreconditionError(f"profile_directory: {error}") from error
        new_recorder = partial(_recorder, options, device)
        self._profile = _Profile(new_recorder, new_recorder(), file, options.num_steps)
        self._written = None
        log.info("profile started", trace=str(file.path), steps=options.num_steps)
        return file.path

    def named(self, step: Step) -> AbstractContextManager[object]:
        """Labels the body of the `with` with the step's name in the profile."""
        if self._profile is None:
            return nullcontext()
        sizes = f"{step.num_seqs} sequences, {len(step.input_ids)} tokens"
        return record_function(f"step {step.step_id}: {sizes}")

    def count_step(self) -> bool:
        """Counts a step that has been launched -> whether `write_piece` is due."""
        if self._profile is None:
            return False
        self._profile.steps_left -= 1
        return self._profile.steps_left % PIECE_STEPS == 0

    def write_piece(self) -> None:
        """Writes the steps recorded so far on another thread. Recording continues unless these were
        the last steps."""
        current = self._profile
        assert current is not None
        current.recorder.__exit__(None, None, None)
        if self._piece is not None:
            wait([self._piece])  # otherwise memory would fill if the disk is slow
        self._piece = self._writes.submit(current.file.add, current.recorder.export_chrome_trace)
        if current.steps_left:
            current.recorder = current.new_recorder()
        else:
            self._profile = None
            self._written = self._writes.submit(_finish, current.file)

    def stop(self) -> Future[Path]:
        """Ends the profile, unless it has ended by itself -> a future of the trace's path, done
        once the trace is written.

        The future may raise:
            FailedPreconditionError: the trace cannot be written.

        Raises:
            FailedPreconditionError: no profile was started since the last call.
        """
        if self._profile is not None:
            self._profile.steps_left = 0
            self.write_piece()
        written, self._written = self._written, None
        if written is None:
            raise FailedPreconditionError("no profile is in progress")
        return written

    def close(self) -> None:
        """Returns when all recorded pieces are written."""
        self._writes.shutdown()


def _check(options: ProfileOptions, device: str) -> None:
    if not 1 <= options.num_steps <= MAX_STEPS:
        raise InvalidArgumentError("num_steps", f"{options.num_steps} is not in 1..{MAX_STEPS}")
    if unknown := options.activities - {"CPU", "GPU", "MEM"}:
        names = ", ".join(sorted(unknown))
        raise InvalidArgumentError("activities", f"{names}; known: CPU, GPU, MEM")
    if "GPU" in options.activities and device == "cpu":
        raise InvalidArgumentError("activities", "GPU, but the workers run on a CPU")


def _recorder(options: ProfileOptions, device: str) -> profile:
    """Starts a recorder and returns it."""
    activities = options.activities or {"CPU"} | ({"GPU"} if device != "cpu" else set())
    on_gpu = "GPU" in activities
    if on_gpu:
        # torch.profiler does this too, because CUDA graphs crash after CUPTI was torn down.
        os.environ.update(DISABLE_CUPTI_LAZY_REINIT="1", TEARDOWN_CUPTI="0")
    recorder = profile(
        use_kineto=True,
        use_cpu="CPU" in activities or not on_gpu,
        use_device="cuda" if on_gpu else None,
        profile_memory="MEM" in activities,
        with_stack=options.with_stack,
        record_shapes=options.record_shapes,
    )
    recorder.__enter__()
    return recorder


def _finish(file: TraceFile) -> Path:
    try:
        path = file.finish()
    except FailedPreconditionError as error:
        log.error("profile lost", trace=str(file.path), reason=str(error))
        raise
    log.info("profile written", trace=str(path))
    return path
