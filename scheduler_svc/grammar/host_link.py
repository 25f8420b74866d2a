"""The way from the scheduler to the grammar host: made once by the process that keeps both alive,
inherited by all forks of both, so that it outlives either.

Nothing listens: who did not inherit the link cannot reach the host.
"""

from __future__ import annotations

import os
import socket
import struct
from dataclasses import dataclass

_STATE = struct.Struct("<i?")

# Demands, each with the descriptors named here.
LOAD = b"load"  # [report]: import xgrammar and read the vocabulary, if that is not done yet
FORK = b"fork"  # [report, scheduler]: and give a new process the second descriptor

# What comes back through `report`, in lines: a word and its value.
LOADED = "loaded"
STARTED = "started"  # pid
VOCABULARY = "vocabulary"  # the text of a VocabularyError
FAILED = "failed"  # reason
ENDED = "ended"  # exit status; negative for a signal


@dataclass(frozen=True)
class HostLink:
    """Both ends of a pair of sockets that preserve messages, and a file in memory with the host's
    state. Everyone has all three, so no end is ever seen to be closed: a demand that a host dies
    without having taken waits for its successor."""

    scheduler: socket.socket
    host: socket.socket
    state: int

    @classmethod
    def create(cls) -> HostLink:
        scheduler, host = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        scheduler.setblocking(False)
        state = os.memfd_create("grammar-host")
        os.pwrite(state, _STATE.pack(0, False), 0)
        return cls(scheduler, host, state)

    def set_state(self, pid: int, *, loading: bool) -> None:
        os.pwrite(self.state, _STATE.pack(pid, loading), 0)

    def get_state(self) -> tuple[int, bool]:
        """The host's process id, 0 before there was one, and whether it is loading, which takes
        seconds."""
        pid, loading = _STATE.unpack(os.pread(self.state, _STATE.size, 0))
        return pid, loading

    def close(self) -> None:
        self.scheduler.close()
        self.host.close()
        os.close(self.state)
