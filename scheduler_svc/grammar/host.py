"""The grammar host: forks a process for each grammar.

The host runs beside the scheduler and outlives it. At the first demand it imports xgrammar (and
torch with it, which takes seconds) and reads the vocabulary, or at once if a predecessor's host
had. Its forks share both. The host has a single thread, and runs no code that depends on a client's
input.
"""

from __future__ import annotations

import gc
import os
import select
import signal
import socket
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path

import structlog

from scheduler_svc.grammar.confinement import log_gaps
from scheduler_svc.grammar.errors import Death, VocabularyError
from scheduler_svc.grammar.host_link import FAILED, STARTED, VOCABULARY, HostLink
from scheduler_svc.grammar.wire import OUT_OF_MEMORY
from shared.process.heartbeat import Heartbeat

log = structlog.get_logger(__name__)

_BEAT_S = 0.2
_MAX_JSON_WHITESPACE = 20  # otherwise a model may write spaces until its last token
_LOAD_S = 120.0  # about 4 s on an idle machine; after this the kernel kills the host (SIGALRM)
_FROM_OUTSIDE = (signal.SIGKILL, signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
# xgrammar's libraries handle some of these, with system calls that a confined process cannot make.
_CRASHES = (signal.SIGSEGV, signal.SIGBUS, signal.SIGFPE, signal.SIGILL, signal.SIGABRT)


class GrammarHost:
    """Serves `link`. `model` is the directory of tokenizer.json and config.json."""

    def __init__(self, link: HostLink, model: Path) -> None:
        self._link = link
        self._model = model
        self._serve: Callable[[socket.socket], None] | None = None  # set once all is loaded
        self._connections: dict[int, socket.socket] = {}  # of living processes, by pid

    def run(self, heartbeat: Heartbeat) -> None:
        """Serves until its process ends. Loads all that is needed at once if a predecessor's host
        had, and otherwise at the first demand. Beats several times a second from then on.

        Raises:
            VocabularyError, ImportError, OSError, MemoryError: it cannot load at once. The next
                host waits for a demand.
        """
        # Threads that a library makes would not exist in the forks.
        os.environ.update(OMP_NUM_THREADS="1", OPENBLAS_NUM_THREADS="1", MKL_NUM_THREADS="1")
        woken, waking = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        signal.set_wakeup_fd(waking)
        signal.signal(signal.SIGCHLD, lambda *_: None)  # Python notices only signals with a handler
        if heartbeat.was_ready and not heartbeat.restarts:
            self._load()
        while True:
            host = self._link.host.fileno()
            readable, _, _ = select.select([host, woken], [], [], _BEAT_S)
            if woken in readable:
                os.read(woken, 4096)
                self._reap()
            if host in readable:
                self._take_demand()
            if self._serve is not None:
                heartbeat.ready()
                heartbeat.beat()

    def _take_demand(self) -> None:
        _, descriptors, _, _ = socket.recv_fds(self._link.host, 16, 1)
        connection = socket.socket(fileno=descriptors[0])
        try:
            self._load()
            self._fork(connection)
            return
        except VocabularyError as error:
            _send_line(connection, VOCABULARY, str(error))
        except (ImportError, OSError, MemoryError) as error:
            log.error("cannot start a grammar process; trying again", exc_info=error)
            _send_line(connection, FAILED, repr(error))
        connection.close()

    def _load(self) -> None:
        if self._serve is not None:
            return
        signal.setitimer(signal.ITIMER_REAL, _LOAD_S)
        try:
            from scheduler_svc.grammar.vocabulary import read_vocabulary

            vocabulary = read_vocabulary(self._model)

            from scheduler_svc.grammar.child import serve
            from scheduler_svc.grammar.compiler import make_compilers

            compilers = make_compilers(vocabulary, _MAX_JSON_WHITESPACE)
            self._serve = partial(serve, compilers=compilers)
            log_gaps()
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
        gc.collect()
        gc.freeze()

    def _fork(self, connection: socket.socket) -> None:
        if pid := os.fork():
            self._connections[pid] = connection
            _send_line(connection, STARTED, str(pid))
            return
        status = 1
        try:
            signal.set_wakeup_fd(-1)
            for number in (signal.SIGCHLD, signal.SIGINT, signal.SIGTERM, *_CRASHES):
                signal.signal(number, signal.SIG_DFL)
            assert self._serve is not None
            self._serve(connection)
            status = 0
        finally:
            os._exit(status)

    def _reap(self) -> None:
        with suppress(ChildProcessError):
            while True:
                pid, wait_status = os.waitpid(-1, os.WNOHANG)
                if not pid:
                    return
                if connection := self._connections.pop(pid, None):
                    death = _death(os.waitstatus_to_exitcode(wait_status))
                    _send(connection, bytes([death]))
                    connection.close()


def _death(status: int) -> Death:
    if status in (-signal.SIGPROF, OUT_OF_MEMORY):
        return Death.AT_LIMIT
    return Death.KILLED if -status in _FROM_OUTSIDE else Death.CRASHED


def _send_line(connection: socket.socket, word: str, value: str) -> None:
    _send(connection, f"{word} {' '.join(value.split())}\n".encode())


def _send(connection: socket.socket, data: bytes) -> None:
    with suppress(OSError):  # the scheduler has closed the connection
        connection.send(data, socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL)
