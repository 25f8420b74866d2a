"""Observes a stack for its dashboard: health always, all else while a browser is connected."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import AsyncIterator, Sequence
from contextlib import suppress
from typing import Any

from grpc import aio
from grpc_health.v1 import health_pb2, health_pb2_grpc

from deploy.dashboard.faults import Faults
from deploy.dashboard.samples import Sample, Sampler
from deploy.errors import LaunchError
from deploy.health import CHANNEL_OPTIONS
from deploy.native.processes import running_processes
from deploy.native.status import ProcessStatus, stack_status, supervisor_status
from deploy.stack import Stack
from nano_vllm_grpc.channels import open_channel
from shared.channels import internal_options

_INTERVAL_S = 1.0
_MAX_SAMPLES = 300
_RETRY_S = 0.1

Status = health_pb2.HealthCheckResponse


class Observer:
    """Knows the stack's state, and sends each change to the connected browsers."""

    def __init__(self, stack: Stack) -> None:
        self._stack = stack
        self._faults = Faults()
        self._sampler = Sampler(stack)
        self._samples: deque[Sample] = deque(maxlen=_MAX_SAMPLES)
        self._statuses: Sequence[ProcessStatus] = ()
        self._num_viewers = 0
        self._has_viewers = asyncio.Event()
        self._changed = asyncio.Event()  # set once another state replaces the present one

    async def run(self) -> None:
        """Observes until cancelled."""
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._watch_health())
            tasks.create_task(self._keep_sampling())

    async def states(self) -> AsyncIterator[dict[str, Any]]:
        """Yields the present state, then the newest one after each change. Each has the samples
        since the previous one."""
        self._num_viewers += 1
        self._has_viewers.set()
        sent_until = 0.0
        try:
            while True:
                changed, state = self._changed, self._state(sent_until)
                sent_until = self._samples[-1]["at"] if self._samples else sent_until
                yield state
                await changed.wait()
        finally:
            self._num_viewers -= 1
            if not self._num_viewers:
                self._has_viewers.clear()

    def _state(self, since: float) -> dict[str, Any]:
        now = time.monotonic()
        return {
            "now": now,
            "serving": self._faults.serving,
            "samples": [each for each in self._samples if each["at"] > since],
            "processes": [self._describe(each) for each in self._statuses],
            "faults": [
                {"began": each.began, "lost": each.lost, "pause_s": each.pause_s}
                for each in reversed(self._faults.recent)
            ],
        }

    def _describe(self, status: ProcessStatus) -> dict[str, Any]:
        return {
            "name": status.process.name,
            "pid": status.pid,
            "state": status.summary,
            "trouble": status.trouble,
            "restarts": self._faults.restarts[status.process.name],
        }

    def _announce(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()

    async def _watch_health(self) -> None:
        """Watches the health of the public address, which costs nothing while it is unchanged."""
        address, tls = self._stack.address, self._stack.public_tls
        options = (*internal_options(), *CHANNEL_OPTIONS)
        while True:
            with suppress(aio.AioRpcError, OSError):
                async with open_channel(address, tls, options) as channel:
                    watch = health_pb2_grpc.HealthStub(channel).Watch
                    async for reply in watch(health_pb2.HealthCheckRequest()):
                        await self._set_serving(reply.status == Status.SERVING)
            await self._set_serving(False)
            await asyncio.sleep(_RETRY_S)

    async def _set_serving(self, serving: bool) -> None:
        if serving == self._faults.serving:
            return
        self._faults.set_serving(serving, time.monotonic())
        self._announce()
        with suppress(LaunchError):
            found = await asyncio.to_thread(running_processes, self._stack.directory)
            self._faults.observe({each.name: each.pid for each in found}, time.monotonic())
            self._announce()

    async def _keep_sampling(self) -> None:
        while True:
            await self._has_viewers.wait()
            due = time.monotonic() + _INTERVAL_S
            with suppress(LaunchError):
                self._statuses = await asyncio.to_thread(_statuses, self._stack.reloaded())
                pids = {each.process.name: each.pid for each in self._statuses}
                self._faults.observe(pids, time.monotonic())
            self._samples.append(await asyncio.to_thread(self._sampler.take))
            self._announce()
            await asyncio.sleep(max(due - time.monotonic(), 0))


def _statuses(stack: Stack) -> list[ProcessStatus]:
    return [supervisor_status(stack), *stack_status(stack)]
