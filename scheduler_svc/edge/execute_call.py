"""A rank's `Execute` stream: what goes wrong on it means that workers are lost."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from collections.abc import Sequence as Seq
from typing import Any, TypeVar

from grpc import aio

from scheduler_svc.engine import WorkersLostError
from shared.pb import worker_pb2

Result = TypeVar("Result")
ExecuteCall = aio.StreamStreamCall[worker_pb2.StepRequest, worker_pb2.StepResponse]


async def together(calls: Seq[Coroutine[Any, Any, Result]]) -> Seq[Result]:
    """`asyncio.gather`, without a task for a lone rank: two fewer turns of the loop per step."""
    if len(calls) == 1:
        return [await calls[0]]
    return await asyncio.gather(*calls)


async def write(call: ExecuteCall, request: worker_pb2.StepRequest) -> None:
    """
    Raises:
        WorkersLostError: the stream has ended or was cancelled.
    """
    try:
        await call.write(request)
    except (aio.AioRpcError, asyncio.InvalidStateError) as error:
        raise WorkersLostError(await reason(call)) from error
    except asyncio.CancelledError as error:
        raise _lost_or_cancelled(error) from None


async def read(call: ExecuteCall) -> worker_pb2.StepResponse:
    """
    Raises:
        WorkersLostError: the stream has ended or was cancelled.
    """
    try:
        response = await call.read()
    except (aio.AioRpcError, asyncio.InvalidStateError) as error:
        raise WorkersLostError(await reason(call)) from error
    except asyncio.CancelledError as error:
        raise _lost_or_cancelled(error) from None
    if not isinstance(response, worker_pb2.StepResponse):
        raise WorkersLostError(await reason(call))
    return response


def _lost_or_cancelled(error: asyncio.CancelledError) -> BaseException:
    """grpc.aio raises the same where its call was cancelled, and not the task that uses it."""
    task = asyncio.current_task()
    if task is None or task.cancelling():
        return error
    return WorkersLostError("the steps in flight were given up")


async def reason(call: ExecuteCall) -> str:
    """Why a stream has ended."""
    return f"{(await call.code()).name}: {await call.details()}"
