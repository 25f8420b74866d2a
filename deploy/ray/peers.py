"""The endpoints of other processes, according to their actors."""

from __future__ import annotations

from typing import Any

import ray
import structlog

from deploy.ray.layout import Endpoint, Member, RayStack

_ANSWER_S = 2.0
_SCHEDULERS = "scheduler-"

log = structlog.get_logger(__name__)


class Peers:
    """The endpoints of the processes that a process calls. A silent one keeps its endpoint."""

    def __init__(self, stack: RayStack, member: Member) -> None:
        self.known: dict[str, Endpoint] = {}  # by name; replaced, never changed
        self._follows_schedulers = member.service == "frontend"
        self._names = stack.peers(member)
        self._actors: dict[str, Any] = {}

    def ask(self) -> None:
        """Asks all peers at once."""
        try:
            if self._follows_schedulers:
                named = ray.util.list_named_actors()
                self._names = [name for name in named if name.startswith(_SCHEDULERS)]
            known = {name: at for name, at in self.known.items() if name in self._names}
            for name, endpoint in self._answers():
                known.pop(name, None)
                if endpoint:
                    known[name] = endpoint
        except Exception as error:  # Ray raises many kinds; known endpoints stay
            log.warning("cannot ask Ray for endpoints; keeping the known ones", reason=str(error))
            return
        self.known = known

    def _answers(self) -> list[tuple[str, Endpoint | None]]:
        questions = {}
        for name in self._names:
            try:
                if name not in self._actors:
                    self._actors[name] = ray.get_actor(name)
            except ValueError:  # the actor has not started yet
                continue
            questions[self._actors[name].endpoint.remote()] = name
        if not questions:
            return []
        ready, _ = ray.wait([*questions], num_returns=len(questions), timeout=_ANSWER_S)
        answers = []
        for question in ready:
            name = questions[question]
            try:
                answers.append((name, ray.get(question)))
            except ray.exceptions.RayError:  # it restarts, or another has its name
                del self._actors[name]
        return answers
