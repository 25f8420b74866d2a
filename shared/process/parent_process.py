"""Runs a service in a fork, and forks again when that dies or hangs.

Imports take most of the startup time: torch's alone take over a second. The main process, the
parent, imports everything, forks and waits. If the fork dies, another takes milliseconds to start.
The parent never runs gRPC or torch, because threads and devices do not survive a fork.

Parent and fork tell each other that they are alive (`heartbeat`). Each counts its own turns instead
of reading a clock, so stopping both of them, or the whole machine, does not count as a hang.
"""

from __future__ import annotations

import atexit
import gc
import os
import select
import signal
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, replace
from typing import NoReturn

import structlog

from shared.config import ServiceSettings
from shared.process.death_signal import end_with_parent
from shared.process.fork import CANNOT_START, Fork, Serve
from shared.process.heartbeat import BEATS, Heartbeat
from shared.process.kept import close_unclaimed
from shared.process.parent_state import STATE_NAME, ParentState
from shared.process.published_state import PublishedState
from shared.process.successor import Predecessor, Successor

log = structlog.get_logger(__name__)

_SIGNALS = (signal.SIGTERM, signal.SIGINT)
RESTART = signal.SIGUSR2  # not SIGHUP, which also says that a terminal has closed
REPLACED = 75  # EX_TEMPFAIL of sysexits.h
_OTHER = "code, settings or model differ, so the memory of the old program is not shared"
_HANDLED = (*_SIGNALS, RESTART)
_MOMENT_S = 0.001
_SIDECAR_S = 20.0  # how long the start of a successor may wait for its sidecar


