"""The sockets of a stack of two ranks, with and without TLS, are those that docs/deploy/security.md
lists, and each answers only its intended callers."""

from __future__ import annotations

import itertools
import re
import socket
import stat
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import grpc
import psutil
import pytest

from deploy.health import SERVING, check_health
from deploy.native.processes import running_processes, stack_members
from deploy.native.restart import restart
from deploy.ports import free_port
from nano_vllm_grpc.channels import open_blocking_channel
from nano_vllm_grpc.tls import ClientTls
from shared.pb.scheduler_pb2 import GetLoadRequest
from shared.pb.scheduler_pb2_grpc import SchedulerServiceStub
from shared.pb.worker_pb2 import ConfigureRequest, GetInfoRequest, ProfileRequest, StepRequest
from shared.pb.worker_pb2_grpc import WorkerServiceStub
from tests.certificates import Authority
from tests.stack import ROOT, RealStack, running_stack
from tests.taker import refused
from tests.waiting import wait_for

TIMEOUT_S = 120
# The processes whose ports clients know.
CLIENTS_PROCESSES = [("frontend", 0), ("frontend", 1), ("dashboard", 0)]
ROLE = "URI:urn:nano-vllm-grpc:role:"


@dataclass(frozen=True)
class Open:
    """A stack and the settings that decide where it listens."""

    stack: RealStack
    master_port: int
    inner: Authority | None


@pytest.fixture(scope="module", params=["plaintext", "tls"])
def opened(request: pytest.FixtureRequest, certificates: Path) -> Iterator[Open]:
    settings: dict[str, object] = {"tp": 2, "frontends": 2, "ui_port": free_port()}
    settings["http_port"] = "auto"
    inner = None
    if request.param == "tls":
        public, inner = Authority(certificates, "public"), Authority(certificates, "inner")
        shown = public.issue("server", "IP:127.0.0.1")
        roles = [f"{ROLE}{service}" for service in ("frontend", "scheduler", "worker")]
        service = inner.issue("service", "DNS:localhost", *roles)
        settings |= {"tls_cert": shown.cert, "tls_key": shown.key}
        settings |= {"internal_tls_cert": service.cert, "internal_tls_key": service.key}
        settings |= {"internal_tls_ca": inner.ca, "internal_tls_roles": "required"}
    port = free_port()
    with running_stack({"NANO_MASTER_PORT": str(port)}, **settings) as stack:
        stack.wait_serving()
        yield Open(stack, port, inner)


def listed(opened: Open) -> set[tuple[str, str]]:
    """Pairs of a process and a pattern of the sockets that it listens on, from the table."""
    text = (ROOT / "docs" / "deploy" / "security.md").read_text()
    section = text.partition("\n## What listens\n")[2].partition("\n## ")[0]
    rows = re.findall(r"^\| (\w+) \| (TCP|Unix) `([^`]+)`[^|]*\| ([^|]*)\|", section, re.M)
    assert len(rows) == section.count("\n|") - 2, "a row is not as expected"
    values = {
        ".run/PORT": re.escape(str(opened.stack.directory)),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(opened.master_port),
        "UI_PORT": str(opened.stack.stack.ui_port),
        "HTTP_PORT": str(opened.stack.stack.http_port),
        "HOST": "127.0.0.1",
        "PORT": str(opened.stack.stack.port),
        "RANK": "[0-9]",
        "*": "[0-9]+",
    }
    names = re.compile(f"({'|'.join(map(re.escape, values))})")
    found = set()
    for name, kind, address, when in rows:
        pattern = "".join(values.get(each) or re.escape(each) for each in names.split(address))
        owners = [each.name for each in opened.stack.processes() if each.service == name]
        if "rank 0" in when:
            owners = owners[:1]
        found |= {(owner, f"{kind} {pattern}") for owner in owners or [name]}
    return found


def listening(opened: Open) -> set[tuple[str, str]]:
    """Pairs of a process and an address that it listens on: TCP, UDP and Unix sockets, those of its
    children included."""
    return {
        (_program(opened, process), address)
        for process in stack_members(opened.stack.directory)
        for address in (*_internet(process), *_unix(process))
    }


def _program(opened: Open, process: psutil.Process) -> str:
    """The name of the process that the supervisor started, by itself or through its children."""
    names = {each.pid: each.name for each in running_processes(opened.stack.directory)}
    tops = {}
    for pid, name in names.items():
        lineage = [psutil.Process(pid), *psutil.Process(pid).parents()]
        top = next(each for each, up in itertools.pairwise(lineage) if _rules(up))
        tops[top.pid] = name
    for each in (process, *process.parents()):
        if each.pid in tops:
            return tops[each.pid]
    return "supervisor" if _rules(process) else str(process)


def _rules(process: psutil.Process) -> bool:
    return "deploy.native.supervisor" in process.cmdline()


def _internet(process: psutil.Process) -> Iterator[str]:
    for each in process.net_connections("inet"):
        tcp = each.type == socket.SOCK_STREAM
        if (each.status == psutil.CONN_LISTEN) if tcp else not each.raddr:
            kind = "TCP" if tcp else "UDP"
            yield f"{kind} {each.laddr.ip.removeprefix('::ffff:')}:{each.laddr.port}"


def _unix(process: psutil.Process) -> Iterator[str]:
    """Sockets that accept connections (__SO_ACCEPTCON) or, as datagram sockets, have an address."""
    found = {}
    for line in Path("/proc/net/unix").read_text().splitlines()[1:]:
        fields = line.split(maxsplit=7)
        if int(fields[3], 16) & 0x10000 or (fields[4] == "0002" and len(fields) > 7):
            found[f"socket:[{fields[6]}]"] = fields[7] if len(fields) > 7 else "(no address)"
    for descriptor in Path(f"/proc/{process.pid}/fd").iterdir():
        try:
            target = str(descriptor.readlink())
        except OSError:  # closed meanwhile
            continue
        if target in found:
            yield f"Unix {found[target]}"


