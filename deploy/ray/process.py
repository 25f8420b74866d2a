"""The Ray actor that runs a process of the stack on its node, and reports on the process.

An actor only starts a service's command and supervises it. The services know nothing of Ray, and
their messages do not pass through it.
"""

from __future__ import annotations

import os
import sys
import tempfile
import threading
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import ray
import structlog

from deploy.certificates import check_certificates
from deploy.child import Child, rotate
from deploy.errors import LaunchError
from deploy.first_tokens import completion
from deploy.health import UNREACHABLE, check_health, frontend_health
from deploy.logs import failure_reason
from deploy.native.status import ProcessStatus, listens
from deploy.plan import Environment, public_tls
from deploy.ports import free_port
from deploy.ray.actors import actor_names, ask
from deploy.ray.layout import Endpoint, RayStack
from deploy.stack import (
    MODULES,
    Process,
    bracket_host,
    first_token,
    http_url,
    make_directory,
    replace_file,
)
from shared.config import PREFIX
from shared.process.fork import CANNOT_START
from shared.process.parent_state import read_parent_state

log = structlog.get_logger(__name__)

CALLS = 8  # the maximum that an actor answers at a time
_POLL_S = 0.5
_PEERS_S = 2.0
_KILL_AFTER_S = 5.0  # beyond a service's own grace period
_LOG_PIECE = 1 << 16


