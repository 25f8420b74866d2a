"""A stack: the processes that run on this host, where they listen and where they keep state."""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from pydantic import TypeAdapter

from deploy.errors import LaunchError
from frontend.callers.tenants import read_clients
from nano_vllm_grpc.tls import ClientTls
from worker_svc.user_cache import private_file, private_folder

# In starting order; they stop in reverse, so that clients stop before the servers they call.
ENGINE_SERVICES = ("worker", "scheduler", "frontend")
SERVICES = (*ENGINE_SERVICES, "dashboard")
MODULES = {
    "worker": "worker_svc",
    "scheduler": "scheduler_svc",
    "frontend": "frontend",
    "dashboard": "deploy.dashboard",
}
ANY_HOST = {"0.0.0.0": "127.0.0.1", "::": "::1"}


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
    # For the launcher's own connections, to frontends and to other services; None: plaintext.
    public_tls: ClientTls | None = None
    internal_tls: ClientTls | None = None
    auth_tokens_file: str = ""
    model: str = ""  # the model's name, if frontends run on this host
    http_port: int = 0  # of the frontends; 0: they do not serve HTTP
    ui_port: int = 0  # of the dashboard; 0: there is none
    # Whether all processes have served at once. From then on, every process is restarted.
    was_up: bool = False

    @property
    def url(self) -> str:
        """The URL of HTTP for a client on this host; empty if there is no HTTP."""
        return http_url(self.host, self.http_port, secure=self.public_tls is not None)

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
            *(
                Process("worker", i, self._worker_address(i), i // self.ranks_per_engine)
                for i in ranks
            ),
            *(Process("scheduler", i, self.scheduler_address_of(i), i) for i in engines),
            *(Process("frontend", i, self.address) for i in range(self.frontends)),
            *([Process("dashboard", 0, self.dashboard_url)] if self.ui_port else []),
        ]
        return [each for each in found if each.service in self.services]

    def count(self, service: str) -> int:
        """The number of `service` processes on this host."""
        return sum(each.service == service for each in self.processes())

    @property
    def ranks_per_engine(self) -> int:
        return len(self.worker_addresses)

    def scheduler_address_of(self, engine: int) -> str:
        if not engine:
            return self.scheduler_address
        return f"unix:{self.directory}/scheduler-{engine}.sock"

    def worker_addresses_of(self, engine: int) -> tuple[str, ...]:
        first = engine * self.ranks_per_engine
        return tuple(map(self._worker_address, range(first, first + self.ranks_per_engine)))

    def _worker_address(self, index: int) -> str:
        if index < self.ranks_per_engine:
            return self.worker_addresses[index]
        return f"unix:{self.directory}/worker-{index}.sock"

    def log(self, name: str) -> Path:
        """The log of the process called `name`."""
        return self.directory / f"{name}.log"

    @property
    def metrics_directory(self) -> Path:
        """The directory in which each process names its address for Prometheus."""
        return self.directory / "metrics"

    @property
    def responses_directory(self) -> Path:
        """The directory of the frontends' background responses."""
        return self.directory / "responses"

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
            LaunchError: no stack was, or other users may have written the file.
        """
        try:
            with open(open_file(directory / "stack.json"), "rb") as file:
                return _STACK.validate_json(file.read())
        except (FileNotFoundError, ValueError) as error:
            raise LaunchError(f"no stack was started in {directory}") from error


_STACK = TypeAdapter(Stack)
RUN = Path(".run")


def run_directory(port: int) -> Path:
    """Returns the directory for the state of the stack on `port`. It is relative, because a Unix
    socket's path must stay under 108 bytes."""
    return RUN / str(port)


def make_directory(directory: Path) -> None:
    """Makes a stack's directory, open to this user only, because its sockets lead to the engine.

    Raises:
        LaunchError: as `own_directory`.
    """
    with _explained(directory):
        directory.parent.mkdir(parents=True, exist_ok=True)
    with own_directory(directory, create=True) as folder:
        os.fchmod(folder, 0o700)


