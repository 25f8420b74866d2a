"""`python -m bench --mode kill`: kills processes of this server and of others while clients stream,
and restarts this server's.

See docs/results/faults.md.
"""

from __future__ import annotations

import argparse
import random
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from functools import partial
from itertools import pairwise, takewhile
from pathlib import Path
from statistics import median
from typing import Any

from rich.console import Console

from bench.kill_servers import FAILURES, LIMIT_S, WITH_HTTP, Server, start_nano, start_peer
from bench.metrics import Trace, pause_s
from bench.peers.driver import ENTRIES, Entry
from bench.peers.installed import converted, python
from bench.processes import Samples
from bench.report import check_minimum, mode_parser, print_table
from bench.workload import (
    BenchError,
    Shape,
    WorkloadRequest,
    read_tokens,
    text_request,
    text_workload,
)
from deploy.health import NOT_SERVING, SERVING
from deploy.model import model_name, resolve_model
from nano_vllm_grpc import LLMError

STREAMS, PROMPT_TOKENS = 4, 64
PROBE = (16, 4)  # tokens of the new request and of its answer
DEFAULT = ["nano-int8-kv8", "nano-bf16", "llama-q8_0", "vllm-bf16"]
_TOTALS = ("streams_ended", "tokens_lost", "tokens_doubled", "tokens_changed")
_TIMES = ("pause_s", "not_serving_s", "unreachable_s", "first_token_s")
_MIN_TOKENS = 8  # that each stream has received before the kill
_MAX_DELAY_S = 0.25  # random, so that kills meet all parts of a step
_HEALTH_PERIOD_S = 0.05
_POLL_S = 0.02
_REST_S = 1.0


@dataclass
class Stream(Trace):
    """One completion, as far as its client received it."""

    token_ids: list[int] = field(default_factory=list)
    error: str = ""  # why the stream ended early


@dataclass(frozen=True)
class Kill:
    """The effects of one kill."""

    pause_s: list[float]  # of the streams that continued
    errors: list[str]  # of the streams that ended
    streams_ended: int
    tokens_lost: int
    tokens_doubled: int
    tokens_changed: int
    not_serving_s: float
    unreachable_s: float
    first_token_s: float  # from the kill to the first token of a new request


def figures(
    streams: Sequence[Stream],
    expected: Sequence[Sequence[int]],
    killed: float,
    first_token_s: float,
    health: Sequence[tuple[float, str]],
) -> Kill:
    pauses = [pause_s(each, killed) for each in streams if not each.error]
    errors = [each.error for each in streams if each.error]
    states = seconds_by_state(health, killed)
    not_serving_s = states.pop(NOT_SERVING, 0.0)
    return Kill(
        [pause for pause in pauses if pause is not None],
        errors,
        len(errors),
        *compare([each.token_ids for each in streams], expected),
        not_serving_s,
        sum(seconds for state, seconds in states.items() if state != SERVING),
        first_token_s,
    )


def compare(
    received: Sequence[Sequence[int]], expected: Sequence[Sequence[int]]
) -> tuple[int, int, int]:
    """Counts how many tokens of completions were lost, doubled and changed.

    Each completion's common beginning and end with the expected one are left out. In what remains
    between them, missing tokens were lost, surplus ones doubled, and different ones changed.
    """
    lost = doubled = changed = 0
    for found, right in zip(received, expected, strict=True):
        start = _num_common(found, right)
        end = _num_common(found[start:][::-1], right[start:][::-1])
        middle, wanted = found[start : len(found) - end], right[start : len(right) - end]
        lost += max(len(wanted) - len(middle), 0)
        doubled += max(len(middle) - len(wanted), 0)
        changed += sum(a != b for a, b in zip(middle, wanted, strict=False))
    return lost, doubled, changed


def _num_common(a: Sequence[int], b: Sequence[int]) -> int:
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(a, b, strict=False)))


def seconds_by_state(samples: Sequence[tuple[float, str]], since: float) -> dict[str, float]:
    """The seconds after `since` in each state. A sample is a time and a state, which lasts until
    the next sample; the last sample does not count."""
    seconds: defaultdict[str, float] = defaultdict(float)
    for (start, state), (end, _) in pairwise(samples):
        seconds[state] += max(end - max(start, since), 0.0)
    return seconds


