"""`python -m tests.faults.background_campaign --faults N --seed S` kills the processes of a stack
at random, while clients read background responses and reconnect to any frontend."""

from __future__ import annotations

import argparse
import asyncio
import random
import secrets
import signal
import time
from collections import Counter
from contextlib import aclosing, suppress
from dataclasses import dataclass, field
from typing import Any

from rich.console import Console
from rich.table import Table
from tqdm import tqdm

from tests.faults.background_ledger import Ledger, text_of
from tests.faults.background_stack import (
    HANG_TIMEOUT_S,
    BackgroundStack,
    RefusedError,
    parsed,
    running_background_stack,
)

_COMPLETES_S = 120.0  # after the last fault
_TEMPORARY = (None, 429, 503)  # statuses after which a client tries again
# Faults, with their weights.
_FAULTS = {
    "frontend's fork killed": 5,
    "frontend killed": 5,
    "frontend's fork stopped": 2,
    "frontend drained": 2,
    "all frontends killed": 2,
    "worker's fork killed": 2,
    "worker killed": 2,
    "scheduler's fork killed": 2,
    "scheduler killed": 2,
    "everything killed": 1,
}
# Each has one right answer: it is greedy, or has a seed.
_BODIES: list[dict[str, Any]] = [
    {"input": "Once upon a time", "temperature": 0, "max_output_tokens": 1200},
    {"input": "A fox", "temperature": 0, "max_output_tokens": 700},
    {"input": "A hen", "temperature": 1.0, "seed": 3, "top_k": 40, "max_output_tokens": 900},
    {"input": "Tell me a story", "temperature": 1.3, "seed": 4, "max_output_tokens": 500},
    {"input": "What is 17 + 25?", "temperature": 0.7, "seed": 5, "ignore_eos": False},
    {"input": "Grow", "temperature": 0, "stop": ["zzz", " said"], "max_output_tokens": 600},
    {"input": "A wolf", "temperature": 1.0, "seed": 7, "stop": ["\n\n"], "min_tokens": 300},
]
_COMMON = {"background": True, "ignore_eos": True, "max_output_tokens": 800}


@dataclass
class Findings:
    violations: list[str] = field(default_factory=list)
    counts: Counter[str] = field(default_factory=Counter)
    faults: Counter[str] = field(default_factory=Counter)
    answers: dict[int, str] = field(default_factory=dict)  # by index of the request


class Clients:
    """Clients that create responses and read them, until told to stop."""

    def __init__(self, stack: BackgroundStack, findings: Findings) -> None:
        self._stack = stack
        self._findings = findings
        self.stopping = False

    async def run(self, rng: random.Random) -> None:
        while not self.stopping:
            index = rng.randrange(len(_BODIES))
            await self._answer(rng, index, _COMMON | _BODIES[index])

    async def _answer(self, rng: random.Random, index: int, body: dict[str, Any]) -> None:
        response, ledger = await self._create(rng, body)
        with suppress(RefusedError):
            readers = [self._read(rng, response, ledger) for _ in range(rng.choice([1, 1, 2]))]
            await asyncio.gather(*readers)
            ledger.check_final(await self._get(rng, response, ledger), body["max_output_tokens"])
            await self._read_again(rng, response, ledger)
            text = text_of(parsed(ledger.events[-1])["response"])
            if self._findings.answers.setdefault(index, text) != text:
                ledger.note(f"another text than before: {text!r}")
            if rng.random() < 0.5:
                await self._stack.request(
                    self._any(rng), "DELETE", f"/v1/responses/{response}"
                )  # unless refused: it stays
        self._findings.counts["responses"] += 1
        self._findings.counts["events"] += len(ledger.events)
        self._findings.counts["events received again"] += ledger.num_repeated

    async def _create(self, rng: random.Random, body: dict[str, Any]) -> tuple[str, Ledger]:
        """Creates a response; perhaps reads its first events, too."""
        ledger = Ledger("new", self._findings.violations)
        while True:
            with suppress(RefusedError):
                if rng.random() < 0.5:
                    created = await self._stack.request(
                        self._any(rng), "POST", "/v1/responses", body
                    )
                    ledger.name = created["id"]
                    return created["id"], ledger
                await self._stream(
                    rng, ledger, -1, "POST", "/v1/responses", body | {"stream": True}
                )
            if ledger.events:
                ledger.name = parsed(ledger.events[0])["response"]["id"]
                return ledger.name, ledger
            self._findings.counts["creations refused"] += 1
            await asyncio.sleep(0.1)

    async def _read(self, rng: random.Random, response: str, ledger: Ledger) -> None:
        """Reads events until the end, over as many connections as it takes.

        Raises:
            RefusedError: the response is lost.
        """
        while not ledger.has_ended:
            after = len(ledger.events) - 1
            if rng.random() < 0.2:
                after = rng.randint(-1, after)
            path = f"/v1/responses/{response}?stream=true"
            path += f"&starting_after={after}" if after >= 0 else ""
            self._findings.counts["connections"] += 1
            try:
                await self._stream(rng, ledger, after, "GET", path)
            except RefusedError as error:
                self._check(error, ledger)
                await asyncio.sleep(0.05)

    async def _stream(
        self,
        rng: random.Random,
        ledger: Ledger,
        after: int,
        method: str,
        path: str,
        body: dict[str, Any] | None = None,
    ) -> None:
        """Reads one stream, up to its end or until the client leaves."""
        connection = ledger.connection(after)
        left = rng.choice([1 << 30, rng.randint(1, 300)])
        async with aclosing(self._stack.events(self._any(rng), method, path, body)) as events:
            async for event in events:
                connection.take(event)
                left -= 1
                if not left:
                    return
        connection.end()

    async def _get(self, rng: random.Random, response: str, ledger: Ledger) -> Any:
        while True:
            try:
                return await self._stack.request(self._any(rng), "GET", f"/v1/responses/{response}")
            except RefusedError as error:
                self._check(error, ledger)
                await asyncio.sleep(0.05)

    async def _read_again(self, rng: random.Random, response: str, ledger: Ledger) -> None:
        """Reads all events once more, from their beginning."""
        path = f"/v1/responses/{response}?stream=true"
        while True:
            connection = ledger.connection(-1)
            with suppress(RefusedError):
                events = self._stack.events(self._any(rng), "GET", path)
                async with aclosing(events):
                    async for event in events:
                        connection.take(event)
                connection.end()
                return
            await asyncio.sleep(0.05)

    def _check(self, error: RefusedError, ledger: Ledger) -> None:
        self._findings.counts["connections lost or refused"] += 1
        if error.status not in _TEMPORARY:
            ledger.note(f"refused: {error}")
            raise error

    def _any(self, rng: random.Random) -> int:
        return rng.randrange(len(self._stack.frontends))