class ParentProcess:
    """Keeps `serve` running in a fork of this process, and `sidecar`, if given, in another.

    Once a service fork has been ready, the parent always forks again, whatever ends a fork or
    keeps the next one from starting. It passes on SIGTERM and SIGINT. No fork outlives it.

    The signal `RESTART` starts a successor. Once that waits, the service fork is ended like by
    SIGTERM, and this process ends with `REPLACED`. If the successor ends before, this process
    continues.

    Args:
        serve: calls `Heartbeat.ready` once it serves. If it cannot serve, it calls
            `Heartbeat.fail` with the reason, and ends with CANNOT_START.
        settings: `hang_timeout_s`: a fork that has called `Heartbeat.beat` is killed if it does not
            call again for this long. A fork that is stopped (SIGSTOP) for this long is killed, too.
            `spares`: whether a successor waits, which serves when this process dies.
            `exit_with_parent`: whether this process ends with its parent process.
        sidecar: outlives service forks: it is forked before the first of them, and again
            whenever it ends, until this process ends. It calls `Heartbeat.ready` once it is of use.
            If that of the predecessor was, this one is forked while this process waits.
        on_fork_ended: called with the exit status of a service fork before the next one starts. A
            negative status is the signal that killed it.
        overlaps: a successor may serve while the last service fork of this process drains.
        predecessor: of this process, which waits for it before it serves.
    """

    def __init__(
        self,
        serve: Serve,
        settings: ServiceSettings,
        sidecar: Serve | None = None,
        on_fork_ended: Callable[[int], object] | None = None,
        overlaps: bool = False,
        predecessor: Predecessor | None = None,
    ) -> None:
        self._on_fork_ended = on_fork_ended
        self._settings = settings
        self._overlaps = overlaps
        self._predecessor = predecessor
        self._successor = Successor()
        self._published = PublishedState(STATE_NAME)
        self._signals: list[int] = []  # signals to pass on
        self._woken, self._waking = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self._ending = False  # a stop signal has arrived
        self._hands_over = False  # to the successor, once that waits
        self._num_refused = 0
        self._remark = ""  # on the last successor
        self._service = Fork(serve, settings.hang_timeout_s)
        self._sidecar = sidecar and Fork(sidecar, settings.hang_timeout_s, serves=False)
        self._forks = [self._sidecar, self._service] if self._sidecar else [self._service]

    def run(self) -> int:
        """Returns the exit status of a service fork that ended in order, was told to end, or died
        before any was ready. For a fork that a signal killed, it is 128 plus the signal. Does not
        return if a successor serves.

        Call it after all calls that find what the predecessor kept (`shared.process.kept`).
        """
        if self._settings.exit_with_parent and not self._predecessor:
            end_with_parent()
        is_another = close_unclaimed()
        gc.freeze()
        signal.set_wakeup_fd(self._waking)
        signal.signal(signal.SIGCHLD, lambda *_: None)  # only a signal with a handler wakes
        for number in _HANDLED:
            signal.signal(number, lambda number, _: self._signals.append(number))
        if self._predecessor and not self._wait(self._predecessor, _OTHER if is_another else ""):
            return 0
        next_check = 0.0
        while True:
            if self._predecessor:
                self._watch(self._predecessor)
            for fork in self._forks:
                fork.receive()
                fork.wait()
            self._pass_signals_on()
            if self._service.has_ended and self._service.status is not None and self._on_fork_ended:
                self._on_fork_ended(self._service.status)
            if (status := self._final_status()) is not None and not self._resumes():
                self._end()
                return status
            spare_due = self._prepare_successor()
            if time.monotonic() >= next_check:
                next_check = time.monotonic() + self._settings.hang_timeout_s / BEATS
                for fork in self._forks:
                    fork.check(may_kill=not self._ending)
            for fork in self._forks:
                if fork.has_ended:
                    fork.plan_next()
                if fork.due is not None and fork.due <= time.monotonic():
                    self._start(fork)
            shown = replace(self._service.state, num_refused=self._num_refused, remark=self._remark)
            self._published.show(asdict(shown))
            due = [fork.due or 0.0 for fork in self._forks if not fork.pid]
            self._sleep(
                min(next_check, spare_due, *due),
                *(fork for fork in self._forks if fork.pid),
                self._successor,
                *([self._predecessor] if self._predecessor else []),
            )

    def _start(self, fork: Fork) -> None:
        """Forks; the child runs the function of `fork`, then ends."""
        parent = os.getpid()
        # A signal that arrives here waits until the child no longer has the parent's handlers.
        signal.pthread_sigmask(signal.SIG_BLOCK, _HANDLED)
        theirs = fork.fork()
        if theirs is None:
            signal.pthread_sigmask(signal.SIG_UNBLOCK, _HANDLED)
            return
        signal.set_wakeup_fd(-1)
        for number in (*_HANDLED, signal.SIGCHLD):
            signal.signal(number, signal.SIG_DFL)
        if fork is not self._service:
            signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the service
        signal.pthread_sigmask(signal.SIG_UNBLOCK, _HANDLED)
        end_with_parent(parent)
        for each in self._forks:
            each.close()
        self._successor.close_in_fork(serves=fork is self._service)
        self._published.close()
        os.close(self._woken)
        os.close(self._waking)
        gc.enable()
        heartbeat = Heartbeat(
            theirs, parent, self._settings.hang_timeout_s, fork.restarts, fork.was_ready
        )
        try:
            fork.function(heartbeat)
        except Exception as error:
            heartbeat.fail(type(error).__name__)  # its text may quote a prompt
            raise
        _exit(0)

    def _pass_signals_on(self) -> None:
        while self._signals:
            number = self._signals.pop(0)
            if number != RESTART:
                if self._successor.serves:
                    self._successor.signal(number)
                else:
                    self._hands_over = False
                self._end_service(number)
            elif not self._ending:
                self._hands_over, self._remark = True, ""
                self._successor.start(self._parent, self._has_sidecar)

    @property
    def _parent(self) -> int:
        """The id of the parent process of this one, once its predecessor has ended."""
        return self._predecessor.parent if self._predecessor else os.getppid()

    def _end_service(self, number: int) -> None:
        self._ending = True
        if self._service.pid:
            os.kill(self._service.pid, number)
        else:
            self._service.status, self._service.due = -number, None

    def _prepare_successor(self) -> float:
        """Starts a spare. If this process hands over, ends the service fork once the successor
        waits -> when to call this again."""
        successor = self._successor
        successor.check()
        if self._hands_over and not self._ending:
            if successor.failure:
                self._refuse()
            elif successor.is_waiting:
                self._remark = successor.remark
                log.info("handing over", remark=self._remark)
                if self._overlaps:
                    successor.let_serve()
                self._end_service(signal.SIGTERM)
        elif self._wants_spare:
            return successor.start_spare(self._parent, self._has_sidecar)
        return float("inf")

    @property
    def _has_sidecar(self) -> bool:
        return self._sidecar is not None and self._sidecar.was_ready

    @property
    def _wants_spare(self) -> bool:
        is_draining = self._ending or self._predecessor is not None
        return self._settings.spares > 0 and self._service.is_ready and not is_draining

    def _refuse(self) -> None:
        """Gives up handing over, because the successor has ended."""
        self._hands_over, self._remark = False, self._successor.failure
        self._num_refused += 1
        log.error("the next program cannot start; serving on", reason=self._remark)

    def _resumes(self) -> bool:
        """Serves on, in another fork, if the successor has ended although it waited."""
        self._successor.check()
        if not self._hands_over or self._successor.serves or not self._successor.failure:
            return False
        self._refuse()
        self._ending = False
        return True

    def _wait(self, predecessor: Predecessor, remark: str) -> bool:
        """Waits until the predecessor lets this process serve, or has ended. If its sidecar was
        ready, tells it only once this one's is, too, or has died, or `_SIDECAR_S` have passed.

        Returns:
            False if a signal to end has arrived instead.
        """
        log.info("waiting to replace a process", pid=predecessor.pid, remark=remark)
        self._published.show(asdict(ParentState(0, f"it waits for process {predecessor.pid}")))
        if self._sidecar and predecessor.had_sidecar:
            self._sidecar.was_ready = True
            self._start(self._sidecar)
        late_at, has_told = time.monotonic() + _SIDECAR_S, False
        while not predecessor.lets_serve:
            loading = [fork for fork in self._forks if fork.pid and not fork.is_ready]
            if time.monotonic() >= late_at:
                loading = []
            if not loading and not has_told:
                predecessor.wait(remark)
                has_told = True
            self._sleep(late_at if loading else float("inf"), predecessor, *loading)
            if {*_SIGNALS} & {*self._signals}:
                return False
            predecessor.check()
            for fork in self._forks:
                fork.receive()
                fork.wait()
        log.info("replacing a process", pid=predecessor.pid)
        self._service.was_ready = predecessor.has_ended  # was killed, after it had served
        if self._on_fork_ended:
            self._on_fork_ended(-signal.SIGKILL)  # unless the predecessor has seen another end
        return True

    def _watch(self, predecessor: Predecessor) -> None:
        """Ties this process to its new parent process, once the predecessor has ended."""
        predecessor.check()
        if predecessor.has_ended:
            while os.getppid() == predecessor.pid:  # it closes its files a moment before it ends
                time.sleep(_MOMENT_S)
            self._predecessor = None
            if self._settings.exit_with_parent:
                end_with_parent(predecessor.parent)

    def _final_status(self) -> int | None:
        """The exit status of this process, if nothing remains to be done."""
        service = self._service
        if not service.has_ended or service.status is None:
            return None
        if service.status != 0 and service.was_ready and not self._ending:
            return None
        if service.status == CANNOT_START and not self._ending:
            log.error("cannot start", reason=service.reason)
        return service.status if service.status >= 0 else 128 - service.status

    def _end(self) -> None:
        """Ends the successor, or lets it serve. Does not return if this process is replaced."""
        if self._hands_over:
            # A successor with memory of its own waits until this process has given back its memory.
            if not self._successor.remark:
                self._successor.let_serve()
            _exit(REPLACED)
        self._successor.end()

    def _sleep(self, until: float, *sources: Fork | Successor | Predecessor) -> None:
        """Returns when a signal or a message of a source has arrived, or at the time `until`."""
        poll = select.poll()
        for source in (self._woken, *sources):
            poll.register(source, select.POLLIN)
        timeout_s = until - time.monotonic()
        poll.poll(max(0.0, timeout_s) * 1000 + 1 if timeout_s < float("inf") else None)
        with suppress(BlockingIOError):
            os.read(self._woken, 4096)


def _exit(status: int) -> NoReturn:
    """Ends this process without the interpreter's own end, which takes up to half a second. No
    successor could serve meanwhile."""
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)
