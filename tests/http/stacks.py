"""Stacks without a model and a gateway in front of them, as processes; and tunnels between them."""

from __future__ import annotations

import json
import socket
import ssl
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

import grpc
import httpx2
from prometheus_client.parser import text_string_to_metric_families

from deploy.health import SERVING, check_health, http_health
from deploy.ports import free_port
from nano_vllm_grpc import LLM, SamplingParams
from shared.pb.scheduler_pb2 import GetLoadRequest
from shared.pb.scheduler_pb2_grpc import SchedulerServiceStub
from tests.certificates import Authority, Issued
from tests.stack import DEMO_MODEL, ROOT
from tests.waiting import wait_for

BLOCK, BLOCKS = 32, 24  # tokens of a block, blocks of a cache
ONE_TOKEN = SamplingParams(max_tokens=1, temperature=0)
PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes((0, 0, 0, 4, 0, 0, 0, 0, 0))


class Side:
    """One of the stacks, whose worker computes nothing: what its clients see, and its scheduler."""

    def __init__(self, directory: Path, processes: ExitStack) -> None:
        self._directory = directory
        self.scheduler_address = f"unix:{directory}/scheduler.sock"
        self.engine_address, self._address = (f"127.0.0.1:{free_port()}" for _ in range(2))
        processes.callback(lambda: self._scheduler.close())
        worker = {"address": f"unix:{directory}/worker.sock", "num_blocks": BLOCKS}
        processes.enter_context(
            running(
                directory, "bench.instant_worker", max_model_len=1024, block_size=BLOCK, **worker
            )
        )
        self._start_scheduler()
        processes.enter_context(
            frontend(
                directory,
                self._address,
                self.engine_address,
                scheduler_address=self.scheduler_address,
            )
        )
        channel = grpc.insecure_channel(self.scheduler_address)
        self._stub = SchedulerServiceStub(processes.enter_context(channel))
        self.llm = processes.enter_context(LLM(self._address))

    def wait_serving(self) -> None:
        wait_until_served(self._address)

    def _start_scheduler(self) -> None:
        self._scheduler = ExitStack()
        self._scheduler.enter_context(
            running(
                self._directory,
                "scheduler_svc",
                scheduler_address=self.scheduler_address,
                worker_addresses=f"unix:{self._directory}/worker.sock",
            )
        )

    def restart_scheduler(self) -> None:
        self._scheduler.close()
        self._start_scheduler()

    def ask(self, prompt: str | list[int]) -> int:
        """Has this stack alone complete a prompt; returns the blocks that it stored for it."""
        (completion,) = self.llm.generate([prompt], ONE_TOKEN, use_tqdm=False)
        usage = completion["usage"]
        assert usage
        return usage["prompt_tokens"] // BLOCK - usage["cached_prompt_tokens"] // BLOCK

    def counters(self) -> tuple[int, int]:
        load = self._stub.GetLoad(GetLoadRequest())
        return load.admissions, load.cached_prompt_tokens


class Gateway:
    """A running gateway, and what its metrics say that it knows of caches."""

    def __init__(self, url: str, metrics: str) -> None:
        self.url, self._metrics = url, metrics

    def complete(self, prompt: str) -> None:
        asked = {"model": "demo", "prompt": prompt, "max_tokens": 1, "temperature": 0}
        response = httpx2.post(f"{self.url}/v1/completions", json=asked, timeout=60)
        assert response.raise_for_status().json()["usage"]["completion_tokens"] == 1

    def knows(self, address: str, name: str, **labels: str) -> float:
        """A metric of the worker at `address`; 0 if there is none."""
        labels["worker"] = f"grpc://{address}"
        text = httpx2.get(self._metrics, timeout=60).text
        return sum(
            sample.value
            for family in text_string_to_metric_families(text)
            for sample in family.samples
            if sample.name == f"smg_kv_{name}" and labels.items() <= sample.labels.items()
        )

    def snapshots(self, address: str) -> float:
        return self.knows(address, "event_batches_total", disposition="snapshot")

    def stored(self, address: str) -> float:
        """The number of stored blocks in all events so far, evicted blocks included."""
        return self.knows(address, "event_blocks_total", op="stored")


