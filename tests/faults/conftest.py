"""Stacks that suffer one fault after another."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest

from shared.pb.frontend_pb2 import GenerateRequest
from tests.faults.streams import REQUESTS, long_prompts, undisturbed
from tests.faults.transcript import Transcript
from tests.stack import RealStack, running_stack

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


@pytest.fixture(scope="session", params=[1, 2], ids=["TP 1", "TP 2"])
def victim(request: pytest.FixtureRequest) -> Iterator[Victim]:
    limits: dict[str, Any] = {
        "max_num_batched_tokens": 32,
        "max_num_prefill_tokens": 16,
        "max_num_seqs": 32,
    }
    with running_stack(tp=request.param, kv_blocks=1024, block_size=16, **limits) as stack:
        every: dict[str, GenerateRequest] = REQUESTS | LONG_PROMPTS
        yield Victim(stack, request.param, undisturbed(stack.address, every))
