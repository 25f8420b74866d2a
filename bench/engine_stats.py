"""The engine's work during a run: the scheduler's counters, after minus before."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Self

from shared.config import ServiceSettings, load_settings
from shared.pb import scheduler_pb2
from shared.pb.scheduler_pb2_grpc import SchedulerServiceStub

_TIMEOUT_S = 5.0


@dataclass(frozen=True)
class EngineStats:
    """Counters, named as in `GetLoadResponse`."""

    steps: int
    step_sequences: int
    step_tokens: int
    preemptions: int
    cached_prompt_tokens: int

    @classmethod
    def of(cls, counters: object) -> Self:
        """Copies the counters from an object that has them as attributes."""
        return cls(**{field.name: getattr(counters, field.name) for field in fields(cls)})

    def since(self, before: EngineStats) -> EngineStats:
        names = [field.name for field in fields(self)]
        return EngineStats(**{n: getattr(self, n) - getattr(before, n) for n in names})

    @property
    def mean_batch(self) -> float:
        """Sequences per step."""
        return self.step_sequences / self.steps if self.steps else 0.0

    @property
    def mean_step_tokens(self) -> float:
        return self.step_tokens / self.steps if self.steps else 0.0


ReadStats = Callable[[], Coroutine[Any, Any, EngineStats | None]]


def stats_reader(address: str, scheduler_address: str | None) -> ReadStats:
    """Returns a function that reads the counters of the scheduler at `scheduler_address`. By
    default that is the scheduler that `make up` started for `address` on this host. Without a
    scheduler, the function returns None."""
    if scheduler_address is None:
        socket = Path(".run", address.rpartition(":")[2], "scheduler.sock")
        if not socket.exists():
            return _no_stats
        scheduler_address = f"unix:{socket}"

    dialer = load_settings(ServiceSettings, []).dialer

    async def read() -> EngineStats:
        async with dialer.open(scheduler_address) as channel:
            stub = SchedulerServiceStub(channel)
            load = await stub.GetLoad(scheduler_pb2.GetLoadRequest(), timeout=_TIMEOUT_S)
        return EngineStats.of(load)

    return read


async def _no_stats() -> None:
    return None
