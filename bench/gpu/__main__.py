"""`python -m bench.gpu RUN ...` proves the worker's GPU path against references, and measures it.

The runs are smoke (parts of prove and measure, in minutes), prove, measure, sweeps, and any of
their files by its name, such as attention or step. The exit status is 0 if everything passed, 1 if
something failed or was not run, and 2 if nothing could be run. See docs/deploy/gpu-and-nodes.md.
"""

from __future__ import annotations

import argparse
import random
import signal
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path

from bench.gpu import preflight
from bench.gpu.records import append, outcomes, read
from bench.gpu.run import MODEL_SHAPE, RUNS, run

DEFAULT_RUNS = ["prove", "measure"]
DEFAULT_PEER = Path(".peers/nano-vllm")
FAILED, NOTHING_RUN = 1, 2


def parse_args(args: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m bench.gpu", description=(__doc__ or "").partition("\n")[0]
    )
    names = ", ".join(RUNS)
    parser.add_argument(
        "runs", nargs="*", metavar="RUN", help=f"{names} (default: {' '.join(DEFAULT_RUNS)})"
    )
    parser.add_argument(
        "--out", type=Path, default=Path("gpu-check"), help="directory for results, %(default)s"
    )
    parser.add_argument("--seed", type=int, help="for the random inputs (default: random)")
    parser.add_argument(
        "--peer",
        type=Path,
        help=f"vllm, or a checkout of nano-vLLM (default: {DEFAULT_PEER}, if there)",
    )
    parser.add_argument("--model", type=Path, help=f"default: {MODEL_SHAPE} with random weights")
    parser.add_argument(
        "--rehearse", action="store_true", help="on the CPU with small sizes; figures mean nothing"
    )
    options = parser.parse_args(args)
    if unknown := [name for name in options.runs if name not in RUNS]:
        parser.error(f"{', '.join(unknown)}: unknown run; the runs are {names}")
    options.runs = options.runs or DEFAULT_RUNS
    if options.peer is None and DEFAULT_PEER.is_dir():
        options.peer = DEFAULT_PEER
    if options.seed is None:
        options.seed = random.SystemRandom().randrange(2**31)
    return options


def main(args: Sequence[str]) -> int:
    options = parse_args(args)
    gpu = preflight.examine()
    obstacles = gpu["obstacles"]
    if not options.rehearse and not obstacles and gpu["no_gpu"]:
        obstacles = [gpu["no_gpu"]]
    if obstacles:
        print("gpu-check: nothing was run, because", *obstacles, sep="\n  ", file=sys.stderr)
        return NOTHING_RUN
    from bench.machine import this_machine  # needs psutil

    options.out.mkdir(parents=True, exist_ok=True)
    about = {
        "rehearsal": options.rehearse,
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "seed": options.seed,
        "gpu": gpu,
        **asdict(this_machine()),
    }
    for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT):
        signal.signal(number, signal.default_int_handler)
    status = 0
    for name in options.runs:
        records = options.out.resolve() / f"{name}.jsonl"
        records.write_bytes(b"")
        append(records, run=name, **about)
        print(f"{name}: {gpu.get('name', 'no GPU')}, seed {options.seed}", flush=True)
        for missing in gpu["missing"]:
            print(missing, flush=True)
            append(records, test="imports", outcome="failed", message=missing)
        try:
            run(name, options, records)
        except KeyboardInterrupt:
            return FAILED
        finally:
            print("\n".join(["", *summary(name, records, rehearsal=options.rehearse)]), flush=True)
        if set(outcomes(records).values()) - {"passed", "skipped"}:
            status = FAILED
    return status


def summary(name: str, records: Path, *, rehearsal: bool) -> Iterator[str]:
    """Yields the tests that failed or were not run, and the figures that have a target."""
    found = outcomes(records)
    for test, outcome in found.items():
        if outcome not in ("passed", "skipped"):
            yield f"{outcome}: {test}"
    yield from (each["line"] for each in read(records) if each.get("target") is not None)
    counts = [f"{count} {outcome}" for outcome, count in Counter(found.values()).items()]
    note = "; a rehearsal: no figure means anything" if rehearsal else ""
    yield f"{name}: {', '.join(counts) or 'nothing was run'}{note}"
    yield f"records: {records}"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