class ProcessActor:
    """Keeps one process of the stack running while the actor runs.

    Ray starts another actor, on this node or another, when this one dies or its node is lost. The
    process never outlives its actor.
    """

    def __init__(self, stack: RayStack, process: Process) -> None:
        with _dying():
            self._stack, self._settings = stack, stack.settings
            self._node = node = ray.util.get_node_ip_address()
            meeting = f"{bracket_host(node)}:{free_port(node)}" if stack.meets(process) else ""
            address = stack.address(process, node, free_port(node))
            self._own = Endpoint(address, meeting)
            self._process = replace(process, address=address)
            self._peers: dict[str, Endpoint] = {}  # by name; replaced, never changed
            self._listed: dict[str, Endpoint] | None = None  # in the file `_schedulers`
            self._tls = self._settings.dialer.tls  # for health checks of the process
            self._retired = False
            self._problem = ""
            self._stopping = threading.Event()
            directory = _directory(self._settings.port)
            self._schedulers = directory / f"{process.name}.schedulers"
            if process.service == "frontend" and stack.http_port:
                make_directory(directory / "responses")
            self._child = Child(process.name, directory / f"{process.name}.log")
            module, arguments = MODULES[process.service], stack.arguments(process)
            self._command = [sys.executable, "-P", "-m", module, *arguments]
            self._environment: Environment = {}  # of the running process
            self._thread = threading.Thread(target=self._run, daemon=True)
            self._thread.start()
            # Ray may take long to answer, and the process is to be kept meanwhile.
            threading.Thread(target=self._repeat, args=[self._ask_peers], daemon=True).start()

    def stack(self) -> RayStack:
        return self._stack

    def endpoint(self) -> Endpoint:
        return Endpoint("") if self._retired else self._own

    def peers(self) -> dict[str, Endpoint]:
        """Returns the endpoints of other processes that the process knows."""
        return self._peers

    def retire(self) -> None:
        """Hides the endpoint of this process, which continues to run."""
        self._retired = True

    def stop(self) -> None:
        """Stops the process in order, and returns once it has ended."""
        self._stopping.set()
        self._thread.join()

    def status(self) -> ProcessStatus:
        pid = self._child.pid
        parent = read_parent_state(pid) if pid else None
        serving = (parent.pid or None) if parent else pid
        state, exit_status, trouble = "RUNNING", None, parent.trouble if parent else ""
        if not pid:
            state, exit_status, trouble = self._idle()
        health = self._health(serving) if serving else UNREACHABLE
        return ProcessStatus(
            self._process, serving, state, health, exit_status, trouble, self._node
        )

    def failure(self) -> str:
        """Returns the reason that the process gave for its end."""
        return self._problem or self._child.failure or failure_reason(self._child.log)

    def read_log(self, offset: int) -> tuple[str, int]:
        """Returns the lines of the log from `offset` on, or its last -`offset` bytes, and the
        offset of the next lines."""
        try:
            with self._child.log.open("rb") as file:
                size = file.seek(0, os.SEEK_END)
                start = max(size + offset, 0) if offset < 0 else offset
                file.seek(start if start <= size else 0)  # the log was emptied
                start = file.tell()
                lines = file.read(_LOG_PIECE)
        except FileNotFoundError:
            return "", 0
        lines = lines[: lines.rfind(b"\n") + 1]
        return lines.decode(errors="replace"), start + len(lines)

    def complete(self) -> str:
        """Returns a first completion, requested from this frontend on its own node."""
        token = first_token(self._settings.auth_tokens_file)
        return "".join(completion(self._own.address, self._tls, token))

    def _idle(self) -> tuple[str, int | None, str]:
        """Returns state, exit status and trouble of a process that does not run."""
        if self._problem:
            return "EXITED", CANNOT_START, f"starts again soon: {self._problem}"
        if not self._child.starts:
            awaited = ", ".join(self._stack.peers(self._process)) or "its turn"
            return "WAITING", None, f"for {awaited}"
        return "EXITED", self._child.exit_status, f"starts again soon: {self.failure()}"

    def _health(self, pid: int) -> str:
        if self._process.service != "frontend":
            return check_health(self._own.address, tls=self._tls)
        host, http_port = self._own.address.rpartition(":")[0], self._stack.http_port
        # Frontends of a node share their addresses: if one does not listen yet, another one would
        # answer.
        if not all(listens(pid, port) for port in (self._settings.port, http_port) if port):
            return UNREACHABLE
        secure = self._settings.server_tls is not None
        url = http_url(host, http_port, secure=secure)
        return frontend_health(self._own.address, url, self._tls)

    def _run(self) -> None:
        self._repeat(self._keep)
        self._child.stop(self._settings.drain_timeout_s + _KILL_AFTER_S)

    def _repeat(self, action: Callable[[], None]) -> None:
        with _dying():
            while not self._stopping.wait(_POLL_S):
                action()

    def _ask_peers(self) -> None:
        """Asks the processes that this one calls for their endpoints. A silent one keeps its
        endpoint."""
        try:
            names = self._stack.peers(self._process)
            if self._process.service == "frontend":
                names = [name for name in actor_names() if name.startswith("scheduler-")]
            found = ask(names, "endpoint", timeout_s=_PEERS_S)
        except Exception as error:  # Ray raises many kinds; known endpoints stay
            log.warning("cannot ask Ray for endpoints; keeping the known ones", reason=str(error))
            return
        known = {name: at for name, at in self._peers.items() if name in names} | found
        self._peers = {name: endpoint for name, endpoint in known.items() if endpoint.address}

    def _keep(self) -> None:
        peers = self._peers
        settings = self._stack.environment_of(self._process, self._own, peers, self._schedulers)
        if settings is None:
            return
        if self._process.service == "frontend" and peers != self._listed:
            addresses = sorted(each.address for each in peers.values())
            replace_file(self._schedulers, "".join(f"{address}\n" for address in addresses))
            self._listed = peers
        if not self._child.pid:
            self._problem = self._check_certificates()
        if self._problem:
            return
        rotate(self._child.log)
        self._child.poll()
        environment = _node_environment() | settings
        if self._child.pid and environment != self._environment:
            self._child.stop(0.0)  # it calls unused addresses, so no work is lost
            self._child.due = 0.0
        if self._child.may_start():
            self._environment = environment
            self._child.start(self._command, environment)

    def _check_certificates(self) -> str:
        """Returns why other processes would not trust this node's certificates, or ""."""
        server = self._settings.internal_tls
        try:
            if self._process.service == "frontend":
                self._tls = public_tls(self._settings)
            elif server and self._tls:
                check_certificates(server, self._tls, [self._own.address])
        except LaunchError as error:
            return str(error)
        return ""


@contextmanager
def _dying() -> Iterator[None]:
    """Ends the actor, and its child, on an exception, so that Ray starts another actor. Ray does
    not replace an actor whose constructor raises."""
    try:
        yield
    except BaseException:
        traceback.print_exc()
        os._exit(1)


def _directory(port: int) -> Path:
    """Returns the directory, open to this user only, of the stack on `port` on this node.

    Raises:
        LaunchError: another user could have made or changed it.
    """
    base = Path(tempfile.gettempdir(), f"nano-vllm-grpc-{os.geteuid()}")
    make_directory(base)
    # Ray's nodes may share a host.
    directory = base / f"{port}-{ray.get_runtime_context().get_node_id()[:12]}"
    make_directory(directory)
    return directory


def _node_environment() -> Environment:
    """Returns this node's environment without the launcher's settings, and without Ray's number of
    threads, which is that of the reserved cores, rounded down."""
    return {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(PREFIX) and name != "OMP_NUM_THREADS"
    }