@contextmanager
def own_directory(directory: Path, *, create: bool = False) -> Iterator[int]:
    """Opens a stack's directory -> a descriptor.

    Raises:
        FileNotFoundError: there is none.
        LaunchError: it is a link, or another user owns it, may write to it or could replace it.
    """
    with _explained(directory):
        _check_above(directory.parent)
        with private_folder(directory, create=create) as folder:
            _check_owner(os.fstat(folder), directory, os.geteuid())
            yield folder


def check_directory(directory: Path) -> None:
    """
    Raises:
        LaunchError: as `own_directory`.
    """
    with suppress(FileNotFoundError), own_directory(directory):
        pass


def open_file(path: Path, flags: int = os.O_RDONLY) -> int:
    """Opens a file in a stack's directory -> a descriptor. With O_CREAT, a new file is open to this
    user only.

    Raises:
        FileNotFoundError: there is none.
        LaunchError: as `own_directory`, also about the file, or it cannot be opened.
    """
    with own_directory(path.parent) as folder, _explained(path):
        # Earlier versions left files that a group may write to.
        closed = not os.fstat(folder).st_mode & (stat.S_IRWXG | stat.S_IRWXO)
        with private_file(folder, path.name, flags, any_mode=closed) as file:
            _check_owner(os.fstat(file), path, os.geteuid())
            return os.dup(file)


def replace_file(path: Path, text: str) -> None:
    """Writes a file in a stack's directory, open to this user only, so that readers see either the
    old text or the new.

    Raises:
        LaunchError: as `open_file`; a full disk is a reason.
    """
    try:
        with own_directory(path.parent) as folder, _explained(path):
            unfinished = f"{path.name}.new"
            with suppress(FileNotFoundError):
                os.unlink(unfinished, dir_fd=folder)
            flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL
            with open(os.open(unfinished, flags, 0o600, dir_fd=folder), "wb") as file:
                file.write(text.encode())
            os.replace(unfinished, path.name, src_dir_fd=folder, dst_dir_fd=folder)
    except FileNotFoundError as error:
        raise LaunchError(f"{path} cannot be written: its directory is gone") from error


def _check_above(folder: Path) -> None:
    """Checks who could replace the directories in a folder: this user, root, and the owner of the
    folder above, who could replace the whole folder."""
    owners = 0, os.geteuid(), folder.absolute().parent.stat().st_uid
    for found in (folder.lstat(), folder.stat()):
        _check_owner(found, folder, *owners)
    if found.st_mode & stat.S_IWOTH and not found.st_mode & stat.S_ISVTX:
        raise LaunchError(f"other users may write to {folder}; chmod o-w allows its use")


def _check_owner(found: os.stat_result, path: Path, *owners: int) -> None:
    if found.st_uid not in owners:
        raise LaunchError(f"{path} belongs to user {found.st_uid}")


@contextmanager
def _explained(path: Path) -> Iterator[None]:
    """Turns errors of the system about a file, but for a missing one, into errors for the user."""
    try:
        yield
    except FileNotFoundError:
        raise
    except OSError as error:
        wrong = {errno.ENOTDIR: "is not a directory", errno.ELOOP: "is a link"}
        if error.errno in wrong:
            raise LaunchError(f"{path} {wrong[error.errno]}; remove it") from error
        reason = f"{path}: {error.strerror}" if error.strerror else str(error)
        raise LaunchError(reason) from error


def dialled_address(host: str, port: int) -> str:
    """Returns the address at which a client on this host reaches a server on `host` and `port`."""
    host = host.strip("[]")
    return f"{bracket_host(ANY_HOST.get(host, host))}:{port}"


def http_url(host: str, port: int, *, secure: bool) -> str:
    """Returns the URL at which a client on this host reaches HTTP on `host` and `port`; empty if
    the port is 0."""
    return f"http{'s' if secure else ''}://{dialled_address(host, port)}" if port else ""


def bracket_host(host: str) -> str:
    """`host` as written before a port: an IPv6 address in brackets."""
    host = host.strip("[]")
    return f"[{host}]" if ":" in host else host


def first_token(tokens_file: str) -> str | None:
    """Returns the token for the launcher's own requests; None if clients need no token."""
    tokens = read_clients(tokens_file) if tokens_file else {}
    return next(iter(tokens), None)
