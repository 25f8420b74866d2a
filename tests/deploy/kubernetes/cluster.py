"""Runs the containers of rendered pods as processes of this host: with their arguments,
environment and probes, and certificates such as cert-manager would issue. Paths, ports, devices and
the names of pods and Services become this host's; every address is on loopback."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from deploy.ports import free_port
from tests.certificates import Authority
from tests.deploy.kubernetes.addresses import listens
from tests.deploy.kubernetes.pods import NAMESPACE, Process, named, processes
from tests.deploy.kubernetes.rendering import ROOT, Manifest
from tests.waiting import wait_for

TOKEN = "sesame-open-the-door"
_MODULES = {
    "nano-vllm-grpc/frontend": "frontend",
    "nano-vllm-grpc/scheduler": "scheduler_svc",
    "nano-vllm-grpc/worker": "worker_svc",
    "nano-vllm-grpc/gateway": "deploy.gateway",
}


class Cluster:
    """The first pod of each kind.

    Args:
        directory: for files and sockets; short, since the kernel limits the names of sockets.
    """

    def __init__(self, manifests: list[Manifest], directory: Path) -> None:
        self._directory = directory
        self.processes = {str(each): each for each in processes(manifests)}
        self._ports = {
            (each.pod.name, port): free_port()
            for each in self.processes.values()
            for port in (*listens(each), 50051, 9001)  # the last two on a pod's loopback
        }
        self._meeting_port = free_port()
        self._issue(manifests)

    def port(self, pod: str, port: int) -> int:
        """Where this host has a pod's port."""
        return self._ports[pod, port]

    def file(self, process: Process, path: str) -> Path:
        """Where this host has a container's file."""
        at = max((each for each in process.mounts if path.startswith(each)), key=len)
        volumes = {each["name"]: each for each in process.pod.spec["volumes"]}
        volume = volumes[process.mounts[at]]
        if "persistentVolumeClaim" in volume:
            base = ROOT / "models"
        elif "secret" in volume:
            base = self._directory / volume["secret"]["secretName"]
        else:
            base = self._directory / process.pod.name / volume["name"]
        base.mkdir(parents=True, exist_ok=True)
        return Path(f"{base}{path.removeprefix(at)}")

    @contextmanager
    def run(self, name: str) -> Iterator[subprocess.Popen[bytes]]:
        """Runs a container until the end of the body, once its probe has succeeded."""
        process = self.processes[name]
        command = [sys.executable, "-m", _MODULES[process.image]]
        command += [self._translated(process, each) for each in process.arguments]
        with subprocess.Popen(command, cwd=ROOT, env=self._environment(process)) as run:
            try:
                if "exec" in process.container["readinessProbe"]:
                    wait_for(lambda: self.is_healthy(name) or run.poll() is not None, name)
                    assert run.poll() is None
                yield run
            finally:
                run.terminate()
                run.wait(60)

    def is_healthy(self, name: str) -> bool:
        """Whether a container's probe succeeds."""
        process = self.processes[name]
        _, *command = process.container["readinessProbe"]["exec"]["command"]
        arguments = [self._translated(process, each) for each in command]
        environment = self._environment(process)
        done = subprocess.run([sys.executable, *arguments], cwd=ROOT, env=environment, timeout=60)
        return done.returncode == 0

    def _environment(self, process: Process) -> dict[str, str]:
        own = {name: self._translated(process, each) for name, each in process.environment.items()}
        own |= {"NANO_METRICS_HOST": "127.0.0.1", "NANO_METRICS_PORT": "0"}
        own |= {"NANO_DEVICE": "cpu", "NANO_MASTER_PORT": str(self._meeting_port)}
        return {"PATH": os.environ["PATH"], "PYTHONPATH": str(ROOT)} | own

    def _translated(self, process: Process, text: str) -> str:
        """A value that may have several addresses or paths, separated by commas."""
        if "=" in text and text.startswith("--"):
            name, _, value = text.partition("=")
            return f"{name}={self._translated(process, value)}"
        return ",".join(self._translated_one(process, part) for part in text.split(","))

    def _translated_one(self, process: Process, text: str) -> str:
        scheme = next((each for each in ("unix:", "dns:", "grpc://") if text.startswith(each)), "")
        rest = text.removeprefix(scheme)
        if rest.startswith("/"):
            return f"{scheme}{self.file(process, rest)}"
        if rest in ("0.0.0.0", process.environment.get("LWS_LEADER_ADDRESS")):
            return "127.0.0.1"
        host, _, port = rest.rpartition(":")
        if host.endswith(f".{NAMESPACE}.svc"):
            first = host.partition(".")[0]
            called = "engine-0" if first == "engines" else first
            return f"{scheme}localhost:{self.port(called, int(port))}"
        pod = process.pod.name
        if port.isdigit() and (pod, int(port)) in self._ports:
            host = "127.0.0.1" if host == "0.0.0.0" else host
            return f"{scheme}{host}{':' if host else ''}{self.port(pod, int(port))}"
        return text

    def _issue(self, manifests: list[Manifest]) -> None:
        """Makes the secrets that the manifests' Certificates describe, and those of users."""
        files = self._directory / "authorities"
        files.mkdir(parents=True)
        authorities = {name: Authority(files, name) for name in ("inner", "self-signed")}
        for certificate in named(manifests, "Certificate").values():
            spec = certificate["spec"]
            authority = authorities[spec["issuerRef"]["name"]]
            names = [f"DNS:{name}" for name in spec.get("dnsNames", ())]
            names += [f"URI:{uri}" for uri in spec.get("uris", ())]
            if names:
                issued = authority.issue(spec["secretName"], *names)
                secret = self._directory / spec["secretName"]
                secret.mkdir()
                (secret / "tls.crt").write_bytes(Path(issued.cert).read_bytes())
                (secret / "tls.key").write_bytes(Path(issued.key).read_bytes())
                (secret / "ca.crt").write_bytes(Path(authority.ca).read_bytes())
        tokens = self._directory / "tokens"
        tokens.mkdir()
        (tokens / "tokens").write_text(f"{TOKEN}\n")


@contextmanager
def running(cluster: Cluster, *names: str) -> Iterator[list[subprocess.Popen[bytes]]]:
    """Runs containers, each once those before it are healthy."""
    with ExitStack() as stack:
        yield [stack.enter_context(cluster.run(name)) for name in names]
