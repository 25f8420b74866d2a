from __future__ import annotations

import asyncio
import contextlib
import functools
import socket
from collections.abc import Callable
from typing import Any

import pytest
from grpc import aio
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

from frontend import event_loop
from frontend.event_loop import EventLoop

WAKE_UPS = 200


class PollerCompletionQueue:
    """Reads as grpc.aio's queue does: one byte at a time, however many there are."""

    def __init__(self) -> None:
        self.reader, self.writer = socket.socketpair()
        self.reader.setblocking(False)
        self.calls: list[object] = []

    def handle(self, *args: object) -> None:
        self.calls.append(args)
        with contextlib.suppress(BlockingIOError):
            self.reader.recv(1)


class AnotherQueue(PollerCompletionQueue):
    pass


def calls_for_all_wake_ups(queue: PollerCompletionQueue, *args: object) -> int:
    async def run() -> None:
        loop = asyncio.get_running_loop()
        # Bound as grpc.aio binds it: the loop is an argument of a partial.
        loop.add_reader(queue.reader, functools.partial(queue.handle, *args))
        queue.writer.sendall(WAKE_UPS * b"1")
        for _ in range(2 * WAKE_UPS):  # more than enough at one byte per iteration
            await asyncio.sleep(0)
        loop.remove_reader(queue.reader)
        with pytest.raises(BlockingIOError):
            queue.reader.recv(1)

    with asyncio.Runner(loop_factory=EventLoop) as runner:
        runner.run(run())
    queue.reader.close()
    queue.writer.close()
    return len(queue.calls)


def test_wake_ups_of_grpc_are_read_at_once() -> None:
    queue = PollerCompletionQueue()
    assert calls_for_all_wake_ups(queue, "the loop") == 1
    assert queue.calls == [("the loop",)]


def test_what_others_read_is_left_to_them() -> None:
    assert calls_for_all_wake_ups(AnotherQueue()) == WAKE_UPS


def test_grpc_is_recognized_and_served(monkeypatch: pytest.MonkeyPatch) -> None:
    # Fails if grpcio's reader has changed: then check whether `EventLoop` is still needed.
    rounds = 0
    read_then_call = event_loop._read_then_call

    def count(wake_ups: socket.socket, handle: Callable[[], Any]) -> None:
        nonlocal rounds
        rounds += 1
        read_then_call(wake_ups, handle)

    monkeypatch.setattr(event_loop, "_read_then_call", count)

    async def run() -> None:
        server = aio.server()
        servicer = health.aio.HealthServicer()
        await servicer.set("", health_pb2.HealthCheckResponse.SERVING)
        health_pb2_grpc.add_HealthServicer_to_server(servicer, server)
        port = server.add_insecure_port("127.0.0.1:0")
        await server.start()
        async with aio.insecure_channel(f"127.0.0.1:{port}") as channel:
            check = health_pb2_grpc.HealthStub(channel).Check
            # With several wake-ups each, more than the socket's buffer has room for.
            answers = await asyncio.gather(
                *(check(health_pb2.HealthCheckRequest()) for _ in range(500))
            )
        await server.stop(None)
        assert {answer.status for answer in answers} == {health_pb2.HealthCheckResponse.SERVING}

    with asyncio.Runner(loop_factory=EventLoop) as runner:
        runner.run(run())
    assert rounds > 0
