"""Hostile requests to a stack of processes that are killed, and whose files change, in between."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import grpc
from grpc import aio

from nano_vllm_grpc.pb.frontend_pb2_grpc import InferenceServiceStub
from tests.certificates import Authority, Issued
from tests.fuzz.corpus import Case
from tests.fuzz.frontend import draw_cases, send_case
from tests.fuzz.tally import DEADLINE_S, VALID, Tally
from tests.stack import RealStack, running_stack
from tests.waiting import wait_for

_TOKEN = "fuzz-token-0123456789"
_OTHER_TOKEN = "other-token-0123456789"
_METADATA = (("authorization", f"Bearer {_TOKEN}"),)
_OPTIONS = (("grpc.use_local_subchannel_pool", 1),)  # a connection of its own
_AT_ONCE = 8
_CASES_PER_EVENT = 50


@dataclass(frozen=True)
class Target:
    """A stack with tokens and TLS, and the files that it reads."""

    stack: RealStack
    tokens: Path
    authority: Authority
    used: Issued  # files of the frontend's certificate
    spare: Issued

    def kill(self, service: str) -> None:
        self.stack.kill(service)

    def kill_frontend(self, setting: str) -> None:
        """Kills the frontend, and waits until another says that it cannot start with `setting`."""
        log = self.stack.stack.log("frontend-0")
        size = log.stat().st_size
        self.stack.kill("frontend")
        wait_for(lambda: setting in log.read_text()[size:], f"a complaint about {setting}")

    def new_tokens(self) -> None:
        self.tokens.write_text(f"{_OTHER_TOKEN}\n{_TOKEN}\n")

    def broken_tokens(self) -> None:
        """Leaves half a file for a while: those known stay good."""
        self.tokens.write_text(f"{_TOKEN[:8]}\n")
        self.completion()
        self.new_tokens()

    def new_certificate(self) -> None:
        self.used.replace_by(self.spare)

    def killed_without_tokens(self) -> None:
        """Kills the frontend while the file is missing; another has to try until it is back."""
        hidden = self.tokens.with_suffix(".away")
        self.tokens.rename(hidden)
        self.kill_frontend("auth_tokens_file")
        hidden.rename(self.tokens)

    def killed_without_its_key(self) -> None:
        """Kills the frontend while only half of a new certificate is in place."""
        key = Path(self.used.key)
        right = key.read_bytes()
        key.write_bytes(Path(self.authority.issue("other", "DNS:localhost").key).read_bytes())
        self.kill_frontend("tls_key")
        key.write_bytes(right)

    def completion(self) -> list[int]:
        """Returns the tokens of a valid, greedy request."""
        with grpc.secure_channel(self.stack.address, self.credentials, _OPTIONS) as channel:
            answer = InferenceServiceStub(channel).Generate(
                VALID, metadata=_METADATA, timeout=DEADLINE_S
            )
        return list(answer.completions[0].token_ids)

    @property
    def credentials(self) -> grpc.ChannelCredentials:
        return grpc.ssl_channel_credentials(Path(self.authority.ca).read_bytes())


Event = Callable[[Target], None]

EVENTS: dict[str, Event] = {
    "worker killed": lambda target: target.kill("worker"),
    "scheduler killed": lambda target: target.kill("scheduler"),
    "frontend killed": lambda target: target.kill("frontend"),
    "new tokens": Target.new_tokens,
    "broken tokens": Target.broken_tokens,
    "new certificate": Target.new_certificate,
    "frontend killed, tokens missing": Target.killed_without_tokens,
    "frontend killed, key of another certificate": Target.killed_without_its_key,
}


def draw_events(rng: random.Random, count: int) -> list[str]:
    """Draws names of events, each once before any comes twice."""
    drawn: list[str] = []
    while len(drawn) < count:
        drawn += rng.sample(list(EVENTS), len(EVENTS))
    return drawn[:count]


async def fuzz(directory: Path, count: int, seed: int) -> Tally:
    """Sends `count` messages, with an event after every few, in an order drawn from the seed. After
    each the stack must serve again, and give valid requests what it gave them at first."""
    rng, tally = random.Random(seed), Tally()
    cases = draw_cases(count, seed)
    events = draw_events(rng, max(len(EVENTS), count // _CASES_PER_EVENT))
    authority = Authority(directory, "public")
    tokens = directory / "tokens"
    tokens.write_text(f"{_TOKEN}\n")
    names = "DNS:localhost", "IP:127.0.0.1"
    used, spare = authority.issue("used", *names), authority.issue("spare", *names)
    files = {"tls_cert": used.cert, "tls_key": used.key, "auth_tokens_file": tokens}
    with running_stack(kv_blocks=64, max_num_seqs=8, max_model_len=48, **files) as stack:
        target = Target(stack, tokens, authority, used, spare)
        expected = await asyncio.to_thread(target.completion)
        for number, event in enumerate(events):
            await _send(target, tally, cases[number :: len(events)])
            await asyncio.to_thread(EVENTS[event], target)
            tally.counts[event] += 1
            await asyncio.to_thread(stack.wait_serving)
            if await asyncio.to_thread(target.completion) != expected:
                tally.problem("a valid request got other tokens", event)
        await asyncio.to_thread(stack.wait_idle)
    return tally


async def _send(target: Target, tally: Tally, cases: list[Case]) -> None:
    left = list(cases)

    async def send(channel: aio.Channel) -> None:
        while left:
            await send_case(channel, tally, left.pop(), metadata=_METADATA)

    address = target.stack.address
    async with aio.secure_channel(address, target.credentials, _OPTIONS) as channel:
        await asyncio.gather(*(send(channel) for _ in range(_AT_ONCE)))
