"""`python -m bench.routing_cost`: what the choice among engines costs a frontend, in processor time
and memory."""

from __future__ import annotations

import argparse
import asyncio
import random
import time
import tracemalloc
from array import array

from rich.console import Console
from rich.table import Table

from bench.machine import this_machine
from frontend.engines.placement import EngineLoad, choose
from frontend.engines.prefix_index import PrefixIndex
from shared.pb import scheduler_pb2 as pb

_BLOCK = 16  # tokens
_BLOCKS_AT_ONCE = 512  # of a message, as schedulers send them


def stored(name: str, tokens: array[int]) -> pb.BlockEvents:
    """An engine's message that it holds the blocks of a prompt."""
    parent, message = b"", pb.BlockEvents()
    for start in range(0, len(tokens), _BLOCK):
        block = message.events.add().stored
        block.name, block.parent = f"{name}-{start}".encode(), parent
        block.token_ids = tokens[start : start + _BLOCK].tobytes()
        parent = block.name
    return message


async def fill(index: PrefixIndex, engines: int, blocks: int) -> float:
    """Has each engine store so many blocks, in prompts of 512; returns the seconds per block."""
    rng = random.Random(0)
    spent_s, count = 0.0, blocks // _BLOCKS_AT_ONCE
    for engine in range(engines):
        for number in range(count):
            tokens = array("I", rng.randbytes(4 * _BLOCK * _BLOCKS_AT_ONCE))
            message = stored(f"{engine}-{number}", tokens)
            start = time.process_time()
            await index.apply(engine, message)
            spent_s += time.process_time() - start
    return spent_s / (engines * count * _BLOCKS_AT_ONCE)


async def choice_s(index: PrefixIndex, engines: int, prompt_tokens: int, repeats: int) -> float:
    """The seconds to name a prompt's blocks, look them up and choose. All engines hold it: the
    longest way."""
    prompt = array("I", range(prompt_tokens))
    for engine in range(engines):
        await index.apply(engine, stored(f"prompt-{prompt_tokens}", prompt))
    loads = [EngineLoad(pb.GetLoadResponse(prompt_token_s=1e-4)) for _ in range(engines)]
    start = time.process_time()
    for _ in range(repeats):
        found = index.matches(index.names_of(prompt, ""), range(engines))
        choose([(loads[e], prompt_tokens - _BLOCK * found[e]) for e in range(engines)])
    return (time.process_time() - start) / repeats


async def measure(blocks: int, repeats: int) -> None:
    console = Console()
    table = Table("engines", "block told", "1,000 tokens", "8,000", "32,000")
    for engines in (2, 4, 16, 64):
        index = PrefixIndex(_BLOCK)
        block_s = await fill(index, engines, blocks // engines)
        times = [await choice_s(index, engines, n, repeats) for n in (1000, 8000, 32000)]
        cells = (f"{1e6 * seconds:.0f} µs" for seconds in times)
        table.add_row(str(engines), f"{1e6 * block_s:.1f} µs", *cells)
    tracemalloc.start()
    index = PrefixIndex(_BLOCK)
    await fill(index, 1, blocks)
    bytes_each = tracemalloc.get_traced_memory()[0] / blocks
    console.print(f"{bytes_each:.0f} bytes per block")
    console.print(table)
    console.print(this_machine())


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.routing_cost", description=__doc__)
    parser.add_argument("--blocks", type=int, default=65_536, help="of all engines, %(default)s")
    parser.add_argument("--repeats", type=int, default=200, help="%(default)s")
    options = parser.parse_args()
    asyncio.run(measure(options.blocks, options.repeats))


if __name__ == "__main__":
    main()
