"""`python -m bench.kill`: kills processes of this server and of others while clients stream. See
docs/results/faults.md."""

from __future__ import annotations

import argparse
import json
import random
import sys
from collections.abc import Callable
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from rich.console import Console

from bench.errors import BenchError
from bench.kill.figures import Kill, compare, summarize
from bench.kill.measure import kill, undisturbed
from bench.kill.servers import WITH_HTTP, start_nano, start_peer
from bench.machine import this_machine
from bench.peers.entries import ENTRIES, Entry
from bench.peers.install import converted, python
from bench.report import check_minimum, print_table
from bench.texts import read_tokens
from bench.workload import Shape, text_request, text_workload
from deploy.errors import LaunchError
from deploy.model import model_name, resolve_model
from nano_vllm_grpc import LLMError

STREAMS, PROMPT_TOKENS = 4, 64
PROBE = (16, 4)  # tokens of the new request and of its answer
DEFAULT = ["nano-int8-kv8", "nano-bf16", "llama-q8_0", "vllm-bf16", "openvino-int8"]


def parse_args(args: list[str]) -> argparse.Namespace:
    names = [entry.name for entry in ENTRIES]
    parser = argparse.ArgumentParser(prog="python -m bench.kill", description=__doc__)
    parser.add_argument("--model", required=True, help="what MODEL takes")
    parser.add_argument("--out", type=Path, required=True, help="JSON file to write")
    parser.add_argument("--only", nargs="+", choices=names, default=DEFAULT, metavar="NAME",
                        help=f"of {', '.join(names)}; default: {', '.join(DEFAULT)}")  # fmt: skip
    parser.add_argument("--kinds", nargs="+", metavar="KIND", help="default: all of each server")
    parser.add_argument("--kills", type=int, default=20, help="of each kind; %(default)s")
    parser.add_argument("--tokens", type=int, default=256, help="of each stream; %(default)s")
    parser.add_argument("--tp", type=int, default=1, help="ranks of this server; %(default)s")
    options = parser.parse_args(args)
    check_minimum(parser, options, 1, ("kills", "tokens", "tp"))
    return options


def run(
    entry: Entry,
    model: Path,
    options: argparse.Namespace,
    result: dict[str, Any],
    done: Callable[[str, Kill], None],
) -> None:
    """Kills each kind of an entry's processes in turn, and adds what is found to `result`.

    Args:
        done: is called after each kill, with the kind.

    Raises:
        BenchError, LLMError: the server does not start or does not recover.
    """
    python(entry.peer)  # raises BenchError if the server is not installed
    text = read_tokens(model).tolist()
    shape = Shape(STREAMS, PROMPT_TOKENS, PROMPT_TOKENS, options.tokens, options.tokens)
    requests, rng = text_workload(shape, text), random.Random(0)
    with (
        start_nano(entry, model, options.tp)
        if entry.peer == "nano"
        else start_peer(entry, converted(entry, model))
    ) as server:
        expected = undisturbed(server, requests)
        again = undisturbed(server, requests)
        result |= {**server.facts, "undisturbed_lost_doubled_changed": compare(again, expected)}
        kinds = [kind for kind in server.pids if kind in (options.kinds or server.pids)]
        if not kinds:
            raise BenchError(f"--kinds: {entry.name} has {', '.join(server.pids)}")
        kills: dict[str, list[Kill]] = {kind: [] for kind in kinds}
        for _ in range(options.kills):
            for kind, found in kills.items():
                probe = text_request(text, *PROBE)
                found.append(kill(server, kind, requests, expected, probe, rng))
                each = [asdict(one) for one in found]
                result["kinds"][kind] = {**summarize(found), "kills": each}
                done(kind, found[-1])


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


def main(args: list[str]) -> int:
    options = parse_args(args)
    console = Console()
    try:
        model = resolve_model(options.model).resolve()
    except LaunchError as error:
        print(f"bench.kill: --{error}", file=sys.stderr)
        return 1
    entries = [each for each in ENTRIES if each.name in options.only]
    results: dict[str, Any] = {
        each.name: {**asdict(each), "kinds": {}, "error": None} for each in entries
    }
    content = {
        "mode": "kill",
        "date": datetime.now(UTC).date().isoformat(),
        "command": ["python", "-m", "bench.kill", *args],
        "model": model_name(options.model, model),
        "workload": {"streams": STREAMS, "prompt": PROMPT_TOKENS, "output": options.tokens},
        "entries": results,
        **asdict(this_machine()),
    }

    def write() -> None:
        options.out.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")

    failed = False
    for entry in entries:

        def done(kind: str, found: Kill, name: str = entry.name) -> None:
            write()
            pause = max(found.pause_s, default=float("nan"))
            said = f"pause {pause:.2f} s, {found.streams_ended} streams ended"
            console.print(f"{name}, {kind} killed: {said}", markup=False)

        try:
            if entry.peer in ("nano", *WITH_HTTP):
                run(entry, model, options, results[entry.name], done)
            else:
                results[entry.name]["error"] = "has no server here"
        except (BenchError, LLMError) as error:
            results[entry.name]["error"] = str(error)
            failed = True
        except KeyboardInterrupt:
            return 130
        write()
    show(console, model_name(options.model, model), results)
    console.print(f"written: {options.out}")
    return int(failed)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
