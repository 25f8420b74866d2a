"""Structured output that takes long to compile, or long per token."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator

from nano_vllm_grpc.pb import frontend_pb2 as pb
from tests.abuse.attack import Target, attack

_AT_ONCE = 8


async def _flood(target: Target, outputs: Iterator[pb.StructuredOutput], at_once: int) -> None:
    async with target.channel() as channel:

        async def send() -> None:
            sampling = pb.SamplingParams(max_tokens=64, structured_output=next(outputs))
            await target.generate(channel, pb.GenerateRequest(text="Once", sampling=sampling))

        await target.flood(send, at_once)


@attack()
async def huge_repetitions(target: Target) -> None:
    """Repetitions of repetitions in regular expressions, schemas and grammars."""

    def outputs() -> Iterator[pb.StructuredOutput]:
        for number in itertools.count(1_000):
            yield pb.StructuredOutput(regex=f"(([a-z]{{1,99}}){{1,99}}x){{1,{number}}}")
            schema = {"type": "array", "maxItems": 100_000, "items": {"maxLength": number}}
            yield pb.StructuredOutput(json_schema=json.dumps(schema))
            yield pb.StructuredOutput(grammar=f'root ::= ("a" ([b-y]{{1,{number}}}){{1,999}}){{9}}')

    await _flood(target, outputs(), _AT_ONCE)


@attack()
async def slow_masks(target: Target) -> None:
    """Ambiguous grammars, for which the mask of each token takes long, and longer each time."""

    def outputs() -> Iterator[pb.StructuredOutput]:
        for number in itertools.count():
            rules = [f'root ::= {" ".join(["a"] * 24)} "{number}"']
            rules += ["a ::= a a | [a-z]* | [a-z]* [a-y]* | b", 'b ::= b a | a b | "" | [a-z]']
            yield pb.StructuredOutput(grammar="\n".join(rules))

    await _flood(target, outputs(), _AT_ONCE)
