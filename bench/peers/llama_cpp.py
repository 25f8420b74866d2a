"""Runs llama-server of llama.cpp over HTTP, with a slot per request."""

from __future__ import annotations

import http.client
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from typing import Any

from bench.metrics import Trace
from bench.peers.driver import Entry, Job, Server, main
from bench.peers.http_server import HOST, HttpServer, free_port
from bench.workload import TEMPERATURE, BenchError, WorkloadRequest

SLOT_TOKENS = 1280  # the long prompt, in a multiple of 256


def http_server(prefix: str, model: str, entry: Entry, slots: int) -> HttpServer:
    """The server in the environment at `prefix`."""
    port = free_port()
    flags = {"model": model, "host": HOST, "port": port, **settings(entry, slots)}
    words = [word for name, value in flags.items() for word in (f"--{name}", str(value))]
    return HttpServer(
        [_binary(prefix), "--no-webui", *words],
        port,
        "/completion",
        "n_predict",
        {"samplers": ["temperature"], "cache_prompt": False, "return_tokens": True},
        lambda event: event["tokens"],
        lambda event: event["stop"],
    )


def settings(entry: Entry, slots: int) -> dict[str, str | int]:
    return {
        "parallel": slots,
        "ctx-size": slots * SLOT_TOKENS,
        "cache-type-k": entry.cache,
        "cache-type-v": entry.cache,
        "threads": len(os.sched_getaffinity(0)),
    }


@contextmanager
def serve(job: Job) -> Iterator[Server]:
    slots = job.sizes.shape.num_seqs
    server = http_server(sys.prefix, job.model, job.entry, slots)
    with subprocess.Popen(server.command) as process:
        try:
            _await_ready(process, server)
            with ThreadPoolExecutor(slots) as threads:

                def generate(requests: Sequence[WorkloadRequest]) -> list[Trace]:
                    return list(threads.map(partial(_complete, server), requests))

                yield Server(generate, version(sys.prefix), settings(job.entry, slots))
        finally:
            process.terminate()


def _complete(server: HttpServer, request: WorkloadRequest) -> Trace:
    options: dict[str, Any] = {
        "temperature": TEMPERATURE,
        "samplers": ["temperature"],
        "seed": request.seed,
        "cache_prompt": False,
    }
    counted = 0
    trace = Trace(len(request.prompt), sent=time.perf_counter())
    for event in server.events(request, **options):
        # A token whose text ends within a character has no chunk; the next one counts it.
        made = event["tokens_predicted"]
        if made > counted:
            trace.arrivals.append((time.perf_counter(), made - counted))
            counted = made
    return trace


def _await_ready(process: subprocess.Popen[bytes], server: HttpServer) -> None:
    while process.poll() is None:
        if server.status() == http.client.OK:
            return
        time.sleep(0.02)
    raise BenchError(f"llama-server ended with status {process.returncode}")


def version(prefix: str) -> dict[str, str]:
    done = subprocess.run([_binary(prefix), "--version"], capture_output=True, check=True)
    return {"llama.cpp": (done.stderr or done.stdout).decode(errors="replace").splitlines()[0]}


def _binary(prefix: str) -> str:
    return f"{prefix}/bin/llama-server"


if __name__ == "__main__":
    main(serve)
