"""The scheduler's side of a frontend's stream."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from typing import NamedTuple

from grpc import aio

from scheduler_svc.core.step import Output
from scheduler_svc.rpc.frontend_messages import step_output
from shared.pb import scheduler_pb2

# Maximum of unread outputs of a frontend: about five seconds of a busy engine, or 50 MB.
_MAX_UNREAD = 1 << 18
_OUTPUTS_AT_ONCE = 4096  # in one turn of the event loop

Context = aio.ServicerContext[scheduler_pb2.FrontendMessage, scheduler_pb2.SchedulerMessage]


class State(NamedTuple):
    """The state of the engine."""

    serving: bool = True
    draining: bool = False


class Connection:
    """Buffers the outputs that have not been sent to one frontend yet. Outputs that arrive while a
    message is being written join the next message. If the frontend falls too far behind, its
    outputs are dropped and it is cut off: `cut` is done, with the reason."""

    def __init__(self, number: int) -> None:
        self.number = number
        # The frontend's last report: losses of its suspects by request, and whether it has
        # withdrawn everything and submits nothing.
        self.suspects: dict[int, int] = {}
        self.holding = False
        self._outputs: list[Output] = []
        self._state = self._sent_state = State()
        self._trials: list[scheduler_pb2.Trial] = []
        self._news = asyncio.Event()
        self.cut: asyncio.Future[str] = asyncio.get_running_loop().create_future()

    def set_state(self, state: State) -> None:
        self._state = state
        self._news.set()

    def send_trial(
        self, requests: Iterable[int] = (), *, withdraw: bool = False, alone: bool = False
    ) -> None:
        """Tells the frontend which of its suspects to submit, beside all requests that are not
        suspects. With `withdraw`, it withdraws everything, confirms that and submits nothing. With
        `alone`, it learns that all frontends have done so, and submits only these suspects."""
        trial = scheduler_pb2.Trial(requests=requests, withdraw=withdraw, alone=alone)
        self._trials.append(trial)
        self._news.set()

    def add(self, output: Output) -> None:
        if self.cut.done():
            return
        if not self._outputs:
            self._news.set()
        self._outputs.append(output)
        if len(self._outputs) > _MAX_UNREAD:
            self._outputs.clear()
            self.cut_off(f"more than {_MAX_UNREAD} outputs were not read")

    def cut_off(self, reason: str) -> None:
        """Ends the stream. Its frontend keeps the outputs that it has, and resubmits the rest."""
        if not self.cut.done():
            self.cut.set_result(reason)

    async def write_to(self, context: Context) -> None:
        """Writes states, trials and outputs as they arrive, for ever."""
        while True:
            await self._news.wait()
            self._news.clear()
            if self._sent_state != self._state:
                self._sent_state = self._state
                state = scheduler_pb2.EngineState(**self._sent_state._asdict())
                await context.write(scheduler_pb2.SchedulerMessage(engine_state=state))
            while self._trials:
                trial = self._trials.pop(0)
                await context.write(scheduler_pb2.SchedulerMessage(trial=trial))
            if self._outputs:
                outputs = self._outputs[:_OUTPUTS_AT_ONCE]
                del self._outputs[:_OUTPUTS_AT_ONCE]
                if self._outputs:
                    self._news.set()
                message = scheduler_pb2.SchedulerMessage(step_output=step_output(outputs))
                await context.write(message)
