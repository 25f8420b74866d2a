"""Calls the actors of a stack's processes, each by the name of its process."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import ray
from ray.exceptions import RayError

ANSWER_S = 5.0


def actor_names() -> list[str]:
    """Returns the names of the stack's actors."""
    names: list[str] = ray.util.list_named_actors()
    return names


def ask(
    names: Iterable[str], method: str, *arguments: object, timeout_s: float = ANSWER_S
) -> dict[str, Any]:
    """Calls `method` of all these actors at once. Returns the answers by name, without those of
    actors that have ended, fail or do not answer in time."""
    questions = {}
    for name in names:
        try:
            questions[name] = getattr(ray.get_actor(name), method).remote(*arguments)
        except (ValueError, RayError):  # there is no such actor, not yet or no longer
            continue
    if questions:
        ray.wait([*questions.values()], num_returns=len(questions), timeout=timeout_s)
    answers = {}
    for name, question in questions.items():
        try:
            answers[name] = ray.get(question, timeout=0)
        except RayError:
            continue
    return answers
