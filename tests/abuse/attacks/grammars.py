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


def _nested_one_of(depth: int, number: int) -> str:
    """A schema of `oneOf` in `oneOf`: alternatives multiply with depth; no two numbers alike."""
    schema: object = {"type": "string", "maxLength": number + 2}
    for level in range(depth):
        name = f"{level}-{number}"
        objects = [
            {"type": "object", "properties": {f"{name}-{i}": schema}, "required": [f"{name}-{i}"]}
            for i in range(4)
        ]
        schema = {"oneOf": objects}
    return json.dumps(schema)


@attack()
async def nested_alternatives(target: Target) -> None:
    """Schemas of nested oneOf, whose alternatives multiply: the compiler's threads are few."""
    schemas = (_nested_one_of(4, number) for number in itertools.count())
    await _flood(target, (pb.StructuredOutput(json_schema=s) for s in schemas), _AT_ONCE)


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
async def distinct_grammars(target: Target) -> None:
    """Small grammars, no two alike, 32 at once: each is compiled, none is found in a cache."""
    texts = (f"x{number}[a-z ]{{5,40}}" for number in itertools.count())
    await _flood(target, (pb.StructuredOutput(regex=text) for text in texts), 32)


@attack()
async def slow_masks(target: Target) -> None:
    """Ambiguous grammars, for which the mask of each token takes long, and longer each time."""

    def outputs() -> Iterator[pb.StructuredOutput]:
        for number in itertools.count():
            rules = [f'root ::= {" ".join(["a"] * 24)} "{number}"']
            rules += ["a ::= a a | [a-z]* | [a-z]* [a-y]* | b", 'b ::= b a | a b | "" | [a-z]']
            yield pb.StructuredOutput(grammar="\n".join(rules))

    await _flood(target, outputs(), _AT_ONCE)


@attack()
async def large_choices(target: Target) -> None:
    """Choices of 1,000 options with common beginnings, no two requests alike."""

    def outputs() -> Iterator[pb.StructuredOutput]:
        for number in itertools.count():
            options = [f"{'ab' * 20}{number}-{option}" for option in range(1_000)]
            yield pb.StructuredOutput(choice=pb.Choice(options=options))

    await _flood(target, outputs(), _AT_ONCE)
