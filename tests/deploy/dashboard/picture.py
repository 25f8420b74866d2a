"""`python -m tests.deploy.dashboard.picture docs/dashboard.png`: the README's picture, with
traffic, and a worker that is killed while it answers. Takes four minutes."""

from __future__ import annotations

import asyncio
import random
import sys
import threading
import time
from pathlib import Path

from deploy.ports import free_port
from nano_vllm_grpc import AsyncLLM, SamplingParams
from tests.stack import RealStack, running_stack
from tests.waiting import wait_for

from .browser import Tab, opened

_TRAFFIC_S = 180.0
_AFTERWARDS_S = 8.0
_CLIENTS = 12
_STACK = {"kv_blocks": 64, "max_model_len": 512}  # small, so that its cache is used
_WIDTH, _HEIGHT, _SCALE = 1280, 800, 1.5
_STORY = [{"role": "user", "content": "Tell me a story about a fox"}]


async def traffic(address: str) -> None:
    """Asks for stories, some of them at a time, until it is cancelled."""
    choices = random.Random(1)
    async with AsyncLLM(address) as llm:

        async def ask() -> None:
            while True:
                await asyncio.sleep(choices.expovariate(0.2))
                params = SamplingParams(seed=choices.randrange(1000))
                async for _ in llm.stream(_STORY, params):
                    pass

        await asyncio.gather(*(ask() for _ in range(_CLIENTS)))


def converse(stack: RealStack, tab: Tab) -> None:
    for number, question in enumerate(("What is 17 + 25?", _STORY[0]["content"]), start=1):
        tab.type(question)
        tab.press("Enter")
        if number == 2:
            wait_for(lambda: len(tab.text(".turn[aria-busy]")) > 100, "half of a story")
            stack.kill("worker")
        tab.wait_for(f".turn:nth-of-type({2 * number}) .facts")


def main() -> None:
    with (
        running_stack(ui_port=free_port(), **_STACK) as stack,
        opened(stack.stack.dashboard_url) as tab,
    ):
        tab.show(_WIDTH, _HEIGHT, "light", _SCALE)
        load = threading.Thread(target=asyncio.run, args=[traffic(stack.address)], daemon=True)
        load.start()
        time.sleep(_TRAFFIC_S)
        converse(stack, tab)
        time.sleep(_AFTERWARDS_S)
        Path(sys.argv[1]).write_bytes(tab.screenshot())


if __name__ == "__main__":
    main()
