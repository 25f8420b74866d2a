"""Runs llama.cpp's llama-server, over HTTP, with one slot per request of the workload."""

from __future__ import annotations

import http.client
import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from pathlib import Path

from bench.errors import BenchError
from bench.metrics import Trace
from bench.peers.driver import Server, main
from bench.peers.entries import Job
from bench.workload import TEMPERATURE, Request

SLOT_TOKENS = 1280  # the long prompt, in a multiple of 256
HOST = "127.0.0.1"


@contextmanager
def serve(job: Job) -> Iterator[Server]:
    binary = Path(sys.prefix) / "bin" / "llama-server"
    slots = job.sizes.shape.num_seqs
    with socket.create_server((HOST, 0)) as listener:
        port = listener.getsockname()[1]
    settings = {
        "parallel": slots,
        "ctx-size": slots * SLOT_TOKENS,
        "cache-type-k": job.entry.cache,
        "cache-type-v": job.entry.cache,
        "threads": len(os.sched_getaffinity(0)),
    }
    command = [str(binary), "--no-webui"]
    for name, value in {"model": job.model, "host": HOST, "port": port, **settings}.items():
        command += [f"--{name}", str(value)]
    with subprocess.Popen(command) as process:
        try:
            _await_ready(process, port)
            with ThreadPoolExecutor(slots) as threads:

                def generate(requests: Sequence[Request]) -> list[Trace]:
                    return list(threads.map(partial(_complete, port), requests))

                yield Server(generate, {"llama.cpp": _version(binary)}, settings)
        finally:
            process.terminate()


def _complete(port: int, request: Request) -> Trace:
    body = {
        "prompt": request.prompt,
        "n_predict": request.output_len,
        "temperature": TEMPERATURE,
        "samplers": ["temperature"],
        "seed": request.seed,
        "ignore_eos": True,
        "stream": True,
        "cache_prompt": False,
    }
    counted = 0
    trace = Trace(len(request.prompt), sent=time.perf_counter())
    connection = http.client.HTTPConnection(HOST, port)
    connection.request("POST", "/completion", json.dumps(body))
    with connection.getresponse() as response:
        if response.status != http.client.OK:
            raise BenchError(f"llama-server: {response.read().decode(errors='replace')}")
        for line in response:
            if line.startswith(b"data: "):
                # A token whose text ends within a character has no chunk; the next one counts it.
                made = json.loads(line[len(b"data: ") :])["tokens_predicted"]
                if made > counted:
                    trace.arrivals.append((time.perf_counter(), made - counted))
                    counted = made
    return trace


def _await_ready(process: subprocess.Popen[bytes], port: int) -> None:
    while process.poll() is None:
        connection = http.client.HTTPConnection(HOST, port)
        try:
            connection.request("GET", "/health")
            if connection.getresponse().status == http.client.OK:
                return
        except OSError:
            pass  # the server does not listen yet
        finally:
            connection.close()
        time.sleep(0.02)
    raise BenchError(f"llama-server ended with status {process.returncode}")


def _version(binary: Path) -> str:
    done = subprocess.run([binary, "--version"], capture_output=True, check=True)
    return (done.stderr or done.stdout).decode(errors="replace").splitlines()[0]


if __name__ == "__main__":
    main(serve)
