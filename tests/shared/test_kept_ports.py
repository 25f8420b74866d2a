"""A successor gets the ports of its predecessor, and no descriptor besides."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path

import psutil
import pytest

from deploy.ports import free_port, is_free
from shared.process.parent_process import RESTART
from shared.process.ports import held_ports
from tests.shared.test_process import LASTS, RunningParent, running_parent

BODY = f"ready(); say_pid(); {LASTS}"
# Each start but the first says how many addresses another user could take before the program holds
# any. Tests that are not run as root try as this user.
PRELUDE = """
import json, socket
from shared.config import ServiceSettings
from shared.process.kept import listening_socket
from shared.process.ports import bound_socket, held_ports
from shared.telemetry.metrics import ServiceMetrics
from shared.telemetry.metrics_endpoint import open_endpoint

asked = json.loads(starts.with_name("asked").read_text())

def taken():
    socket.getaddrinfo("localhost", 0)  # imports what another user may not be able to read
    kinds = [socket.SO_REUSEADDR]
    if os.getuid() == 0:
        os.setuid(65534)
        kinds.append(socket.SO_REUSEPORT)
    for kind in kinds:
        for host, port in asked["tried"]:
            try:
                bound_socket(host, port, kind)
                yield host
            except OSError:
                pass

if starts.exists():
    if other := os.fork():
        os.waitpid(other, 0)  # until then, it holds the ports, too
    else:
        os.write(1, f"taken {len([*taken()])}\\n".encode())
        os._exit(0)
class NoMetrics(ServiceMetrics):
    def families(self):
        return iter(())

held = held_ports(asked["alone"], asked["together"])
held.__enter__()
settings = ServiceSettings(hang_timeout_s=60, metrics_address=asked["metrics"])
endpoint = open_endpoint(settings, "some", 0, NoMetrics(), listening_socket())
"""


def ask(
    folder: Path,
    alone: Sequence[str] = (),
    together: Sequence[str] = (),
    metrics: str = "",
    tried: Sequence[tuple[str, int]] = (),
) -> None:
    """Says what the program holds from its next start on.

    Args:
        metrics: the address of an endpoint for metrics, which listens; empty: there is none.
        tried: what another user tries to take.
    """
    values = {"alone": alone, "together": together, "metrics": metrics, "tried": tried}
    (folder / "asked").write_text(json.dumps(values))


def sockets(parent: psutil.Process) -> list[str]:
    """The TCP sockets of a process. No other program would inherit them."""
    local = {line.split()[6] for line in Path("/proc/net/unix").read_text().splitlines()[1:]}
    found = []
    for each in Path(f"/proc/{parent.pid}/fd").iterdir():
        try:
            kind, _, inode = os.readlink(each).rstrip("]").partition(":[")
        except FileNotFoundError:  # closed meanwhile
            continue
        if kind == "socket" and inode not in local:
            flags = Path(f"/proc/{parent.pid}/fdinfo/{each.name}").read_text().split()[3]
            assert int(flags, 8) & os.O_CLOEXEC
            found.append(inode)
    return sorted(found)


def start_again(parent: RunningParent) -> int:
    """The number of addresses that another user could take meanwhile."""
    parent.restart()
    return parent.next_pid("taken")


@pytest.mark.parametrize(
    ("host", "tried"),
    [
        ("127.0.0.1", ["127.0.0.1", "0.0.0.0"]),
        ("localhost", ["127.0.0.1", "0.0.0.0"]),
        ("[::1]", ["::1", "::"]),
        ("0.0.0.0", ["127.0.0.1", "0.0.0.0", "::1", "::"]),
        ("[::]", ["127.0.0.1", "0.0.0.0", "::1", "::"]),
    ],
)
def test_no_other_user_can_take_a_port_while_the_program_starts_again(
    tmp_path: Path, host: str, tried: list[str]
) -> None:
    alone, together, metrics = free_port(), free_port(), free_port()
    names = [(each, port) for each in tried for port in (alone, together)]
    names += [("127.0.0.1", metrics), ("0.0.0.0", metrics)]
    ask(tmp_path, [f"{host}:{alone}"], [f"{host}:{together}"], f"127.0.0.1:{metrics}", names)
    with running_parent(tmp_path / "starts", BODY, PRELUDE) as parent:
        parent.next_fork()
        before = sockets(parent.process)
        for _ in range(3):
            assert start_again(parent) == 0
            assert sockets(parent.process) == before


def test_a_port_that_a_program_no_longer_asks_for_is_free(tmp_path: Path) -> None:
    first, second, third, fourth = (free_port() for _ in range(4))
    ask(tmp_path, [f"127.0.0.1:{first}"], metrics=f"127.0.0.1:{second}")
    with running_parent(tmp_path / "starts", BODY, PRELUDE) as parent:
        parent.next_fork()
        ask(tmp_path, together=[f"127.0.0.1:{third}"], metrics=f"127.0.0.1:{fourth}")
        start_again(parent)
        assert [is_free("127.0.0.1", each) for each in (first, second, third, fourth)] == [
            *(True, True, False, False)
        ]
        ask(tmp_path)
        start_again(parent)
        assert all(is_free("127.0.0.1", each) for each in (third, fourth))
        with held_ports([f"127.0.0.1:{third}"]):
            ask(tmp_path, [f"127.0.0.1:{third}"])  # of another process
            parent.process.send_signal(RESTART)
            parent.wait_refused(1)
