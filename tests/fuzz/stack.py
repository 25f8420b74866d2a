"""A stack of processes, with the interfaces of its frontend and its dashboard."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from urllib.parse import urlsplit

from grpc import aio

from frontend.api.servicer import SERVICE_NAME
from nano_vllm_grpc.pb.frontend_pb2_grpc import InferenceServiceStub
from tests.frontend.conftest import link_with_qwen3_template
from tests.fuzz import frontend, http
from tests.fuzz.harness import Interface, calling, drawing
from tests.fuzz.http_requests import draw_cases
from tests.fuzz.tally import DEADLINE_S, VALID, Tally
from tests.fuzz.transport import transport
from tests.stack import RealStack, running_stack

_SMALL = {
    "kv_blocks": 256,
    "max_num_seqs": 8,
    "max_num_batched_tokens": 64,
    "max_model_len": 192,
    "max_message_bytes": 1 << 18,
}


@asynccontextmanager
async def running_frontend(directory: Path) -> AsyncIterator[list[Interface]]:
    """Runs a stack so small that completions are short."""
    model = directory / "demo"
    model.mkdir()
    link_with_qwen3_template(model)  # which takes all that a chat may have
    with running_stack(
        model=model,
        http_port="auto",
        ui_port="auto",
        **_SMALL,
    ) as stack:
        stack.wait_serving()
        async with aio.insecure_channel(stack.address) as public:
            honest = partial(_stream, public)
            rest = partial(_check_rest, stack, stack.pids())
            api = partial(http.send_case, urlsplit(stack.stack.url).netloc)
            page = partial(http.send_case, urlsplit(stack.stack.dashboard_url).netloc)
            public_calls = calling(public, SERVICE_NAME)
            yield [
                Interface("frontend", drawing(frontend.SHARES), public_calls, honest, rest),
                Interface("http", partial(draw_cases, http.API), api, honest, rest),
                Interface("dashboard", partial(draw_cases, http.PAGE), page, honest, rest),
                transport(stack.address, SERVICE_NAME, "GetModel", honest, rest),
            ]


async def _stream(channel: aio.Channel) -> list[int]:
    """The tokens of a valid, greedy request."""
    tokens: list[int] = []
    async for chunk in InferenceServiceStub(channel).GenerateStream(VALID, timeout=DEADLINE_S):
        tokens += chunk.token_ids
    return tokens


async def _check_rest(
    stack: RealStack, pids: dict[tuple[str, int], int | None], tally: Tally
) -> None:
    """Nothing may be left of any case. No process may have died or logged a traceback."""
    await asyncio.to_thread(stack.wait_idle)
    await asyncio.to_thread(stack.wait_serving)
    if await asyncio.to_thread(stack.pids) != pids:
        tally.problem("a process died", "these cases")
    for process in stack.processes():
        if "Traceback" in stack.stack.log(process.name).read_text():
            tally.problem(f"{process.name} logged a traceback", "these cases")
