"""A Ray cluster whose nodes are network namespaces, and a stack on it."""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from tests.certificates import Authority
from tests.faults.network import Hosts
from tests.others import ray_packages
from tests.stack import DEMO_MODEL, Hold
from tests.waiting import WAIT_S, wait_for

PORT = 50051
_GCS_PORT = 6379
_HEAD = "head"
# So that a node that says nothing is given up after three seconds, not after a minute.
_HEALTH_CHECKS = {
    "RAY_health_check_initial_delay_ms": "1000",
    "RAY_health_check_period_ms": "1000",
    "RAY_health_check_timeout_ms": "1000",
    "RAY_health_check_failure_threshold": "3",
}


@dataclass(frozen=True)
class Line:
    """A line of `ps`."""

    pid: str
    address: str
    state: str
    node: str


class RayCluster:
    """Nodes by name, the first of which is the head and can be reached from here."""

    def __init__(self, hosts: Hosts, names: list[str], folder: Path) -> None:
        self._hosts, self._names, self._folder = hosts, names, folder
        self.hold = Hold()
        self._environment = {
            **{name: value for name, value in os.environ.items() if not name.startswith("NANO_")},
            **_HEALTH_CHECKS,
            **self.hold.environment,
            "PYTHONPATH": f"{self.hold.environment['PYTHONPATH']}:{ray_packages()}",
            "RAY_ADDRESS": f"{hosts.address(_HEAD)}:{_GCS_PORT}",
            "TMPDIR": str(folder),
            "RES_OPTIONS": "timeout:1 attempts:1",  # torch asks for names of hosts that have none
        }

    @property
    def address(self) -> str:
        """Where the head's frontend serves."""
        return f"{self._hosts.public_address}:{PORT}"

    def start_node(self, name: str, cpus: int) -> None:
        first = name == _HEAD
        role = ["--head", f"--port={_GCS_PORT}", "--include-dashboard=false"]
        role += [f"--temp-dir={self._folder}/ray"]
        joins = [f"--address={self._hosts.address(_HEAD)}:{_GCS_PORT}"]
        limits = [f"--num-cpus={cpus}", "--object-store-memory=80000000", "--disable-usage-stats"]
        address = f"--node-ip-address={self._hosts.address(name)}"
        self._run(
            name, "ray.scripts.scripts", "start", *(role if first else joins), address, *limits
        )

    def cli(self, *arguments: object, **environment: str) -> str:
        """The output of `nano-vllm-grpc`, run on the head."""
        runtime = ("--runtime", "ray", "--port", PORT)
        return self._run(_HEAD, "cli", *arguments, *runtime, environment=environment)

    def ps(self) -> dict[str, Line]:
        """The processes by name, such as worker-1."""
        header, *rows = (line.split() for line in self.cli("ps").splitlines())
        lines = {}
        for row in rows:
            fields = dict(zip(header, row, strict=False))  # a state may have words of its own
            line = Line(fields["PID"], fields["ADDRESS"], fields["STATE"], row[-1])
            lines[f"{fields['NAME']}-{fields['INDEX']}"] = line
        return lines

    def wait_serving(self) -> dict[str, Line]:
        """The processes, once all of them serve."""

        def serving() -> dict[str, Line] | None:
            lines = self.ps()
            return (
                lines if all(each.state == "RUNNING/SERVING" for each in lines.values()) else None
            )

        return wait_for(serving, "all processes to be SERVING")

    def name_of(self, node: str) -> str:
        """The name of the node with this IP address."""
        return next(name for name in self._names if self._hosts.address(name) == node)

    def lose(self, name: str) -> None:
        """Ends a node with all its processes, without closing a connection."""
        self._hosts.lose(name)

    def certificate(self, folder: Path) -> Mapping[str, str]:
        """Settings of TLS between services, for whatever runs on any of these nodes."""
        authority = Authority(folder, "inner")
        addresses = (f"IP:{self._hosts.address(name)}" for name in self._names)
        roles = (
            f"URI:urn:nano-vllm-grpc:role:{each}" for each in ("frontend", "scheduler", "worker")
        )
        issued = authority.issue("node", *addresses, *roles)
        return {
            "NANO_INTERNAL_TLS_CERT": issued.cert,
            "NANO_INTERNAL_TLS_KEY": issued.key,
            "NANO_INTERNAL_TLS_CA": authority.ca,
            "NANO_INTERNAL_TLS_ROLES": "required",
        }

    def logs(self) -> Iterator[str]:
        """The ends of the services' logs."""
        for log in sorted(self._folder.glob("nano-vllm-grpc-*/*/*.log")):
            yield f"--- {log}\n{log.read_text(errors='replace')[-3000:]}"

    def _run(
        self,
        name: str,
        module: str,
        *arguments: object,
        environment: Mapping[str, str] | None = None,
    ) -> str:
        done = subprocess.run(
            self._hosts.command(name, "-P", "-m", module, *arguments),
            cwd=self._folder,
            env={**self._environment, **(environment or {})},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=WAIT_S,
        )
        assert not done.returncode, f"{done.stdout}{done.stderr}"
        return done.stdout


@contextmanager
def ray_cluster(cpus: Mapping[str, int]) -> Iterator[RayCluster]:
    """Runs a cluster with a node for each name, the first of which is `head`, and leaves nothing
    behind."""
    names = [*cpus]
    hosts = Hosts(names)
    folder = Path(tempfile.mkdtemp(prefix="ray"))  # short, for Unix sockets
    try:
        cluster = RayCluster(hosts, names, folder)
        for name, number in cpus.items():
            cluster.start_node(name, number)
        try:
            yield cluster
        except BaseException:
            print(*cluster.logs(), sep="\n")
            raise
    finally:
        hosts.close()
        shutil.rmtree(folder)


def serve(cluster: RayCluster, folder: Path, **variables: object) -> str:
    """Starts a stack with the demo model and TLS between its services; returns what was shown."""
    flags = [f"--{name.replace('_', '-')}={value}" for name, value in variables.items()]
    return cluster.cli(
        *("up", f"--model={DEMO_MODEL}", "--dtype=float32", "--host=0.0.0.0"),
        *("--kv-blocks=1024", "--block-size=16", "--allow-public-plaintext=1", *flags),
        **cluster.certificate(folder),
    )
