"""The scheduler's side of a frontend's stream."""

from __future__ import annotations

import asyncio

from grpc import aio

from scheduler_svc.core.step import Output
from scheduler_svc.rpc.frontend_messages import step_output
from shared.pb import scheduler_pb2 as pb

# Maximum of unread outputs of a frontend: about five seconds of a busy engine, or 50 MB.
_MAX_UNREAD = 1 << 18
_OUTPUTS_AT_ONCE = 4096  # in one turn of the event loop

Context = aio.ServicerContext[pb.FrontendMessage, pb.SchedulerMessage]


class FrontendConnection:
    """Buffers the outputs that have not been sent to one frontend yet. Outputs that arrive while a
    message is being written join the next message. If the frontend falls too far behind, its
    outputs are dropped and its stream is closed: `closed` is done, with the reason."""

    def __init__(self, number: int) -> None:
        self.number = number
        self._messages: list[pb.SchedulerMessage] = []  # these go ahead of the outputs
        self._outputs: list[Output] = []
        self._news = asyncio.Event()
        self.closed: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self.ended = asyncio.Event()  # set once none of its requests is open

    def send_state(self, state: pb.EngineState) -> None:
        self._messages.append(pb.SchedulerMessage(engine_state=state))
        self._news.set()

    def add(self, output: Output) -> None:
        if self.closed.done():
            return
        if not self._outputs:
            self._news.set()
        self._outputs.append(output)
        if len(self._outputs) > _MAX_UNREAD:
            self._outputs.clear()
            self.cut_off(f"more than {_MAX_UNREAD} outputs were not read")

    def cut_off(self, reason: str) -> None:
        """Ends the stream. Its frontend keeps the outputs that it has, and resubmits the rest."""
        if not self.closed.done():
            self.closed.set_result(reason)

    async def write_to(self, context: Context) -> None:
        """Writes states and outputs as they arrive, until cancelled."""
        while True:
            await self._news.wait()
            self._news.clear()
            messages, self._messages = self._messages, []
            if self._outputs:
                outputs = self._outputs[:_OUTPUTS_AT_ONCE]
                del self._outputs[:_OUTPUTS_AT_ONCE]
                if self._outputs:
                    self._news.set()
                messages.append(pb.SchedulerMessage(step_output=step_output(outputs)))
            for message in messages:
                await context.write(message)
