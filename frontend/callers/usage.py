"""Counts what each client has used since the process began, for metrics."""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import dataclass, field

from frontend.callers.call import Call, Work


@dataclass(slots=True)
class ClientUsage:
    """Counters of one client; none ever falls."""

    requests: Counter[tuple[str, str]] = field(default_factory=Counter)  # by method and outcome
    refusals: Counter[str] = field(default_factory=Counter)  # by reason
    prompt_tokens: int = 0
    cached_prompt_tokens: int = 0
    completion_tokens: int = 0


class Usage:
    """The counters by client's name; all callers without one are the client ''."""

    def __init__(self) -> None:
        self.clients: defaultdict[str, ClientUsage] = defaultdict(ClientUsage)

    def add(self, call: Call, outcome: str, refused_for: str, work: Work | None) -> None:
        """Counts a call that has ended.

        Args:
            outcome: how its completions ended, else its status.
            refused_for: the limit or field that it was refused for; empty if it was not refused.
        """
        usage = self.clients[call.client.name if call.client else ""]
        usage.requests[call.method, outcome] += 1
        if refused_for:
            usage.refusals[refused_for] += 1
        if work is not None:
            usage.prompt_tokens += work.prompt_tokens
            usage.cached_prompt_tokens += work.cached_prompt_tokens
            usage.completion_tokens += work.completion_tokens
