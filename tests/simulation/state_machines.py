"""Hypothesis's state machine of the block manager, with the calls that a seed draws."""

from __future__ import annotations

from collections import Counter

import hypothesis
from hypothesis import HealthCheck, Phase, settings
from hypothesis.stateful import run_state_machine_as_test

from tests.scheduler_svc import test_state_machines as machines

_EXAMPLES = 20  # not shrunk, since `make test` shrinks what it finds
_SETTINGS = settings(
    max_examples=_EXAMPLES,
    stateful_step_count=40,
    phases=[Phase.generate],
    database=None,
    deadline=None,
    suppress_health_check=list(HealthCheck),
)


def simulate(seed: int) -> Counter[str]:
    classes = (
        machines.BlockManagerMachine,
        machines.WindowMachine,
        machines.TwoTablesMachine,
        machines.FewWindowsMachine,
    )
    machine = hypothesis.seed(seed)(classes[seed % len(classes)])
    run_state_machine_as_test(machine, settings=_SETTINGS)
    return Counter({machine.__name__: _EXAMPLES})
