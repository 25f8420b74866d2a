"""Clients, and the submissions made for them."""

from __future__ import annotations

from dataclasses import dataclass, field

from scheduler_svc.core.sequence import FinishCause, Sequence
from scheduler_svc.core.step import Logprobs, Output
from tests.oracle import logprobs
from tests.sanitizer import Owner
from tests.simulation.workload import Request


@dataclass
class Attempt:
    """A submission of a request, of which a lost connection leads to more."""

    client: Client
    seq: Sequence
    owner: Owner
    num_tokens: int
    num_scored: int = 0  # of the prompt's tokens, not counting the first
    ended: bool = False
    twin: bool = False  # repeats the number of an open request, so it must be refused

    @property
    def cause(self) -> FinishCause | None:
        """The cause for which its tokens so far end it, if they do."""
        return self.client.request.cause_after(self.owner.tokens[: self.num_tokens])

    def check_prompt_logprobs(self, output: Output) -> None:
        """Every position must arrive once, in order, and before the first token."""
        found = output.prompt_logprobs
        assert found is not None
        assert output.offset == self.num_scored + 1, f"{self.owner.name}: position {output.offset}"
        self.num_scored += len(found.ids)
        assert self.num_scored < len(self.client.request.prompt), f"{self.owner.name}: too many"
        self._check(output.offset, found, self.client.request.params.prompt_logprobs)

    def check_logprobs(self, output: Output) -> None:
        """A token must come with the log-probabilities that were asked for."""
        request = self.client.request
        if request.params.prompt_logprobs is not None:
            assert self.num_scored == len(request.prompt) - 1, f"{self.owner.name}: not scored"
        k = request.params.logprobs
        assert (output.logprobs is None) == (k is None), f"{self.owner.name}: log-probabilities"
        if output.logprobs is not None:
            self._check(len(request.prompt) + output.offset, output.logprobs, k)

    def _check(self, first: int, found: Logprobs, k: int | None) -> None:
        assert k is not None, f"{self.owner.name} did not ask for log-probabilities"
        owner, end = self.owner, first + len(found.ids)
        tokens = [*owner.prompt, *owner.tokens][first:end]
        before = owner.states[first - 1 : end - 1].tolist()
        rows = [logprobs(state, token, k) for state, token in zip(before, tokens, strict=True)]
        ids, values = [ids for ids, _ in rows], [values for _, values in rows]
        assert found.ids.tolist() == ids, f"{self.owner.name}: ids of log-probabilities"
        assert found.values.tolist() == values, f"{self.owner.name}: log-probabilities"


@dataclass
class Client:
    """The client that waits for a request."""

    request: Request
    delivered: list[int]
    attempts: list[Attempt] = field(default_factory=list)
    submitted: bool = False
    ended: str = ""  # how

    @property
    def current(self) -> Attempt | None:
        return self.attempts[-1] if self.attempts else None
