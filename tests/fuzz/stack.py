"""A stack of processes for hostile requests to its frontend, its gateway and its dashboard."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from grpc import aio

from deploy.ports import free_port
from nano_vllm_grpc.pb.frontend_pb2_grpc import InferenceServiceStub
from tests.frontend.conftest import link_with_qwen3_template
from tests.fuzz.corpus import Case
from tests.fuzz.tally import DEADLINE_S, VALID, Tally
from tests.stack import RealStack, running_stack

_AT_ONCE = 8
_SMALL = {
    "kv_blocks": 256,
    "max_num_seqs": 8,
    "max_num_batched_tokens": 64,
    "max_model_len": 192,
    "max_message_bytes": 1 << 18,
}


@dataclass(frozen=True)
class Target:
    """The stack, its first pids, and where its frontend serves the engine protocol."""

    stack: RealStack
    pids: dict[tuple[str, int], int | None]
    engine: str

    async def send_all(
        self, cases: Iterable[Case], send: Callable[[Case], Awaitable[None]], tally: Tally
    ) -> None:
        """Sends cases beside valid streams, which must get what they get alone."""
        left = list(cases)

        async def send_some() -> None:
            while left:
                await send(left.pop())

        async with aio.insecure_channel(self.stack.address) as channel:
            expected = await _stream(channel)
            sending = asyncio.gather(*(send_some() for _ in range(_AT_ONCE)))
            while not sending.done():
                if await _stream(channel) != expected:
                    tally.problem("a valid request got other tokens", f"{len(left)} cases are left")
            await sending
        await self.check_rest(tally)

    async def check_rest(self, tally: Tally) -> None:
        """Nothing may be left of any case. No process may have died or logged a traceback."""
        stack = self.stack
        await asyncio.to_thread(stack.wait_idle)
        await asyncio.to_thread(stack.wait_serving)
        if await asyncio.to_thread(stack.pids) != self.pids:
            tally.problem("a process died", "these cases")
        for process in stack.processes():
            if "Traceback" in stack.stack.log(process.name).read_text():
                tally.problem(f"{process.name} logged a traceback", "these cases")


async def _stream(channel: aio.Channel) -> list[int]:
    """The tokens of a valid, greedy request."""
    tokens: list[int] = []
    async for chunk in InferenceServiceStub(channel).GenerateStream(VALID, timeout=DEADLINE_S):
        tokens += chunk.token_ids
    return tokens


@contextmanager
def running_target(directory: Path) -> Iterator[Target]:
    """Runs a stack so small that completions are short."""
    model = directory / "demo"
    model.mkdir()
    link_with_qwen3_template(model)  # which takes all that a chat may have
    engine = f"127.0.0.1:{free_port()}"
    with running_stack(
        model=model,
        gateway_addresses=engine,
        http_port="auto",
        ui_port="auto",
        **_SMALL,
    ) as stack:
        stack.wait_serving()
        yield Target(stack, stack.pids(), engine)
