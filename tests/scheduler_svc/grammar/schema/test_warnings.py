"""xgrammar warns about what it ignores: as lines on descriptor 2, as it is C++."""

from __future__ import annotations

import json
import subprocess
import sys

from shared.sampling_params import GrammarKind
from tests.scheduler_svc.grammar.schema.schemas import PAIRS
from tests.scheduler_svc.grammar.schema.test_accepted import ACCEPTED
from tests.scheduler_svc.grammar.schema.test_regex import MATCHES
from tests.scheduler_svc.grammar.schema.test_schemas import ENFORCED

_COMPILE = """
import json, random, sys
from xgrammar import Grammar
from shared.sampling_params import GrammarKind
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
Grammar.from_regex("a^b")  # it warns about this
print(num_compiled)
"""


def test_xgrammar_warns_about_nothing_that_is_accepted() -> None:
    """The one warning, which is asked for, shows that others would be seen."""
    schemas = [schema for schema, _ in (*ENFORCED, *ACCEPTED.values())]
    grammars = [(GrammarKind.JSON_SCHEMA, json.dumps(schema)) for schema in schemas]
    grammars += [(GrammarKind.REGEX, pattern) for pattern in MATCHES]
    done = subprocess.run(
        [sys.executable, "-c", _COMPILE],
        input=json.dumps([grammars, len(PAIRS)]),
        capture_output=True,
        text=True,
        check=True,
    )
    assert int(done.stdout) > len(grammars)
    (warning,) = done.stderr.splitlines()
    assert "'^' should be at the start" in warning
