"""asyncio's event loop for services that have many gRPC messages in flight."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import socket
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVarTuple

if TYPE_CHECKING:
    from _typeshed import FileDescriptorLike

Args = TypeVarTuple("Args")

_WAKE_UPS = 4096  # bytes read at once; the socket's buffer holds fewer


class EventLoop(asyncio.SelectorEventLoop):
    """Reads all of grpc.aio's wake-ups at once.

    grpc.aio's polling thread queues each completed operation and writes a byte to a socket. Its
    reader on the loop handles the whole queue, but reads only one byte per iteration (grpcio 1.85,
    `PollerCompletionQueue`). The socket's buffer fills up after some 270 bytes, and the thread then
    blocks in `write`. Completed operations, incoming messages among them, go unseen until the loop
    has iterated once for each. An operation is queued before its byte is written, so reading bytes
    early loses nothing.
    """

    def add_reader(
        self, fd: FileDescriptorLike, callback: Callable[[*Args], Any], *args: *Args
    ) -> None:
        if isinstance(fd, socket.socket) and _handles_completed_operations(callback):
            super().add_reader(fd, _read_then_call, fd, functools.partial(callback, *args))
        else:
            super().add_reader(fd, callback, *args)


def _handles_completed_operations(callback: Callable[..., Any]) -> bool:
    handler = callback.func if isinstance(callback, functools.partial) else callback
    owner = getattr(handler, "__self__", None)
    return type(owner).__name__ == "PollerCompletionQueue"


def _read_then_call(wake_ups: socket.socket, handle: Callable[[], Any]) -> None:
    with contextlib.suppress(BlockingIOError):
        wake_ups.recv(_WAKE_UPS)
    handle()
