"""Runs campaigns: load on a stack, one fault after another, and an account of what clients saw."""

from __future__ import annotations

import asyncio
import random
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import psutil

from deploy.native.processes import stack_members
from nano_vllm_grpc import AsyncLLM
from tests.chaos.faults import FAULTS, Target, draw_faults
from tests.chaos.load import Load
from tests.chaos.report import Report, Rest
from tests.chaos.workload import Request, draw_requests
from tests.faults.transcript import Transcript
from tests.stack import RealStack, running_stack

_REQUESTS = 44  # distinct ones
CLIENTS = 24
_FRONTENDS = 2
# The share of faults after which the next one hits before the stack has recovered.
_AT_ONCE = 0.15
_MB = 1e6
_CACHE_DIR_GB = 0.05  # a few times the cache
# Small enough for prompts to take several chunks, and for preemptions.
_LIMITS: dict[str, Any] = {
    "kv_blocks": 512,
    "block_size": 16,
    "max_num_batched_tokens": 256,
    "max_num_seqs": 32,
}


def run_campaign(
    seed: int,
    faults: int,
    tp: int,
    report_fault: Callable[[str], None],
    *,
    kinds: Sequence[str] = (),
    clients: int = CLIENTS,
    **variables: object,
) -> Report:
    """Starts a stack of `tp` ranks per engine, harms it `faults` times, and stops it. The tokens
    must be those of a stack without faults and without speculation.

    Args:
        report_fault: is called with the name of each fault before it happens.
        kinds: names in `FAULTS`; empty: all of them.
        variables: those of `make up`, in lower case.
    """
    rng = random.Random(f"{seed} {tp}")
    variables = {**_LIMITS, "tp": tp, "frontends": _FRONTENDS, **variables}
    # The default, as for users: processes are stopped for some seconds, and may be replaced.
    environment = {"WORKER_FAULT": "exit", "NANO_HANG_TIMEOUT_S": "3"}
    requests = draw_requests(rng, _REQUESTS)
    with running_stack(**{**variables, "speculation": "none"}) as stack:
        expected = asyncio.run(undisturbed(stack.address, requests))
    with (
        tempfile.TemporaryDirectory(prefix="blocks-") as folder,
        running_stack(
            environment, **{"cache_dir": folder, "cache_dir_gb": _CACHE_DIR_GB, **variables}
        ) as stack,
    ):
        cache_dir = Path(str(variables.get("cache_dir", folder)))
        campaign = _Campaign(stack, cache_dir, seed, rng, report_fault)
        return asyncio.run(campaign.run(requests, expected, faults, kinds, clients))


class _Campaign:
    def __init__(
        self,
        stack: RealStack,
        cache_dir: Path,
        seed: int,
        rng: random.Random,
        report_fault: Callable[[str], None],
    ) -> None:
        self._stack = stack
        self._cache_dir = cache_dir
        self._rng = rng
        self._report_fault = report_fault
        self._report = Report(seed)

    async def run(
        self,
        requests: list[Request],
        expected: dict[str, Transcript],
        faults: int,
        kinds: Sequence[str],
        clients: int,
    ) -> Report:
        report, started = self._report, time.monotonic()
        # As at the end: processes for grammars come with the first request that has one.
        await undisturbed(self._stack.address, requests)
        start = await self._rest()
        load = Load(self._stack.address, requests, expected)
        load.start(clients, self._report.seed)
        target = Target(self._stack, self._cache_dir, requests, self._rng)
        for kind in draw_faults(self._rng, faults, kinds):
            await self._harm(target, load, kind)
        await load.stop()
        await asyncio.to_thread(self._stack.wait_serving)
        await undisturbed(self._stack.address, requests)
        end = await self._rest()
        outcome = load.outcome
        report.requests, report.tokens = outcome.requests, outcome.tokens
        report.lost, report.duplicated = outcome.damage.lost, outcome.damage.duplicated
        report.wrong = outcome.damage.wrong
        report.failures = outcome.failures + end.problems_since(start)
        report.rest.append({"start": start, "end": end})
        report.seconds = time.monotonic() - started
        return report

    async def _harm(self, target: Target, load: Load, kind: str) -> None:
        await asyncio.sleep(self._rng.uniform(0.0, 0.5))
        self._report_fault(kind)
        flows = load.watch()
        _, fault = FAULTS[kind]
        await fault(target)
        self._report.faults[kind] += 1
        if self._rng.random() >= _AT_ONCE:
            await asyncio.to_thread(self._stack.wait_serving)
            await load.wait_for_tokens(flows)
        pauses = [flow.pause_s for flow in flows if flow.pause_s is not None]
        self._report.pauses_s.setdefault(kind, []).extend(pauses)

    async def _rest(self) -> Rest:
        """Measures the stack once it is idle."""
        load = await asyncio.to_thread(self._stack.wait_idle)
        pids = self._stack.pids()
        memory = {
            f"{service}-{index}": psutil.Process(pid).memory_info().rss / _MB
            for (service, index), pid in pids.items()
            if pid is not None
        }
        members = stack_members(self._stack.directory)
        return Rest(load.blocks_used, load.waiting, load.running, len(members), memory)


async def undisturbed(address: str, requests: list[Request]) -> dict[str, Transcript]:
    """Returns each request's transcript on an undisturbed stack, by name."""

    async def read(client: AsyncLLM, request: Request) -> Transcript:
        transcript = Transcript()
        async for chunk in client.stream(request.prompt, request.params):
            transcript.add(chunk)
        return transcript

    async with AsyncLLM(address) as client:
        found = await asyncio.gather(*(read(client, request) for request in requests))
    return {request.name: each for request, each in zip(requests, found, strict=True)}