@contextmanager
def running(directory: Path, module: str, **flags: object) -> Iterator[None]:
    """`python -m MODULE --FLAG=VALUE ...`, until the end."""
    args = [f"--{name.replace('_', '-')}={value}" for name, value in flags.items()]
    with logged([sys.executable, "-m", module, *args], directory / f"{module}.log"):
        yield


@contextmanager
def logged(command: list[str], log: Path) -> Iterator[None]:
    """Runs a command until the end. If the caller fails, its output becomes part of the report."""
    with log.open("wb") as file:
        process = subprocess.Popen(command, cwd=ROOT, stdout=file, stderr=subprocess.STDOUT)
    try:
        yield
    except BaseException:
        print(f"{log.name}, exit status {process.poll()}:\n{log.read_text()[-2000:]}")
        raise
    finally:
        process.kill()
        process.wait()


@contextmanager
def frontend(directory: Path, address: str, engine_address: str, **flags: object) -> Iterator[None]:
    """A frontend at `address`, which sends the cache's events to processes of its host."""
    settings = {
        "model": DEMO_MODEL,
        "port": address.rpartition(":")[2],
        "gateway_addresses": engine_address,
    }
    with running(directory, "frontend", **settings, **flags):
        yield


def wait_until_served(address: str) -> None:
    wait_for(lambda: check_health(address) == SERVING, "the frontend")


@contextmanager
def gateway(directory: Path, addresses: Sequence[str]) -> Iterator[Gateway]:
    """The gateway of stacks whose frontends are at `addresses`, once it serves."""
    directory.mkdir()
    settings = {
        "gateway_addresses": ",".join(addresses),
        "gateway_policy": "cache_aware",
        "http_port": free_port(),
        "model": DEMO_MODEL,
        "metrics_directory": directory,
    }
    url = f"http://127.0.0.1:{settings['http_port']}"
    with running(directory, "deploy.gateway", **settings):
        wait_for(lambda: http_health(url) == SERVING, "the gateway")
        (entry,) = json.loads((directory / "gateway-0.json").read_text())
        yield Gateway(url, f"http://{entry['targets'][0]}/metrics")


@contextmanager
def tunnel(directory: Path, authority: Authority, engine_address: str) -> Iterator[tuple[str, int]]:
    """Yields where the gateway connects to, and the port between the hosts, here on loopback."""
    inside, between = f"127.0.0.1:{free_port()}", free_port()
    ends = {
        "gateway": f"client=yes\ncheckIP=127.0.0.1\naccept={inside}\nconnect=127.0.0.1:{between}",
        "stack": f"accept=127.0.0.1:{between}\nconnect={engine_address}",
    }
    with ExitStack() as processes:
        for name, lines in ends.items():
            issued = authority.issue(name, "IP:127.0.0.1")
            configuration = directory / f"{name}.conf"
            configuration.write_text(
                f"foreground=yes\npid=\n[engine]\n{lines}\ncert={issued.cert}\nkey={issued.key}\n"
                f"CAfile={authority.ca}\nverifyChain=yes\n"
            )
            command = ["stunnel", str(configuration)]
            processes.enter_context(logged(command, directory / f"{name}.log"))
        yield inside, between


def lets_in(port: int, authority: Authority, shown: Issued | None) -> bool:
    """Whether a client that shows this certificate is answered."""
    context = ssl.create_default_context(cafile=authority.ca)
    if shown:
        context.load_cert_chain(shown.cert, shown.key)
    with (
        socket.create_connection(("127.0.0.1", port), timeout=60) as plain,
        context.wrap_socket(plain, server_hostname="127.0.0.1") as connection,
        suppress(ssl.SSLError, ConnectionError),
    ):
        connection.sendall(PREFACE)
        return bool(connection.recv(1))
    return False
