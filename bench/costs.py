"""`python -m bench.costs`: measures the processor time of metrics and of the choice among engines
in a service. Run it on an otherwise idle machine."""

from __future__ import annotations

import asyncio
import timeit
import tracemalloc
from array import array
from collections.abc import Callable
from functools import partial

from prometheus_client import CollectorRegistry, generate_latest

from frontend.engines.placement import EngineLoad, choose
from frontend.engines.prefix_index import PrefixIndex
from frontend.metrics import RequestMetrics
from scheduler_svc.core.step import Step, StepTiming
from scheduler_svc.metrics import EngineMetrics
from shared.pb import scheduler_pb2 as pb
from shared.telemetry.metrics import ServiceMetrics

_BLOCK = 16  # tokens
_CALLS, _REPEATS = 10, 20  # the fastest repeat counts


def report(name: str, part: Callable[[], object], times: int = 1) -> None:
    """Prints the time of one operation, of which `part` does `times`."""
    seconds = min(timeit.repeat(part, number=_CALLS, repeat=_REPEATS)) / _CALLS / times
    print(f"{name}: {1e6 * seconds:.2f} µs")


def report_metrics() -> None:
    engine, requests = EngineMetrics(), RequestMetrics()
    step, timing = Step(1, []), StepTiming(0.005, 0.0, 0.0)
    report("metrics, a step in the scheduler", lambda: engine.step_answered(step, timing))
    report("metrics, a token in a frontend", lambda: requests.inter_token_latency.observe(0.03))
    report("metrics, a scrape of the scheduler", partial(generate_latest, _registry(engine)))
    report("metrics, a scrape of a frontend", partial(generate_latest, _registry(requests)))


def report_choice(engines: int, prompt_tokens: int) -> None:
    """Prints the cost to name a prompt's blocks, look them up and choose an engine. All engines
    hold the prompt, which takes the longest."""
    index, prompt = PrefixIndex(_BLOCK), array("I", range(prompt_tokens))
    message = _stored(prompt)
    for engine in range(engines):
        asyncio.run(index.apply(engine, message))
    loads = [EngineLoad(pb.GetLoadResponse(prompt_token_s=1e-4)) for _ in range(engines)]

    def choice() -> None:
        found = index.matches(index.names_of(prompt, ""), range(engines))
        choose([(loads[e], prompt_tokens - _BLOCK * found[e]) for e in range(engines)])

    report(f"choice among {engines} engines, a prompt of {prompt_tokens:,} tokens", choice)


def report_stored_block(prompt_tokens: int) -> None:
    """Prints the cost of a block that an engine reports, in time and memory."""
    message = _stored(array("I", range(prompt_tokens)))

    def store() -> PrefixIndex:
        index = PrefixIndex(_BLOCK)
        asyncio.run(index.apply(0, message))
        return index

    report("a stored block", store, len(message.events))
    tracemalloc.start()
    kept = store()
    size = tracemalloc.get_traced_memory()[0] / len(message.events)
    del kept
    print(f"a stored block: {size:.0f} bytes")


def _stored(tokens: array[int]) -> pb.BlockEvents:
    """The message in which an engine reports that it holds the blocks of a prompt."""
    parent, message = b"", pb.BlockEvents()
    for start in range(0, len(tokens), _BLOCK):
        block = message.events.add().stored
        block.name, block.parent = str(start).encode(), parent
        block.token_ids = tokens[start : start + _BLOCK].tobytes()
        parent = block.name
    return message


def _registry(metrics: ServiceMetrics) -> CollectorRegistry:
    registry = CollectorRegistry()
    registry.register(metrics)
    return registry


def main() -> None:
    report_metrics()
    report_stored_block(1 << 17)
    for engines in (2, 4, 16, 64):
        for prompt_tokens in (1000, 8000):
            report_choice(engines, prompt_tokens)


if __name__ == "__main__":
    main()
