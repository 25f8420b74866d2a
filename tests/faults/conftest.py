"""Stacks that suffer one fault after another."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from functools import cache
from typing import Any

import pytest

from nano_vllm_grpc.pb.frontend_pb2 import GenerateRequest
from tests.faults.streams import REQUESTS, long_prompts, undisturbed
from tests.faults.transcript import Transcript
from tests.stack import RealStack, running_stack

BLOCK_SIZE = 16
LONG_PROMPTS = long_prompts(count=3, length=1400, vocab_size=1536)


@dataclass(frozen=True)
class Victim:
    """A stack with steps so small that a prompt takes many, and its answers when undisturbed."""

    stack: RealStack
    tp: int
    expected: dict[str, Transcript]

    def rest(self) -> None:
        """Waits until everything serves again and nothing is left behind."""
        self.stack.wait_serving()
        self.stack.wait_idle()


@pytest.fixture(scope="module")
def victims() -> Iterator[Callable[[int], Victim]]:
    """A module's victims, by tensor parallelism; each starts when it is first asked for."""
    limits: dict[str, Any] = {
        "max_num_batched_tokens": 32,
        "max_num_prefill_tokens": 16,
        "max_num_seqs": 32,
        # So that streams last until the fault. tests/e2e/test_speculation.py and campaigns have
        # faults with speculation.
        "speculation": "none",
    }
    with ExitStack() as stacks:

        @cache
        def victim_of(tp: int) -> Victim:
            started = running_stack(tp=tp, kv_blocks=1024, block_size=BLOCK_SIZE, **limits)
            stack = stacks.enter_context(started)
            every: dict[str, GenerateRequest] = REQUESTS | LONG_PROMPTS
            return Victim(stack, tp, undisturbed(stack.address, every))

        yield victim_of


@pytest.fixture
def victim(request: pytest.FixtureRequest, victims: Callable[[int], Victim]) -> Victim:
    """The victim with this tensor parallelism, at rest also after a test that was given up."""
    found = victims(request.param)
    found.rest()
    return found
