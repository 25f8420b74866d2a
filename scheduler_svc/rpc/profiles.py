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
    answers = await _ask_all(stub.StartProfile(request) for stub in stubs)
    refusals = [answer for answer in answers if isinstance(answer, ServiceError)]
    if refusals:
        pairs = zip(stubs, answers, strict=True)
        started = [stub for stub, answer in pairs if not isinstance(answer, ServiceError)]
        await _ask_all(stub.StopProfile(worker_pb2.StopProfileRequest()) for stub in started)
        raise refusals[0]
    return _traces(answers)


async def stop_profile(stubs: Seq[WorkerServiceAsyncStub]) -> list[str]:
    """Stops every rank's profile. Returns the paths of the traces of ranks that have one, by rank.

    Raises:
        ServiceError: no rank has a trace.
    """
    answers = await _ask_all(stub.StopProfile(worker_pb2.StopProfileRequest()) for stub in stubs)
    traces = _traces(answers)
    if not traces:
        raise next(answer for answer in answers if isinstance(answer, ServiceError))
    return traces


async def _ask_all(calls: Iterable[Awaitable[_Answer]]) -> list[_Answer | ServiceError]:
    return await asyncio.gather(*map(_ask, calls))


async def _ask(call: Awaitable[_Answer]) -> _Answer | ServiceError:
    try:
        return await call
    except aio.AioRpcError as error:
        return passed_on(error, UnavailableError("a worker was lost"))


def _traces(answers: Iterable[_Answer | ServiceError]) -> list[str]:
    return [answer.trace for answer in answers if not isinstance(answer, ServiceError)]