def summarize(kills: Sequence[Kill]) -> dict[str, Any]:
    """The figures of all kills of a kind: sums, and medians and maxima, which are None if nothing
    was measured."""
    found: dict[str, Any] = {name: sum(getattr(kill, name) for kill in kills) for name in _TOTALS}
    for name in _TIMES:
        values = [getattr(kill, name) for kill in kills]
        if name == "pause_s":
            values = [pause for pauses in values for pause in pauses]
        found[name] = {"median": median(values), "max": max(values)} if values else None
    return found


def undisturbed(server: Server, requests: Sequence[WorkloadRequest]) -> list[list[int]]:
    """Returns the token ids of all requests, which are sent at once.

    Raises:
        BenchError: a stream ended early.
    """
    streams = _new_streams(requests)
    with ThreadPoolExecutor(len(requests)) as pool:
        list(pool.map(partial(_receive, server), requests, streams))
    check_whole(streams)
    return [stream.token_ids for stream in streams]


def check_whole(streams: Sequence[Stream]) -> None:
    """Raises BenchError if a stream ended early."""
    if errors := [stream.error for stream in streams if stream.error]:
        raise BenchError(f"a stream ended early: {errors[0]}")


@contextmanager
def killing(
    server: Server,
    kind: str,
    requests: Sequence[WorkloadRequest],
    min_tokens: int = _MIN_TOKENS,
    delay_s: float = 0.0,
) -> Iterator[tuple[list[Stream], float]]:
    """Causes a fault of a kind while all requests stream. Yields the streams and the time of the
    fault, and returns when they have ended.

    Args:
        min_tokens: that each stream receives before the kill.
        delay_s: time from then to the kill.

    Raises:
        BenchError: a stream ended before the kill.
    """
    streams = _new_streams(requests)
    with ThreadPoolExecutor(len(requests)) as pool:
        pairs = zip(requests, streams, strict=True)
        receiving = [pool.submit(_receive, server, *pair) for pair in pairs]

        def are_decoding() -> bool:
            if any(each.done() for each in receiving):
                raise BenchError("a stream ended before the kill; raise --tokens")
            return min(len(each.token_ids) for each in streams) >= min_tokens

        _wait_for(are_decoding, "the first tokens")
        cause = server.faults[kind]()
        time.sleep(delay_s)
        are_decoding()
        killed = time.perf_counter()
        cause()
        yield streams, killed


def kill(
    server: Server,
    kind: str,
    requests: Sequence[WorkloadRequest],
    expected: Sequence[Sequence[int]],
    probe: WorkloadRequest,
    rng: random.Random,
) -> Kill:
    """Kills a process of a kind while all requests stream; returns once the server is whole again.

    Args:
        expected: the token ids of each request on an undisturbed server.
        probe: a short request, which is sent after the kill.

    Raises:
        BenchError: a stream ended before the kill, or the server does not recover.
    """
    with Samples(server.health, _HEALTH_PERIOD_S) as health:
        delay_s = rng.uniform(0, _MAX_DELAY_S)
        with killing(server, kind, requests, delay_s=delay_s) as (streams, killed):
            first_token_s = _first_token(server, probe) - killed
        _wait_for(server.is_whole, "all processes to serve")
        _wait_for(lambda: health.found[-1][1] == SERVING, "health to be SERVING")
    time.sleep(_REST_S)
    return figures(streams, expected, killed, first_token_s, health.found)


def _new_streams(requests: Sequence[WorkloadRequest]) -> list[Stream]:
    return [Stream(len(each.prompt), time.perf_counter()) for each in requests]


def _receive(server: Server, request: WorkloadRequest, stream: Stream) -> None:
    try:
        for token_ids in server.stream(request):
            if token_ids:
                stream.arrivals.append((time.perf_counter(), len(token_ids)))
                stream.token_ids += token_ids
    except FAILURES as error:
        stream.error = f"{type(error).__name__}: {error}"


def _first_token(server: Server, request: WorkloadRequest) -> float:
    """Sends a request until it is answered; returns the time of its first token."""
    deadline = time.monotonic() + LIMIT_S
    while time.monotonic() < deadline:
        with suppress(*FAILURES):
            for token_ids in server.stream(request):
                if token_ids:
                    return time.perf_counter()
        time.sleep(_POLL_S)
    raise BenchError("no new request was answered after the kill")


