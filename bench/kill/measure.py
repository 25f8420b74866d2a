"""Kills a process while clients stream, and watches what happens."""

from __future__ import annotations

import os
import random
import signal
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import suppress
from functools import partial

from bench.errors import BenchError
from bench.kill.figures import Kill, Stream, figures
from bench.kill.servers import FAILURES, LIMIT_S, Server
from bench.samples import Samples
from bench.workload import Request
from deploy.health import SERVING

_MIN_TOKENS = 8  # that each stream has received before the kill
_MAX_DELAY_S = 0.25  # random, so that kills meet all parts of a step
_HEALTH_PERIOD_S = 0.05
_MEMORY_PERIOD_S = 0.1
_MEMORY_SHARE = 0.05  # of a core: the kernel needs milliseconds for a large process
_POLL_S = 0.02
_REST_S = 1.0


def undisturbed(server: Server, requests: Sequence[Request]) -> list[list[int]]:
    """Returns the token ids of all requests, which are sent at once.

    Raises:
        BenchError: a stream ended early.
    """
    streams = _new_streams(requests)
    with ThreadPoolExecutor(len(requests)) as pool:
        list(pool.map(partial(_receive, server), requests, streams))
    if errors := [stream.error for stream in streams if stream.error]:
        raise BenchError(f"a stream ended although nothing was killed: {errors[0]}")
    return [stream.token_ids for stream in streams]


def kill(
    server: Server,
    kind: str,
    requests: Sequence[Request],
    expected: Sequence[Sequence[int]],
    probe: Request,
    rng: random.Random,
) -> Kill:
    """Kills a process of a kind while all requests stream; returns once the server is whole again.

    Args:
        expected: the token ids of each request on an undisturbed server.
        probe: a short request, which is sent after the kill.

    Raises:
        BenchError: a stream ended before the kill, or the server does not recover.
    """
    streams = _new_streams(requests)
    with (
        Samples(server.health, _HEALTH_PERIOD_S) as health,
        Samples(server.pss_mb, _MEMORY_PERIOD_S, _MEMORY_SHARE) as memory,
        ThreadPoolExecutor(len(requests)) as pool,
    ):
        pairs = zip(requests, streams, strict=True)
        receiving = [pool.submit(_receive, server, *pair) for pair in pairs]

        def are_decoding() -> bool:
            if any(each.done() for each in receiving):
                raise BenchError("a stream ended before the kill; raise --tokens")
            received = min(len(each.token_ids) for each in streams)
            return received >= _MIN_TOKENS and bool(memory.found)

        _wait_for(are_decoding, "the first tokens")
        pid = server.pids[kind]()
        time.sleep(rng.uniform(0, _MAX_DELAY_S))
        are_decoding()
        killed = time.perf_counter()
        os.kill(pid, signal.SIGKILL)
        first_token_s = _first_token(server, probe) - killed
        wait(receiving)
        _wait_for(server.is_whole, "all processes to serve")
        _wait_for(lambda: health.found[-1][1] == SERVING, "health to be SERVING")
        _wait_for(lambda: memory.found[-1][0] > killed, "the memory after the kill")
    time.sleep(_REST_S)
    return figures(streams, expected, killed, first_token_s, health.found, memory.found)


def _new_streams(requests: Sequence[Request]) -> list[Stream]:
    return [Stream(len(each.prompt), time.perf_counter()) for each in requests]


def _receive(server: Server, request: Request, stream: Stream) -> None:
    try:
        for token_ids in server.stream(request):
            if token_ids:
                stream.arrivals.append((time.perf_counter(), len(token_ids)))
                stream.token_ids += token_ids
    except FAILURES as error:
        stream.error = f"{type(error).__name__}: {error}"


def _first_token(server: Server, request: Request) -> float:
    """Sends a request until it is answered; returns the time of its first token."""
    deadline = time.monotonic() + LIMIT_S
    while time.monotonic() < deadline:
        with suppress(*FAILURES):
            for token_ids in server.stream(request):
                if token_ids:
                    return time.perf_counter()
        time.sleep(_POLL_S)
    raise BenchError("no new request was answered after the kill")


def _wait_for(ask: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + LIMIT_S
    while not ask():
        if time.monotonic() > deadline:
            raise BenchError(f"waited {LIMIT_S:.0f} s for {what}")
        time.sleep(_POLL_S)
