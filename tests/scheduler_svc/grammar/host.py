"""A grammar host as a process of the test's, with small limits, so that exceeding them takes a
second: `python -m tests.scheduler_svc.grammar.host`."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

import psutil

from scheduler_svc.grammar import wire
from scheduler_svc.grammar.host_link import HostLink
from shared.process.death_signal import end_with_parent
from shared.process.heartbeat import Heartbeat
from tests.scheduler_svc.grammar.attempts import attempting
from tests.waiting import is_running, wait_for

ROOT = Path(__file__).parents[3]
DEMO = ROOT / "models" / "demo"


class TestHost:
    """A link, and the host on it."""

    __test__ = False

    def __init__(
        self, model: Path = DEMO, compile_cpu_s: float = 1.0, load_s: float = 120.0
    ) -> None:
        self.link = HostLink.create()
        self._args = [str(compile_cpu_s), str(load_s), str(model)]
        self._process = self._start()

    @property
    def pid(self) -> int:
        return self._process.pid

    def children(self) -> list[psutil.Process]:
        """The processes of grammars, oldest first."""
        found = psutil.Process(self.pid).children()
        return [each for each in sorted(found, key=lambda each: each.pid) if is_running(each.pid)]

    def wait(self) -> int:
        """Returns the exit status of this one once it has died."""
        return self._process.wait()

    def restart(self, load_s: float = 120.0) -> None:
        """Starts another once this one has died."""
        self.wait()
        self._args[1] = str(load_s)
        self._process = self._start()

    def close(self) -> None:
        self._process.kill()
        self._process.wait()
        self.link.close()

    def _start(self) -> subprocess.Popen[bytes]:
        link = self.link
        descriptors = [link.scheduler.fileno(), link.host.fileno()]
        module = "tests.scheduler_svc.grammar.host"
        return subprocess.Popen(
            [sys.executable, "-m", module, *self._args, *map(str, descriptors)],
            cwd=ROOT,
            pass_fds=descriptors,
        )


def wait_dead(*pids: int) -> None:
    wait_for(lambda: not any(map(is_running, pids)), f"{pids} to end")


if __name__ == "__main__":
    compile_cpu_s, load_s, model, *descriptors = sys.argv[1:]
    end_with_parent()
    wire.COMPILE_CPU_S = float(compile_cpu_s)
    wire.MASK_CPU_S = 0.05
    wire.MEMORY_BYTES = 64 << 20

    from scheduler_svc.grammar import host

    host._LOAD_S = float(load_s)
    load = host.GrammarHost._load

    def load_and_attempt(self: host.GrammarHost) -> None:
        """Has a grammar whose text begins with ATTEMPTS make these, and be refused with what became
        of them."""
        load(self)
        from scheduler_svc.grammar import child

        child.compile_grammar = attempting(child.compile_grammar)

    host.GrammarHost._load = load_and_attempt  # type: ignore[method-assign]
    ends = (socket.socket(fileno=int(each)) for each in descriptors)
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    heartbeat = Heartbeat(ours, os.getppid(), hang_timeout_s=60.0)
    host.GrammarHost(HostLink(*ends), Path(model)).run(heartbeat)