def _wait_for(ask: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + LIMIT_S
    while not ask():
        if time.monotonic() > deadline:
            raise BenchError(f"waited {LIMIT_S:.0f} s for {what}")
        time.sleep(_POLL_S)


def parse_args(args: list[str]) -> argparse.Namespace:
    names = [entry.name for entry in ENTRIES if entry.peer in ("nano", *WITH_HTTP)]
    parser = mode_parser("kill", __doc__)
    parser.add_argument("--only", nargs="+", choices=names, default=DEFAULT, metavar="NAME",
                        help=f"of {', '.join(names)}; default: {', '.join(DEFAULT)}")  # fmt: skip
    parser.add_argument("--kinds", nargs="+", metavar="KIND", help="default: all of each server")
    parser.add_argument("--kills", type=int, default=20, help="of each kind; %(default)s")
    parser.add_argument("--tokens", type=int, default=256, help="of each stream; %(default)s")
    parser.add_argument("--tp", type=int, default=1, help="ranks of this server; %(default)s")
    parser.add_argument("--spares", type=int, choices=(0, 1), default=0, help="SPARES; %(default)s")
    options = parser.parse_args(args)
    check_minimum(parser, options, 1, ("kills", "tokens", "tp"))
    return options


def measure(options: argparse.Namespace, console: Console) -> Iterator[dict[str, Any]]:
    """Yields the results after each kill. An entry that fails does not stop the others.

    Raises:
        BenchError: an entry failed.
        LaunchError: there is no such model.
    """
    model = resolve_model(options.model).resolve()
    entries = [each for each in ENTRIES if each.name in options.only]
    results: dict[str, Any] = {
        each.name: {**asdict(each), "kinds": {}, "error": None} for each in entries
    }
    content: dict[str, Any] = {
        "model": model_name(options.model, model),
        "workload": {"streams": STREAMS, "prompt": PROMPT_TOKENS, "output": options.tokens},
        "entries": results,
    }
    for entry in entries:
        result = results[entry.name]
        try:
            for kind, found in run(entry, model, options, result):
                pause = max(found.pause_s, default=float("nan"))
                said = f"pause {pause:.2f} s, {found.streams_ended} streams ended"
                console.print(f"{entry.name}, {kind}: {said}", markup=False)
                yield content
        except (BenchError, LLMError) as error:
            result["error"] = str(error)
        yield content
    show(console, content["model"], results)
    if failed := [name for name, result in results.items() if result["error"]]:
        raise BenchError(f"failed: {', '.join(failed)}")


def run(
    entry: Entry, model: Path, options: argparse.Namespace, result: dict[str, Any]
) -> Iterator[tuple[str, Kill]]:
    """Kills each kind of an entry's processes in turn, and adds what is found to `result`. Yields
    the kind and the effects of each kill.

    Raises:
        BenchError, LLMError: the server does not start or does not recover.
    """
    python(entry.peer)  # raises BenchError if the server is not installed
    text = read_tokens(model)
    shape = Shape(STREAMS, PROMPT_TOKENS, PROMPT_TOKENS, options.tokens, options.tokens)
    requests, rng = text_workload(shape, text), random.Random(0)
    with (
        start_nano(entry, model, options.tp, {"spares": options.spares})
        if entry.peer == "nano"
        else start_peer(entry, converted(entry, model))
    ) as server:
        expected = undisturbed(server, requests)
        again = undisturbed(server, requests)
        result |= {**server.facts, "undisturbed_lost_doubled_changed": compare(again, expected)}
        kinds = [kind for kind in server.faults if kind in (options.kinds or server.faults)]
        if not kinds:
            raise BenchError(f"--kinds: {entry.name} has {', '.join(server.faults)}")
        kills: dict[str, list[Kill]] = {kind: [] for kind in kinds}
        for _ in range(options.kills):
            for kind, found in kills.items():
                probe = text_request(text, *PROBE)
                found.append(kill(server, kind, requests, expected, probe, rng))
                each = [asdict(one) for one in found]
                result["kinds"][kind] = {**summarize(found), "kills": each}
                yield kind, found[-1]


def show(console: Console, model: str, results: dict[str, Any]) -> None:
    for name, result in results.items():
        if kinds := result["kinds"]:
            names = [each for each in next(iter(kinds.values())) if each != "kills"]
            cells = [[_cell(kind[each]) for kind in kinds.values()] for each in names]
            rows = [[each.replace("_", " "), *row] for each, row in zip(names, cells, strict=True)]
            print_table(console, f"{name}, {model}: medians (maxima)", ["", *kinds], rows)
        if result["error"]:
            console.print(f"{name}: {result['error']}", markup=False)


def _cell(figure: dict[str, float] | int | None) -> str:
    if isinstance(figure, dict):
        return f"{figure['median']:.2f} ({figure['max']:.2f})"
    return "n/a" if figure is None else str(figure)
