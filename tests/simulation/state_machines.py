"""Hypothesis's state machines, with the calls that a seed draws."""

from __future__ import annotations

from collections import Counter

import hypothesis
from hypothesis import HealthCheck, Phase, settings
from hypothesis.stateful import RuleBasedStateMachine, run_state_machine_as_test

from tests.scheduler_svc.test_state_machines import BlockManagerMachine, SchedulerMachine

_EXAMPLES = 20  # of each machine; not shrunk, since `make test` shrinks what it finds
_SETTINGS = settings(
    max_examples=_EXAMPLES,
    stateful_step_count=40,
    phases=[Phase.generate],
    database=None,
    deadline=None,
    suppress_health_check=list(HealthCheck),
)


def simulate(seed: int) -> Counter[str]:
    machines: list[type[RuleBasedStateMachine]] = [BlockManagerMachine, SchedulerMachine]
    for machine in machines:
        run_state_machine_as_test(hypothesis.seed(seed)(machine), settings=_SETTINGS)
    return Counter({machine.__name__: _EXAMPLES for machine in machines})