async def harm(stack: BackgroundStack, rng: random.Random, kind: str) -> None:
    """Brings a fault about, and starts what it ended after a while."""
    who, _, how = kind.rpartition(" ")
    frontend = rng.choice(stack.frontends)
    service = who.removesuffix("'s fork")
    name = frontend if service == "frontend" else service
    if kind == "frontend drained":
        stack.signal(name, signal.SIGTERM)
    elif who.endswith("fork") and how == "killed":
        stack.signal(name, signal.SIGKILL, rng.randrange(2))
    elif how == "stopped":
        stack.signal(name, signal.SIGSTOP, 0)
        await asyncio.sleep(rng.choice([0.5, 2 * HANG_TIMEOUT_S]))
        stack.signal(name, signal.SIGCONT, 0)
    else:
        names = {"all frontends": stack.frontends, "everything": stack.names}.get(service, [name])
        for each in names:
            stack.end_parent(each)
    await asyncio.sleep(rng.choice([0.0, rng.uniform(0.0, 1.5)]))
    stack.start()


async def run_campaign(seed: int, faults: int, frontends: int, clients: int) -> Findings:
    rng, findings = random.Random(seed), Findings()
    async with running_background_stack(frontends) as stack:
        group = Clients(stack, findings)
        tasks = [
            asyncio.create_task(group.run(random.Random(f"{seed} {number}")))
            for number in range(clients)
        ]
        kinds = rng.choices(list(_FAULTS), list(_FAULTS.values()), k=faults)
        for kind in tqdm(kinds, unit="fault"):
            await asyncio.sleep(rng.uniform(0.0, 0.6))
            await harm(stack, rng, kind)
            findings.faults[kind] += 1
            if rng.random() < 0.8:
                await stack.until_serving()
        group.stopping = True
        await stack.until_serving()
        _, late = await asyncio.wait(tasks, timeout=_COMPLETES_S)
        if late:
            findings.violations.append(f"{len(late)} responses did not complete")
        for task in late:
            task.cancel()
        for found in await asyncio.gather(*tasks, return_exceptions=True):
            if isinstance(found, Exception):
                findings.violations.append(f"a client failed: {found!r}")
        findings.counts["responses adopted"] = stack.count_logged("continuing a response")
        findings.counts["tracebacks"] = stack.count_logged("Traceback (most recent")
        if findings.violations:
            stack.keeps_files = True
            print(f"logs and responses: {stack.directory}")
    return findings


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.faults.background_campaign")
    parser.add_argument("--faults", type=int, default=200, help="number of faults")
    parser.add_argument("--seed", type=int, help="random by default")
    parser.add_argument("--frontends", type=int, default=3)
    parser.add_argument("--clients", type=int, default=8)
    args = parser.parse_args()
    seed = secrets.randbits(32) if args.seed is None else args.seed
    print(f"seed {seed}", flush=True)
    began_at = time.monotonic()
    findings = asyncio.run(run_campaign(seed, args.faults, args.frontends, args.clients))
    table = Table("", "", show_header=False)
    table.add_row("seconds", f"{time.monotonic() - began_at:.0f}")
    for name, count in [*sorted(findings.faults.items()), *findings.counts.items()]:
        table.add_row(name, str(count))
    table.add_row("violations", str(len(findings.violations)))
    Console().print(table)
    for violation in findings.violations[:20]:
        print(violation[:2000])
    return 1 if findings.violations else 0


if __name__ == "__main__":
    raise SystemExit(main())
