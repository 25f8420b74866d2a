"""Runs a service in a fork, and forks again when that dies or hangs.

Imports take most of the startup time: torch's alone take over a second. The main process, the
parent, imports everything, forks and waits. If the fork dies, another takes milliseconds to start.
The parent never runs gRPC or torch, because threads and devices do not survive a fork.

Parent and fork tell each other that they are alive (`heartbeat`). Each counts its own turns instead
of reading a clock, so stopping both of them, or the whole machine, does not count as a hang.
"""

from __future__ import annotations

import gc
import os
import select
import signal
import time
from collections.abc import Callable
from dataclasses import asdict

import structlog

from shared.process.death_signal import end_with_parent
from shared.process.fork import CANNOT_START, Fork, Serve
from shared.process.heartbeat import BEATS, Heartbeat
from shared.process.kept import UnusableFileError, close_unclaimed, restart_program
from shared.process.parent_state import STATE_NAME
from shared.process.published_state import PublishedState

log = structlog.get_logger(__name__)

_SIGNALS = (signal.SIGTERM, signal.SIGINT)
RESTART = signal.SIGUSR2  # not SIGHUP, which also says that a terminal has closed
_HANDLED = (*_SIGNALS, RESTART)


class ParentProcess:
    """Keeps `serve` running in a fork of this process, and `sidecar`, if given, in another.

    Once a service fork has been ready, the parent always forks again, whatever ends a fork or
    keeps the next one from starting. It passes on SIGTERM and SIGINT. No fork outlives it. The
    signal `RESTART` ends the service fork like SIGTERM, and then starts this program again, in this
    process. A fork that ends with `UnusableFileError` sends it.

    Args:
        serve: calls `Heartbeat.ready` once it serves. If it cannot serve, it calls
            `Heartbeat.fail` with the reason, and ends with CANNOT_START.
        hang_timeout_s: a fork that has called `Heartbeat.beat` is killed if it does not call again
            for this long. A fork that is stopped (SIGSTOP) for this long is killed, too.
        sidecar: outlives service forks: it is forked before the first of them, and again
            whenever it ends, until this process ends.
        on_fork_ended: called with the exit status of a service fork before the next one starts. A
            negative status is the signal that killed it.
    """

    def __init__(
        self,
        serve: Serve,
        hang_timeout_s: float,
        sidecar: Serve | None = None,
        on_fork_ended: Callable[[int], object] | None = None,
    ) -> None:
        self._on_fork_ended = on_fork_ended
        self._hang_timeout_s = hang_timeout_s
        self._published = PublishedState(STATE_NAME)
        self._signals: list[int] = []  # signals to pass on
        self._woken, self._waking = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self._ending = False  # a stop signal has arrived
        self._restarts_program = False  # instead of the next fork
        self._service = Fork(serve, hang_timeout_s)
        self._forks = [self._service]
        if sidecar is not None:
            self._forks.insert(0, Fork(sidecar, hang_timeout_s, serves=False))

    def run(self) -> int:
        """Returns the exit status of a service fork that ended in order, was told to end, or died
        before any was ready. For a fork that a signal killed, it is 128 plus the signal.

        Call it after all calls that find what the program before kept (`shared.process.kept`).
        """
        close_unclaimed()
        gc.freeze()
        signal.set_wakeup_fd(self._waking)
        signal.signal(signal.SIGCHLD, lambda *_: None)  # only a signal with a handler wakes
        for number in _HANDLED:
            signal.signal(number, lambda number, _: self._signals.append(number))
        next_check = 0.0
        while True:
            for fork in self._forks:
                fork.receive()
                fork.wait()
            self._pass_signals_on()
            if self._service.has_ended and self._service.status is not None and self._on_fork_ended:
                self._on_fork_ended(self._service.status)
            if (status := self._final_status()) is not None:
                if self._restarts_program:
                    self._restart_program()
                return status
            if time.monotonic() >= next_check:
                next_check = time.monotonic() + self._hang_timeout_s / BEATS
                for fork in self._forks:
                    fork.check(may_kill=not self._ending)
            for fork in self._forks:
                if fork.has_ended:
                    fork.plan_next()
                if fork.due is not None and fork.due <= time.monotonic():
                    self._start(fork)
            self._published.show(asdict(self._service.state))
            self._sleep(
                min([next_check, *(fork.due or 0.0 for fork in self._forks if not fork.pid)])
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
        self._published.close()
        os.close(self._woken)
        os.close(self._waking)
        gc.enable()
        heartbeat = Heartbeat(theirs, parent, self._hang_timeout_s, fork.restarts)
        try:
            fork.function(heartbeat)
        except UnusableFileError as error:
            log.warning("a kept file cannot be used; the program starts again", reason=str(error))
            os.kill(parent, RESTART)
            signal.pause()  # for the parent's SIGTERM, as another end may be taken for a failure
        except Exception as error:
            heartbeat.fail(type(error).__name__)  # its text may quote a prompt
            raise
        raise SystemExit(0)

    def _pass_signals_on(self) -> None:
        while self._signals:
            number = self._signals.pop(0)
            # A signal to end counts more, whichever comes first.
            first = not self._ending or self._restarts_program
            self._ending, self._restarts_program = True, first and number == RESTART
            number = signal.SIGTERM if number == RESTART else number
            if self._service.pid:
                os.kill(self._service.pid, number)
            else:
                self._service.status, self._service.due = -number, None

    def _final_status(self) -> int | None:
        """The exit status of this process, if nothing remains to be done."""
        service = self._service
        if not service.has_ended or service.status is None:
            return None
        if service.status and service.was_ready and not self._ending:
            return None
        if service.status == CANNOT_START and not self._ending:
            log.error("cannot start", reason=service.reason)
        return service.status if service.status >= 0 else 128 - service.status

    def _restart_program(self) -> None:
        """Does not return, unless a signal to pass on has arrived."""
        for fork in self._forks:
            if fork.pid:  # the sidecar
                os.kill(fork.pid, signal.SIGKILL)
                os.waitpid(fork.pid, 0)
        for number in _SIGNALS:
            signal.signal(number, signal.SIG_DFL)
        if not {*_SIGNALS} & {*self._signals}:
            log.info("starting the program again")
            restart_program()

    def _sleep(self, until: float) -> None:
        """Returns when a signal has arrived, or at the time `until`."""
        timeout_ms = max(0.0, until - time.monotonic()) * 1000 + 1
        poll = select.poll()
        poll.register(self._woken, select.POLLIN)
        if poll.poll(timeout_ms):
            os.read(self._woken, 4096)
