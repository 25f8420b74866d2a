"""xgrammar warns about what it ignores: as lines on descriptor 2, as it is C++."""

from __future__ import annotations

import json
import subprocess
import sys

from scheduler_svc.core.sampling import GrammarKind
from tests.scheduler_svc.grammar.schema.schemas import PAIRS
from tests.scheduler_svc.grammar.schema.test_accepted import ACCEPTED
from tests.scheduler_svc.grammar.schema.test_regex import MATCHES
from tests.scheduler_svc.grammar.schema.test_schemas import ENFORCED

_COMPILE = """
import json, random, sys
from scheduler_svc.core.sampling import GrammarKind
from scheduler_svc.grammar.compiler import compile_grammar
from scheduler_svc.grammar.errors import GrammarError
from tests.scheduler_svc.grammar.schema.schemas import PAIRS, document, pair
from tests.scheduler_svc.grammar.schema.walks import compilers
grammars, num_seeds = json.load(sys.stdin)
for seed in range(num_seeds):
    rng = random.Random(seed)
    schema = document(rng, pair(rng, *PAIRS[seed % len(PAIRS)]))
    grammars.append([GrammarKind.JSON_SCHEMA, json.dumps(schema)])
num_compiled = 0
for kind, text in grammars:
    try:
        compile_grammar(compilers(), GrammarKind(kind), text)
        num_compiled += 1
    except GrammarError:
        pass
print(num_compiled)
"""


def _compile(grammars: list[tuple[GrammarKind, str]], num_seeds: int) -> tuple[int, str]:
    """How many of these and of random schemas compile, and what is on descriptor 2."""
    done = subprocess.run(
        [sys.executable, "-c", _COMPILE],
        input=json.dumps([grammars, num_seeds]),
        capture_output=True,
        text=True,
        check=True,
    )
    return int(done.stdout), done.stderr


def test_xgrammar_warns_about_nothing_that_is_accepted() -> None:
    schemas = [schema for schema, _ in (*ENFORCED, *ACCEPTED.values())]
    grammars = [(GrammarKind.JSON_SCHEMA, json.dumps(schema)) for schema in schemas]
    grammars += [(GrammarKind.REGEX, pattern) for pattern in MATCHES]
    num_compiled, warnings = _compile(grammars, len(PAIRS))
    assert num_compiled > len(grammars)
    assert warnings == ""


def test_the_warnings_would_be_seen() -> None:
    done = subprocess.run(
        [sys.executable, "-c", "from xgrammar import Grammar; Grammar.from_regex('a^b')"],
        capture_output=True,
        text=True,
        check=True,
    )
    assert "'^' should be at the start" in done.stderr
