"""A request as the frontend holds it: checked, tokenized, with every default filled in."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from frontend.callers.tenants import Tenant
from shared.sampling_params import Grammar, Pooling, SamplingNumbers


@dataclass(frozen=True, slots=True)
class Sampling(SamplingNumbers):
    """Says how completions are made and where they end. The defaults below have no effect."""

    seed: int  # completion number i has seed + i
    max_tokens: int
    eos_token_ids: tuple[int, ...]  # empty when the request ignores them
    stop_token_ids: tuple[int, ...]
    stop: tuple[str, ...]
    min_tokens: int = 0
    logit_bias: tuple[tuple[int, float], ...] = ()  # by token id
    bad_words: tuple[tuple[int, ...], ...] = ()  # token ids
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    n: int = 1
    beam_width: int = 0  # 0: sample
    length_penalty: float = 0.0  # for beam search
    grammar: Grammar | None = None
    include_stop: bool = False  # whether the text includes the stop string or token
    show_special: bool = False  # whether the text includes special tokens
    pooling: Pooling = Pooling.NONE  # what is made of the prompt's hidden states
    yes_id: int = 0  # of a score, as in `scheduler.proto`
    no_id: int = 0

    @property
    def num_completions(self) -> int:
        return self.beam_width or self.n

    @property
    def silent_ids(self) -> tuple[int, ...]:
        """The tokens that end a completion, if its text does not include them."""
        return () if self.include_stop else self.eos_token_ids + self.stop_token_ids


@dataclass(frozen=True, slots=True)
class GenerationRequest:
    """A prompt, and the completions to make of it. `deadline` is by `time.monotonic`."""

    request_id: str
    prompt_ids: Sequence[int]
    sampling: Sampling
    deadline: float | None
    priority: int = 0
    cache_salt: str = ""  # as it is sent to the engine
    # Tokens of the completion that the client already has. Only the last one may end it.
    resume_token_ids: Sequence[int] = ()
    client: Tenant | None = None  # None: anonymous
    engine: str = ""  # the name of the engine that it asks for; empty: any
    may_store: bool = True  # blocks of it in the workers' directory