def test_nothing_listens_but_what_is_documented(opened: Open) -> None:
    expected, actual = listed(opened), listening(opened)
    unlisted = {
        (name, address)
        for name, address in actual
        if not any(name == owner and re.fullmatch(each, address) for owner, each in expected)
    }
    assert not unlisted, f"not in docs/deploy/security.md: {unlisted}"
    missing = {
        (owner, pattern)
        for owner, pattern in expected
        if not any(name == owner and re.fullmatch(pattern, each) for name, each in actual)
    }
    assert not missing, f"in docs/deploy/security.md, but not there: {missing}"


def test_other_users_reach_no_socket_nor_its_directory(opened: Open) -> None:
    directory = opened.stack.directory
    assert stat.S_IMODE(directory.stat().st_mode) == 0o700
    sockets = [each for each in directory.iterdir() if each.is_socket()]
    assert len(sockets) == 3
    assert not any(each.stat().st_mode & 0o077 for each in sockets)


PLAINTEXT = pytest.mark.parametrize("opened", ["plaintext"], indirect=True)


def listening_ports(stack: RealStack) -> set[int]:
    """The TCP ports on which frontends and dashboard listen."""
    pids = [stack.pid(*name) for name in CLIENTS_PROCESSES]
    ports = {
        connection.laddr.port
        for pid in pids
        for connection in psutil.Process(pid).net_connections("inet")
        if connection.status == psutil.CONN_LISTEN
    }
    assert {stack.stack.port, stack.stack.http_port, stack.stack.ui_port} < ports
    assert len(ports) == 5  # each frontend also has its metrics
    return ports


@PLAINTEXT
def test_no_other_user_can_take_the_port_of_a_process_that_died(opened: Open) -> None:
    stack, ports = opened.stack, listening_ports(opened.stack)
    pids = [stack.pid(*name) for name in CLIENTS_PROCESSES]
    parents = [psutil.Process(pid).parent() for pid in pids]
    with ExitStack() as resumed:
        for parent in filter(None, parents):
            parent.suspend()
            resumed.callback(parent.resume)
        for pid in pids:
            fork = psutil.Process(pid)
            fork.kill()
            wait_for(lambda fork=fork: fork.status() == psutil.STATUS_ZOMBIE, "its end")
        with refused(*ports):  # has tried each
            pass
    stack.wait_serving()


@PLAINTEXT
def test_no_other_user_can_take_a_port_during_a_restart(opened: Open) -> None:
    stack, ports = opened.stack, listening_ports(opened.stack)
    with refused(*ports):
        for service in ("frontend", "dashboard"):
            restart(stack.directory, service)
    assert listening_ports(stack) == ports


DENIED, STALE = grpc.StatusCode.PERMISSION_DENIED, grpc.StatusCode.FAILED_PRECONDITION
READS = {"GetLoad": None, "Profile": grpc.StatusCode.INVALID_ARGUMENT}


@pytest.mark.parametrize("opened", ["tls"], indirect=True)
@pytest.mark.parametrize(
    ("role", "expected"),
    [
        ("frontend", READS | {"Connect": None}),
        ("scheduler", READS | {"GetInfo": None, "Configure": STALE, "Execute": STALE}),
        ("worker", READS),
        ("", {}),
    ],
)
def test_a_certificate_opens_only_what_its_role_is_for(
    opened: Open, role: str, expected: dict[str, grpc.StatusCode | None]
) -> None:
    assert opened.inner
    names = [f"{ROLE}{role}"] if role else []
    files = opened.inner.issue(f"one-{role}", "DNS:elsewhere", *names)
    tls = ClientTls(opened.inner.ca, files.cert, files.key)
    stack = opened.stack.stack
    scheduler, worker = stack.scheduler_address, stack.worker_addresses[0]
    assert (
        check_health(scheduler, TIMEOUT_S, tls) == check_health(worker, TIMEOUT_S, tls) == SERVING
    )
    with (
        open_blocking_channel(scheduler, tls, ()) as to_scheduler,
        open_blocking_channel(worker, tls, ()) as to_worker,
    ):
        engine, rank = SchedulerServiceStub(to_scheduler), WorkerServiceStub(to_worker)
        stale = iter([StepRequest(epoch=1 << 40)])
        answers = {
            "Connect": status(lambda: next(engine.Connect(iter(()), timeout=TIMEOUT_S))),
            "GetLoad": status(lambda: engine.GetLoad(GetLoadRequest(), timeout=TIMEOUT_S)),
            "GetInfo": status(lambda: rank.GetInfo(GetInfoRequest(), timeout=TIMEOUT_S)),
            "Configure": status(lambda: rank.Configure(configure(), timeout=TIMEOUT_S)),
            "Profile": status(lambda: next(rank.Profile(ProfileRequest(), timeout=TIMEOUT_S))),
            "Execute": status(lambda: next(rank.Execute(stale, timeout=TIMEOUT_S))),
        }
    assert answers == dict.fromkeys(answers, DENIED) | expected


def configure() -> ConfigureRequest:
    """A request that a worker in an epoch refuses as stale."""
    return ConfigureRequest(epoch=1, num_blocks=1, max_num_seqs=1, max_num_batched_tokens=1)


def status(call: Callable[[], object]) -> grpc.StatusCode | None:
    """The error that a call ends with, if it does."""
    try:
        call()
    except grpc.RpcError as error:
        return error.code()
    return None
