"""A rank's `Execute` stream. Any failure on it means that the workers are lost."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from typing import TYPE_CHECKING, TypeVar

from grpc import aio

from scheduler_svc.engine import WorkersLostError
from shared.pb import worker_pb2

if TYPE_CHECKING:
    from shared.pb.worker_pb2_grpc import WorkerServiceAsyncStub

Result = TypeVar("Result")


class ExecuteStream:
    """Carries one epoch's steps to one rank and brings their answers back, in order. `write` and
    `read` raise WorkersLostError once the stream has ended or was cancelled."""

    def __init__(self, stub: WorkerServiceAsyncStub) -> None:
        self._call: aio.StreamStreamCall[worker_pb2.StepRequest, worker_pb2.StepResponse] = (
            stub.Execute()
        )

    def done(self) -> bool:
        """Whether the stream has ended."""
        return self._call.done()

    def cancel(self) -> None:
        self._call.cancel()

    async def write(self, request: worker_pb2.StepRequest) -> None:
        """Sends a step."""
        await self._or_lost(self._call.write(request))

    async def read(self) -> worker_pb2.StepResponse:
        """Receives the next answer."""
        response = await self._or_lost(self._call.read())
        if not isinstance(response, worker_pb2.StepResponse):
            raise WorkersLostError(await self.end_reason())
        return response

    async def end_reason(self) -> str:
        """Waits until the stream has ended, and returns its status."""
        return f"{(await self._call.code()).name}: {await self._call.details()}"

    async def _or_lost(self, operation: Awaitable[Result]) -> Result:
        try:
            return await operation
        except (aio.AioRpcError, asyncio.InvalidStateError) as error:
            raise WorkersLostError(await self.end_reason()) from error
        except asyncio.CancelledError as error:
            # grpc.aio raises this error for a cancelled call, too.
            task = asyncio.current_task()
            if task is None or task.cancelling():
                raise
            raise WorkersLostError("the scheduler gave up the steps in flight") from error
