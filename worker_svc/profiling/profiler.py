"""Records steps with torch's profiler as traces that Perfetto and Chrome show."""

from __future__ import annotations

import gzip
import os
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

import structlog

# torch.profiler would import torch's compiler, over 100 MB, at its first start.
from torch.autograd.profiler import profile, record_function

from shared.errors import FailedPreconditionError, InvalidArgumentError
from worker_svc.step.arrays import StepArrays

log = structlog.get_logger(__name__)

MAX_STEPS = 1000
# Recorded events stay in memory, 2 KB each, until torch processes them. That takes 3 to 8 us per
# event and holds Python's lock. A step of 28 layers on a CPU has 3,500 events, so processing the
# events of all steps at once would look like a hang.
PIECE_STEPS = 10
_EVENTS = b'"traceEvents": ['


Send = Callable[[Future[bytes] | None], object]


@dataclass
class _Profile:
    """A profile in progress. `recorder` has the steps since the last piece."""

    send: Send
    device: str
    steps_left: int
    recorder: profile
    piece: Future[bytes] | None = None  # the last one


class Profiler:
    """Records at most one profile at a time.

    Call it between steps from the thread that runs them, because torch records the thread that
    starts the recorder.
    """

    def __init__(self) -> None:
        self._profile: _Profile | None = None
        self._writes = ThreadPoolExecutor(1, thread_name_prefix="profile")

    def start(self, num_steps: int, device: str, send: Send) -> None:
        """Begins to record `num_steps` steps.

        Args:
            send: receives a future for each piece of the trace, then None. Joined, the pieces are a
                gzip file.

        Raises:
            InvalidArgumentError: they are too few or too many.
            FailedPreconditionError: a profile is already in progress.
        """
        if not 1 <= num_steps <= MAX_STEPS:
            raise InvalidArgumentError("num_steps", f"{num_steps} is not in 1..{MAX_STEPS}")
        if self._profile is not None:
            raise FailedPreconditionError("a profile is in progress")
        self._profile = _Profile(send, device, num_steps, _recorder(device))
        log.info("profile started", steps=num_steps)

    def stop(self, send: Send) -> None:
        """Ends the profile that was started with `send`, unless it has ended."""
        if self._profile is not None and self._profile.send is send:
            self._profile.recorder.__exit__(None, None, None)
            self._profile = None

    def named(self, step: StepArrays) -> AbstractContextManager[object]:
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
        """Converts the steps recorded so far on another thread. Recording continues unless these
        were the last steps."""
        current = self._profile
        assert current is not None
        current.recorder.__exit__(None, None, None)
        is_first, is_last = current.piece is None, not current.steps_left
        if current.piece is not None:
            wait([current.piece])  # otherwise events would fill the memory
        current.piece = self._writes.submit(_piece, current.recorder, is_first, is_last)
        current.send(current.piece)
        if is_last:
            self._profile = None
            current.send(None)
        else:
            current.recorder = _recorder(current.device)

    def close(self) -> None:
        """Returns when no piece is being converted."""
        self._writes.shutdown()


def _recorder(device: str) -> profile:
    """Starts a recorder and returns it."""
    on_gpu = device != "cpu"
    if on_gpu:
        # torch.profiler does this too, because CUDA graphs crash after CUPTI was torn down.
        os.environ.update(DISABLE_CUPTI_LAZY_REINIT="1", TEARDOWN_CUPTI="0")
    recorder = profile(use_kineto=True, use_device="cuda" if on_gpu else None)
    recorder.__enter__()
    return recorder


def _piece(recorder: profile, is_first: bool, is_last: bool) -> bytes:
    """Part of a trace. Events are spliced as bytes, because parsing would hold Python's lock while
    steps need it.

    Raises:
        FailedPreconditionError: the temporary file for it cannot be written.
    """
    try:
        with TemporaryDirectory() as folder:
            path = Path(folder, "trace")
            recorder.export_chrome_trace(str(path))
            trace = path.read_bytes()
        start = trace.index(_EVENTS) + len(_EVENTS)
        end = trace.rindex(b"]", start, trace.rindex(b'"traceName"'))
    except (OSError, ValueError) as error:  # torch reports no error when it cannot write
        raise FailedPreconditionError("the trace was cut short; is the disk full?") from error
    begin = trace[:start] if is_first else b","
    # Level 1, because serving needs the processor.
    return gzip.compress(begin + trace[start:end] + b"]}" * is_last, compresslevel=1)
