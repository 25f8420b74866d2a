"""Hosts that are network namespaces, and a router between them that can drop any traffic.

        client (this process)
           |
        frontend     scheduler     worker
              \\          |          /
                ------ router -----

Dropped packets vanish without notice, as on a real network: a routing rule sends them into a black
hole. Needs root and iproute2.
"""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO

import psutil

from tests.stack import ROOT

_ROUTER = "router"
_ESTABLISHED = "01"  # in /proc/PID/net/tcp


def missing() -> str | None:
    """The reason why there can be no such hosts here, or None."""
    if shutil.which("ip") is None:
        return "iproute2 is not installed"
    if os.geteuid() != 0:
        return "network namespaces need root"
    probe = subprocess.run(["ip", "netns", "add", _name("probe")], capture_output=True, text=True)
    if probe.returncode:
        return f"no network namespaces: {probe.stderr.strip()}"
    _ip("netns", "del", _name("probe"))
    return None


class Hosts:
    """Hosts in a network of their own; the first can also be reached from this process.

    Raises:
        subprocess.CalledProcessError: the network cannot be created.
    """

    def __init__(self, names: Sequence[str]) -> None:
        self._names = names
        self._processes: dict[str, subprocess.Popen[bytes]] = {}
        self._cuts: list[tuple[str, ...]] = []
        try:
            for name in (_ROUTER, *names):
                _ip("netns", "add", _name(name))
                _ip("-n", _name(name), "link", "set", "lo", "up")
            forwarding = "echo 1 > /proc/sys/net/ipv4/ip_forward"
            _ip("netns", "exec", _name(_ROUTER), "sh", "-c", forwarding)
            for name in names:
                self._connect(name)
            self._connect_here(names[0])
        except BaseException:
            self.close()
            raise

    def address(self, name: str) -> str:
        """The host's address, for the other hosts."""
        return f"10.77.{self._names.index(name)}.2"

    @property
    def public_address(self) -> str:
        """The first host's address, for this process."""
        return f"100.127.{os.getpid() % 256}.2"

    def start(
        self, name: str, module: str, environment: Mapping[str, str], output: IO[bytes]
    ) -> None:
        """Runs `python -m MODULE` on a host, until `kill`."""
        self._processes[name] = subprocess.Popen(
            self.command(name, "-m", module),
            cwd=ROOT,
            env={**os.environ, **environment},
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
        )

    def command(self, name: str, *arguments: object) -> list[str]:
        """The command line that runs Python on a host."""
        return ["ip", "netns", "exec", _name(name), sys.executable, *map(str, arguments)]

    def lose(self, name: str) -> None:
        """Ends a host with all its processes, for good, without closing a connection."""
        _ip("-n", _name(_ROUTER), "link", "del", name)
        _kill_all(name)

    def kill(self, name: str) -> None:
        """Kills a host's process with SIGKILL."""
        process = self._processes.pop(name)
        process.kill()
        process.wait()

    @contextmanager
    def stopped(self, name: str) -> Iterator[None]:
        """Stops a host's processes, all at once, so that none takes another for hung."""
        first = psutil.Process(self._processes[name].pid)
        family = [first, *first.children(recursive=True)]
        for each in family:
            each.suspend()
        try:
            yield
        finally:
            for each in family:
                each.resume()

    def connected(self, name: str, other: str) -> bool:
        """Whether `name` holds a connection to `other` open."""
        address = socket.inet_aton(self.address(other))[::-1].hex().upper()
        for kind in ("tcp", "tcp6"):  # IPv4 over a socket for IPv6 has the address at its end
            table = Path(f"/proc/{self._processes[name].pid}/net/{kind}").read_text()
            for line in table.splitlines()[1:]:
                _, _, remote, state, *_ = line.split()
                if remote.partition(":")[0].endswith(address) and state == _ESTABLISHED:
                    return True
        return False

    def segments_resent(self, name: str) -> int:
        """How many TCP segments the host has ever sent again."""
        lines = Path(f"/proc/{self._processes[name].pid}/net/snmp").read_text().splitlines()
        names, values = (line.split() for line in lines if line.startswith("Tcp:"))
        return int(values[names.index("RetransSegs")])

    def cut(self, source: str, target: str) -> None:
        """Drops everything that `source` sends to `target`, until `heal`."""
        rule = ("from", self.address(source), "to", self.address(target), "blackhole")
        _ip("-n", _name(_ROUTER), "rule", "add", *rule)
        self._cuts.append(rule)

    def heal(self) -> None:
        while self._cuts:
            _ip("-n", _name(_ROUTER), "rule", "del", *self._cuts.pop())

    def close(self) -> None:
        for process in self._processes.values():
            process.kill()
            process.wait()
        # At once, while the rest may go later.
        subprocess.run(["ip", "link", "del", _name("here")], capture_output=True)
        for name in (_ROUTER, *self._names):  # its links go with it
            _kill_all(name)
            subprocess.run(["ip", "netns", "del", _name(name)], capture_output=True)

    def _connect(self, name: str) -> None:
        host, router, gateway = _name(name), _name(_ROUTER), f"10.77.{self._names.index(name)}.1"
        ours, theirs = ("link", "set", "up", "dev"), ("addr", "add")
        _ip("link", "add", "eth0", "netns", host, "type", "veth", "peer", name, "netns", router)
        _ip("-n", host, *theirs, f"{self.address(name)}/24", "dev", "eth0")
        _ip("-n", router, *theirs, f"{gateway}/24", "dev", name)
        _ip("-n", host, *ours, "eth0")
        _ip("-n", router, *ours, name)
        _ip("-n", host, "route", "add", "default", "via", gateway)

    def _connect_here(self, name: str) -> None:
        here, host = _name("here"), _name(name)
        _ip("link", "add", here, "type", "veth", "peer", "public", "netns", host)
        _ip("addr", "add", f"100.127.{os.getpid() % 256}.1/24", "dev", here)
        _ip("-n", host, "addr", "add", f"{self.public_address}/24", "dev", "public")
        _ip("link", "set", "up", "dev", here)
        _ip("-n", host, "link", "set", "up", "dev", "public")


def _name(of: str) -> str:
    """Names a namespace or link: unique to this test run, and at most 15 letters."""
    return f"{of[:9]}{os.getpid() % 1_000_000}"


def _kill_all(name: str) -> None:
    """Kills what runs on a host."""
    command = ["ip", "netns", "pids", _name(name)]
    while pids := subprocess.run(command, capture_output=True, text=True).stdout.split():
        for pid in pids:
            with suppress(ProcessLookupError):
                os.kill(int(pid), signal.SIGKILL)


def _ip(*args: str) -> None:
    subprocess.run(["ip", *args], check=True, stdout=subprocess.DEVNULL)
