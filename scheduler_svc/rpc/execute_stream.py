"""A rank's `Execute` stream. Any failure on it means that the workers are lost."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from grpc import aio

from scheduler_svc.engine import WorkersLostError
from shared.pb import worker_pb2

if TYPE_CHECKING:
    from shared.pb.worker_pb2_grpc import WorkerServiceAsyncStub


class ExecuteStream:
    """Carries one epoch's steps to one rank and brings their answers back, in order."""

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
        """Sends a step.

        Raises:
            WorkersLostError: the stream has ended or was cancelled.
        """
        try:
            await self._call.write(request)
        except (aio.AioRpcError, asyncio.InvalidStateError) as error:
            raise WorkersLostError(await self.end_reason()) from error
        except asyncio.CancelledError as error:
            raise _lost_or_cancelled(error) from None

    async def read(self) -> worker_pb2.StepResponse:
        """Receives the next answer.

        Raises:
            WorkersLostError: the stream has ended or was cancelled.
        """
        try:
            response = await self._call.read()
        except (aio.AioRpcError, asyncio.InvalidStateError) as error:
            raise WorkersLostError(await self.end_reason()) from error
        except asyncio.CancelledError as error:
            raise _lost_or_cancelled(error) from None
        if not isinstance(response, worker_pb2.StepResponse):
            raise WorkersLostError(await self.end_reason())
        return response

    async def end_reason(self) -> str:
        """Waits until the stream has ended, and returns its status."""
        return f"{(await self._call.code()).name}: {await self._call.details()}"


def _lost_or_cancelled(error: asyncio.CancelledError) -> BaseException:
    """Tells a cancelled call from a cancelled task, because grpc.aio raises one error for both."""
    task = asyncio.current_task()
    if task is None or task.cancelling():
        return error
    return WorkersLostError("the steps in flight were given up")
