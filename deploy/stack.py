"""A stack: the processes that run on this host, where they listen and where they keep state."""

from __future__ import annotations

import os
import stat
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from pydantic import TypeAdapter

from deploy.errors import LaunchError
from frontend.callers.tenants import read_clients
from nano_vllm_grpc.tls import ClientTls

# In starting order; they stop in reverse, so that clients stop before the servers they call.
ENGINE_SERVICES = ("worker", "scheduler", "frontend")
SERVICES = (*ENGINE_SERVICES, "gateway", "dashboard")
MODULES = {
    "worker": "worker_svc",
    "scheduler": "scheduler_svc",
    "frontend": "frontend",
    "gateway": "deploy.gateway",
    "dashboard": "deploy.dashboard",
}
_ANY_HOST = {"0.0.0.0": "127.0.0.1", "::": "::1"}


@dataclass(frozen=True)
class Process:
    """A process of a stack. `index` counts the processes of its service over all engines;
    `address` is a URL if the process speaks HTTP."""

    service: str
    index: int
    address: str = "-"
    engine: int | None = None  # None: it belongs to no engine

    @property
    def name(self) -> str:
        return f"{self.service}-{self.index}"


@dataclass(frozen=True)
class Stack:
    """The facts of a running stack that commands need; stored in its directory as stack.json."""

    directory: Path
    host: str
    port: int
    services: tuple[str, ...]
    first_rank: int
    num_ranks: int  # of each engine, on this host
    frontends: int
    scheduler_address: str  # of engine 0; other engines have sockets in `directory`
    worker_addresses: tuple[str, ...]  # of all ranks of engine 0, on all hosts
    drain_timeout_s: float
    engines: int = 1
    master_ports: tuple[int, ...] = ()  # of all engines but the first, if they have several ranks
    model_path: str = ""  # the model's directory, if a process on this host reads it
    engine_models: tuple[str, ...] = ()  # of each engine, while `restart` replaces the model
    # For the launcher's own connections.
    public_tls: ClientTls | None = None
    internal_tls: ClientTls | None = None
    auth_tokens_file: str = ""
    model: str = ""  # the model's name, if frontends run on this host
    http_port: int = 0  # of the gateway; 0: there is none
    ui_port: int = 0  # of the dashboard; 0: there is none
    # Whether all processes have served at once. From then on, every process is restarted.
    was_up: bool = False

    @property
    def url(self) -> str:
        """The gateway's URL for a client on this host."""
        return gateway_url(self.host, self.http_port, secure=self.public_tls is not None)

    @property
    def dashboard_url(self) -> str:
        return f"http://127.0.0.1:{self.ui_port}"

    @property
    def address(self) -> str:
        """The public address that a client on this host dials."""
        return dialled_address(self.host, self.port)

    def processes(self) -> list[Process]:
        """Returns this host's processes in starting order."""
        engines = range(self.engines)
        ranks = range(self.first_rank, self.first_rank + self.engines * self.num_ranks)
        found = [
            *(Process("worker", i, self._worker_address(i), i // self.tp) for i in ranks),
            *(Process("scheduler", i, self.scheduler_address_of(i), i) for i in engines),
            *(Process("frontend", i, self.address) for i in range(self.frontends)),
            *([Process("gateway", 0, self.url)] if self.http_port else []),
            *([Process("dashboard", 0, self.dashboard_url)] if self.ui_port else []),
        ]
        return [each for each in found if each.service in self.services]

    def count(self, service: str) -> int:
        """The number of `service` processes on this host."""
        return sum(each.service == service for each in self.processes())

    @property
    def tp(self) -> int:
        return len(self.worker_addresses)

    def scheduler_address_of(self, engine: int) -> str:
        if not engine:
            return self.scheduler_address
        return f"unix:{self.directory}/scheduler-{engine}.sock"

    def worker_addresses_of(self, engine: int) -> tuple[str, ...]:
        first = engine * self.tp
        return tuple(map(self._worker_address, range(first, first + self.tp)))

    def _worker_address(self, index: int) -> str:
        if index < self.tp:
            return self.worker_addresses[index]
        return f"unix:{self.directory}/worker-{index}.sock"

    def tls(self, service: str) -> ClientTls | None:
        """The TLS for connecting to a `service` of this stack; None is plaintext."""
        return self.public_tls if service == "frontend" else self.internal_tls

    def log(self, name: str) -> Path:
        """The log of the process called `name`."""
        return self.directory / f"{name}.log"

    @property
    def metrics_directory(self) -> Path:
        """The directory in which each process names its address for Prometheus."""
        return self.directory / "metrics"

    @property
    def engines_file(self) -> Path:
        """The file with the schedulers' addresses that frontends are to use."""
        return self.directory / "engines"

    def model_of(self, engine: int | None) -> str:
        """The directory of an engine's model; None: of the model for all other processes."""
        if engine is None or engine >= len(self.engine_models):
            return self.model_path
        return self.engine_models[engine]

    def save(self) -> None:
        text = _STACK.dump_json(self, indent=1).decode()
        replace_file(self.directory / "stack.json", text)

    def reloaded(self) -> Stack:
        """Returns the stack as it is now; it may have been scaled."""
        try:
            return Stack.load(self.directory)
        except LaunchError:  # it is being stopped
            return self

    @classmethod
    def load(cls, directory: Path) -> Stack:
        """Loads the stack that was started in `directory`.

        Raises:
            LaunchError: no stack was.
        """
        try:
            return _STACK.validate_json((directory / "stack.json").read_bytes())
        except (OSError, ValueError) as error:
            raise LaunchError(f"no stack was started in {directory}") from error


_STACK = TypeAdapter(Stack)
RUN = Path(".run")


def run_directory(port: int) -> Path:
    """Returns the directory for the state of the stack on `port`. It is relative, because a Unix
    socket's path must stay under 108 bytes."""
    return RUN / str(port)


def make_directory(directory: Path) -> None:
    """Makes a stack's directory, open to this user only, because its sockets lead to the engine."""
    directory.mkdir(parents=True, exist_ok=True)
    directory.chmod(0o700)


def make_private(directory: Path) -> None:
    """Makes a directory, open to this user only, where other users could make one first.

    Raises:
        LaunchError: another user could have made it, or could change it.
    """
    with suppress(FileExistsError):
        directory.mkdir(mode=0o700)
    found = directory.lstat()
    if not stat.S_ISDIR(found.st_mode):
        raise LaunchError(f"{directory} is not a directory; remove it")
    if found.st_uid != os.geteuid():
        raise LaunchError(f"{directory} belongs to user {found.st_uid}; remove it")
    if found.st_mode & 0o077:
        raise LaunchError(f"{directory} is open to other users; remove it, or chmod 700 it")


def replace_file(path: Path, text: str) -> None:
    """Writes a file so that readers see either the old text or the new."""
    unfinished = path.with_name(f"{path.name}.new")
    unfinished.write_text(text, encoding="utf-8")
    unfinished.replace(path)


def dialled_address(host: str, port: int) -> str:
    """Returns the address at which a client on this host reaches a server on `host` and `port`."""
    host = host.strip("[]")
    return f"{bracket_host(_ANY_HOST.get(host, host))}:{port}"


def gateway_url(host: str, port: int, *, secure: bool) -> str:
    """Returns the URL at which a client on this host reaches the gateway on `host` and `port`."""
    return f"http{'s' if secure else ''}://{dialled_address(host, port)}"


def bracket_host(host: str) -> str:
    """`host` as written before a port: an IPv6 address in brackets."""
    host = host.strip("[]")
    return f"[{host}]" if ":" in host else host


def first_token(tokens_file: str) -> str | None:
    """Returns the token for the launcher's own requests; None if clients need no token."""
    tokens = read_clients(tokens_file) if tokens_file else {}
    return next(iter(tokens), None)
