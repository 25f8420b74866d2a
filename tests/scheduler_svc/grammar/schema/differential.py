"""Compares the grammars of random JSON schemas with the package jsonschema:
`python -m tests.scheduler_svc.grammar.schema.differential [--seed N] [--seeds N]`."""

from __future__ import annotations

import argparse
import json
import random
import sys
from collections import Counter

from jsonschema import Draft202012Validator
from jsonschema.exceptions import SchemaError as InvalidSchemaError
from jsonschema.validators import validator_for

from scheduler_svc.grammar.errors import GrammarError
from shared.sampling_params import GrammarKind
from tests.scheduler_svc.grammar.schema.schemas import PAIRS, document, pair
from tests.scheduler_svc.grammar.schema.walks import completions, mismatch

_WALKS = 4


def check(seed: int) -> str:
    """Checks one schema. Returns what became of it: `invalid` if jsonschema rejects it, `rejected`
    with the reason, or `enforced`.

    Raises:
        AssertionError: a completion does not match, or there is none.
    """
    rng = random.Random(seed)
    keywords = PAIRS[seed % len(PAIRS)]
    schema = document(rng, pair(rng, *keywords))
    try:
        validator_for(schema, Draft202012Validator).check_schema(schema)
    except InvalidSchemaError:
        return "invalid"
    text = json.dumps(schema)
    try:
        found = list(completions(GrammarKind.JSON_SCHEMA, text, rng, _WALKS))
    except GrammarError as error:
        return f"rejected: {error.reason}"
    for each in found:
        problem = mismatch(schema, each)
        assert not problem, f"seed {seed}: {problem} does not match {text}"
    return "enforced"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--seeds", type=int, default=10 * len(PAIRS))
    args = parser.parse_args()
    outcomes: Counter[str] = Counter()
    for seed in range(args.seed, args.seed + args.seeds):
        try:
            outcomes[check(seed).split(":")[0]] += 1
        except AssertionError as error:
            outcomes["wrong"] += 1
            print(error, flush=True)
    print(dict(outcomes))
    return 1 if outcomes["wrong"] else 0


if __name__ == "__main__":
    sys.exit(main())
