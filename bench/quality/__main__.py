"""`python -m bench.quality`: measures the quality that each format of weights and KV cache keeps,
on the demo model or a model trained like it. See docs/quantization.md.

All variants answer the same sums, greedily, and read the same texts. Each is compared with the
first variant, which is float32 without quantization.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from rich.console import Console

from bench.machine import this_machine
from bench.quality import intervals
from bench.quality.texts import Question, Texts
from bench.quality.variant import Loaded, Variant
from bench.report import print_table
from shared.config import SettingsError
from worker_svc.errors import StartError

VARIANTS = {
    "float32": Variant("float32", "none", "auto"),
    "bfloat16": Variant("bfloat16", "none", "auto"),
    "int8": Variant("float32", "int8", "auto"),
    "int4": Variant("float32", "int4", "auto"),
    "fp8": Variant("float32", "fp8", "auto"),
    "float32, KV int8": Variant("float32", "none", "int8"),
    "int8, KV int8": Variant("float32", "int8", "int8"),
    "int4, KV int8": Variant("float32", "int4", "int8"),
}
REFERENCE = "float32"

Interval = tuple[float, float]
Bools = NDArray[np.bool_]


@dataclass(frozen=True)
class Right:
    """The share of right answers, and its difference from the reference's share."""

    count: int
    share: float
    difference: float
    difference_interval: Interval


@dataclass(frozen=True)
class Divergence:
    """KL(reference || variant) of the next token's distributions, in nats, over all positions."""

    positions: int
    mean: float
    mean_interval: Interval
    p99: float
    same_greedy_token: float  # share of positions


@dataclass(frozen=True)
class Quality:
    name: str
    settings: Variant
    sums: Right
    sums_after_chats: Right
    divergence: Divergence


def parse_args(args: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m bench.quality", description=__doc__)
    parser.add_argument("--model", type=Path, default=Path("models/demo"), help="%(default)s")
    parser.add_argument("--sums", type=int, default=2000, help="%(default)s")
    parser.add_argument("--sums-after-chats", type=int, default=300, help="%(default)s")
    parser.add_argument("--texts", type=int, default=300, help="%(default)s")
    parser.add_argument("--seed", type=int, default=0, help="%(default)s")
    parser.add_argument(
        "--only",
        nargs="+",
        choices=VARIANTS,
        default=list(VARIANTS),
        metavar="NAME",
        help=f"besides {REFERENCE}; default: {', '.join(VARIANTS)}",
    )
    parser.add_argument("--out", type=Path, required=True, help="JSON file to write")
    options = parser.parse_args(args)
    for name in ("sums", "sums_after_chats", "texts"):
        if getattr(options, name) < 1:
            parser.error(f"--{name.replace('_', '-')}: must be at least 1")
    return options


class Comparison:
    """Compares variants with the reference, which stays loaded, on equal questions and texts."""

    def __init__(self, options: argparse.Namespace) -> None:
        self._model = options.model
        self._seed = options.seed
        self._texts = texts = Texts(options.model, options.seed)
        self._sums = texts.sums(options.sums)
        self._after_chats = texts.sums_after_chats(options.sums_after_chats)
        self._reference = Loaded(options.model, VARIANTS[REFERENCE])
        self._read = texts.held_out(options.texts)
        self._reference_right = self._right(self._reference)

    def measure(self, name: str) -> Quality:
        """Measures the variant `name`.

        Raises:
            StartError: this machine cannot serve the variant.
        """
        variant = VARIANTS[name]
        if name == REFERENCE:
            loaded, right = self._reference, self._reference_right
        else:
            loaded = Loaded(self._model, variant)
            right = self._right(loaded)
        sums, after_chats = (
            _compare(*both) for both in zip(right, self._reference_right, strict=True)
        )
        return Quality(name, variant, sums, after_chats, self._diverge(loaded))

    def _right(self, loaded: Loaded) -> tuple[Bools, Bools]:
        def share(questions: list[Question]) -> Bools:
            given = loaded.answers([each.prompt for each in questions], self._texts.end_ids)
            return np.array(
                [self._texts.decode(x) == q.answer for x, q in zip(given, questions, strict=True)]
            )

        return share(self._sums), share(self._after_chats)

    def _diverge(self, loaded: Loaded) -> Divergence:
        divergences, sums, same = [], [], 0
        for text in self._read:
            reference = self._reference.log_probabilities(text)
            other = loaded.log_probabilities(text)
            divergence = (np.exp(reference) * (reference - other)).sum(axis=1)
            divergences.append(divergence)
            sums.append(divergence.sum())
            same += int((reference.argmax(axis=1) == other.argmax(axis=1)).sum())
        every = np.concatenate(divergences)
        counts = np.array([len(each) for each in divergences])
        return Divergence(
            positions=len(every),
            mean=float(every.mean()),
            mean_interval=intervals.mean(np.array(sums), counts, self._seed),
            p99=float(np.percentile(every, 99)),
            same_greedy_token=same / len(every),
        )


def _compare(right: Bools, reference: Bools) -> Right:
    return Right(
        count=len(right),
        share=float(right.mean()),
        difference=float(right.mean() - reference.mean()),
        difference_interval=intervals.paired_difference(right, reference),
    )


def print_qualities(qualities: list[Quality]) -> None:
    """Prints shares in %, their differences in percentage points, and divergences in thousandths of
    a nat, each with its interval."""
    first = qualities[0]
    columns = [
        "",
        f"{first.sums.count:,} sums",
        "difference",
        f"{first.sums_after_chats.count:,} sums after a chat",
        "difference",
        f"KL, {first.divergence.positions:,} tokens: mean",
        "99th percentile",
        "same greedy token",
    ]
    rows = []
    for each in qualities:
        cells = [each.name]
        for right in (each.sums, each.sums_after_chats):
            difference = _with_interval(right.difference, right.difference_interval, 100, "{:+.1f}")
            cells += [f"{right.share:.1%}", difference]
        found = each.divergence
        mean = _with_interval(found.mean, found.mean_interval, 1000, "{:.3g}")
        cells += [mean, f"{1000 * found.p99:.3g}", f"{found.same_greedy_token:.2%}"]
        rows.append(cells)
    print_table(Console(), f"compared with {REFERENCE}", columns, rows)


def _with_interval(value: float, interval: Interval, factor: int, pattern: str) -> str:
    middle, low, high = (pattern.format(factor * each) for each in (value, *interval))
    return f"{middle} ({low} to {high})"


def to_json(options: argparse.Namespace, qualities: list[Quality]) -> dict[str, Any]:
    return {
        "mode": "quality",
        "model": str(options.model),
        "seed": options.seed,
        "reference": REFERENCE,
        "intervals": "95 %: differences Bonett and Price 2012, means bootstrap",
        "variants": [dataclasses.asdict(each) for each in qualities],
        **dataclasses.asdict(this_machine()),
    }


def main(args: list[str]) -> int:
    options = parse_args(args)
    try:
        comparison = Comparison(options)
        names = [REFERENCE, *(name for name in options.only if name != REFERENCE)]
        qualities = []
        for name in names:
            print(name, flush=True)
            qualities.append(comparison.measure(name))
    except (SettingsError, StartError) as error:
        print(f"bench.quality: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    print_qualities(qualities)
    text = json.dumps(to_json(options, qualities), indent=2)
    options.out.write_text(text + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
