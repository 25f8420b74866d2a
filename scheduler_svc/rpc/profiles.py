"""Starts and stops profiles on all ranks together."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Iterable
from collections.abc import Sequence as Seq
from typing import TYPE_CHECKING

from grpc import aio

from shared.errors import ServiceError, UnavailableError, passed_on
from shared.pb import worker_pb2

if TYPE_CHECKING:
    from shared.pb.worker_pb2_grpc import WorkerServiceAsyncStub

_Answer = worker_pb2.StartProfileResponse | worker_pb2.StopProfileResponse


async def start_profile(
    stubs: Seq[WorkerServiceAsyncStub], request: worker_pb2.StartProfileRequest
) -> list[str]:
    """Starts a profile on every rank or on none. Returns the paths of the future traces, by rank.

    Raises:
        ServiceError: a rank rejects the call, or is lost.
    """
    traces, errors = await _call_all(stub.StartProfile(request) for stub in stubs)
    if errors:
        await _call_all(stubs[rank].StopProfile(worker_pb2.StopProfileRequest()) for rank in traces)
        raise errors[0]
    return list(traces.values())


async def stop_profile(stubs: Seq[WorkerServiceAsyncStub]) -> list[str]:
    """Stops every rank's profile. Returns the paths of the traces of ranks that have one, by rank.

    Raises:
        ServiceError: no rank has a trace.
    """
    request = worker_pb2.StopProfileRequest()
    traces, errors = await _call_all(stub.StopProfile(request) for stub in stubs)
    if not traces:
        raise errors[0]
    return list(traces.values())


async def _call_all(
    calls: Iterable[Awaitable[_Answer]],
) -> tuple[dict[int, str], list[ServiceError]]:
    """Waits for a call to each rank. Returns the paths in the answers, by rank, and the errors."""
    traces, errors = {}, []
    for rank, answer in enumerate(await asyncio.gather(*calls, return_exceptions=True)):
        if isinstance(answer, aio.AioRpcError):
            errors.append(passed_on(answer, UnavailableError("a worker was lost")))
        elif isinstance(answer, BaseException):
            raise answer
        else:
            traces[rank] = answer.trace
    return traces, errors
