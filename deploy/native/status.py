"""The state of a stack's processes, according to its supervisor and to the processes themselves."""

from __future__ import annotations

import json
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import psutil

from deploy.health import SERVING, UNREACHABLE, check_health, frontend_health, http_health
from deploy.logs import failure_reason
from deploy.native.processes import RunningProcess, find_supervisor, running_processes
from deploy.stack import Process, Stack
from shared.process.fork import CANNOT_START


@dataclass(frozen=True)
class ProcessStatus:
    """A process, its state according to the supervisor, and its health."""

    process: Process
    pid: int | None
    state: str
    health: str
    exit_status: int | None
    trouble: str = ""  # what keeps the process from running, if that is known
    node: str = ""  # IP address of its node on a Ray cluster

    @property
    def summary(self) -> str:
        """`RUNNING/SERVING`, `EXITED`, ..."""
        has_health = self.health and self.state == "RUNNING"
        return f"{self.state}/{self.health}" if has_health else self.state

    @property
    def description(self) -> str:
        """The summary, and what keeps the process from running."""
        return f"{self.summary} {self.trouble}".rstrip()


def stack_status(stack: Stack) -> list[ProcessStatus]:
    """Asks the supervisor and every process.

    Raises:
        SupervisorGoneError: the stack is not running.
    """
    found = {each.name: each for each in running_processes(stack.directory)}
    pairs = [
        (process, found.get(process.name) or RunningProcess(process.name))
        for process in stack.processes()
    ]
    with ThreadPoolExecutor(max_workers=8) as pool:
        return list(pool.map(lambda pair: _status(stack, *pair), pairs))


def supervisor_status(stack: Stack) -> ProcessStatus:
    """The state of the supervisor: STARTING, RUNNING, SILENT if it is stopped or hangs, or GONE."""
    found = find_supervisor(stack.directory)
    state = found.state if found else "GONE"
    works = state in ("RUNNING", "STARTING")
    trouble = "" if works else "make up starts one, which restarts parent processes that end"
    process = Process("supervisor", 0, "-")
    return ProcessStatus(process, found.pid if found else None, state, "", None, trouble)


def _status(stack: Stack, process: Process, found: RunningProcess) -> ProcessStatus:
    health = _health(stack, process, found.pid) if found.pid else UNREACHABLE
    status = found.exit_status
    trouble = found.trouble
    if status == CANNOT_START and health != SERVING and not trouble:
        when = "is starting again" if found.state == "RUNNING" else "starts again soon"
        trouble = f"{when}: {failure_reason(stack.log(process.name))}"
    return ProcessStatus(process, found.pid, found.state, health, status, trouble)


def _health(stack: Stack, process: Process, pid: int) -> str:
    if process.service == "dashboard":
        return http_health(process.address)
    if process.service != "frontend":
        return check_health(process.address, tls=stack.internal_tls)
    # Frontends share their addresses: if one does not listen yet, another one would answer.
    ports = filter(None, (stack.port, stack.http_port) if stack.frontends > 1 else ())
    if not all(listens(pid, port) for port in ports):
        return UNREACHABLE
    return frontend_health(process.address, stack.url, stack.public_tls)


def listens(pid: int, port: int) -> bool:
    """Returns whether the process accepts TCP connections on this port."""
    try:
        connections = psutil.Process(pid).net_connections(kind="tcp")
    except psutil.Error:
        return False
    return any(c.status == psutil.CONN_LISTEN and c.laddr.port == port for c in connections)


def format_status(statuses: Iterable[ProcessStatus]) -> str:
    """Returns a table: name, index, pid, address, state, and engine and node if there are
    several."""
    columns = ["NAME", "INDEX", "PID", "ADDRESS", "STATE", "ENGINE", "NODE"]
    statuses = list(statuses)
    rows = [columns]
    for status in statuses:
        process = status.process
        row = [process.service, str(process.index), _or_dash(status.pid), process.address]
        rows.append([*row, status.description, _or_dash(process.engine), status.node])
    hidden = {"ENGINE"} if not any(status.process.engine for status in statuses) else set()
    hidden |= {"NODE"} if not any(status.node for status in statuses) else set()
    shown = [each for each in zip(*rows, strict=True) if each[0] not in hidden]
    widths = [max(map(len, column)) for column in shown]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in zip(*shown, strict=True)
    )


def status_json(statuses: Iterable[ProcessStatus]) -> str:
    """Returns a JSON list of an object per process."""
    found = [
        {
            "service": status.process.service,
            "index": status.process.index,
            "engine": status.process.engine,
            "pid": status.pid,
            "address": status.process.address,
            "state": status.state,
            "health": status.health,
            "trouble": status.trouble,
            **({"node": status.node} if status.node else {}),
        }
        for status in statuses
    ]
    return json.dumps(found, indent=2)


def _or_dash(number: int | None) -> str:
    return "-" if number is None else str(number)
