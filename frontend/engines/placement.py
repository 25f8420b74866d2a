"""Chooses the engine on which a request gets its first token soonest.

An engine first computes the prompts that wait there, then the uncached part of the request's own
prompt, at a pace that it measures. The request's own prompt counts twice, because it delays the
requests behind it. An engine that has many more sequences than the others is left out, so that its
cached prefixes do not attract every request.

The cost function follows NVIDIA Dynamo's KV router (prefill tokens after overlap, and active
load), but in seconds instead of blocks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from frontend.engines.prefix_index import Name, PrefixIndex
from shared.pb import scheduler_pb2 as pb

_OWN_WEIGHT = 2.0  # of the seconds that the request's own prompt takes
_UNKNOWN_TOKEN_S = 1e-5  # until an engine has computed a prompt
# An engine that takes up to this much longer than the best engine counts as equally good. A prompt
# that is computed again delays other prompts and evicts their blocks.
_EQUAL_FACTOR, _EQUAL_S = 2.0, 0.002
# An engine is left out if its sequences exceed the mean by both this factor and this number.
_MAX_IMBALANCE, _MIN_IMBALANCE = 1.25, 4


@dataclass(frozen=True)
class Fit:
    """A prompt's fit at an engine: numbers of tokens, and the blocks to compute. `missing` has the
    names of these blocks in `index`, which has the engine's blocks."""

    uncached_tokens: int = 0
    cached_tokens: int = 0
    missing: Sequence[Name] = ()
    index: PrefixIndex | None = None


@dataclass
class EngineLoad:
    """An engine's load: its last report, and the requests that this frontend has sent since."""

    reported: pb.GetLoadResponse = field(default_factory=pb.GetLoadResponse)
    # This frontend's sequences, and the uncached tokens of its prompts without a first token. Both
    # are counted now and at the last report.
    num_open: int = 0
    unstarted_tokens: int = 0
    num_open_then: int = 0
    unstarted_then: int = 0

    def update(self, load: pb.GetLoadResponse) -> None:
        """Replaces the engine's report."""
        self.reported = load
        self.num_open_then, self.unstarted_then = self.num_open, self.unstarted_tokens

    @property
    def num_sequences(self) -> int:
        reported = self.reported.running + self.reported.waiting
        return max(reported + self.num_open - self.num_open_then, self.num_open)

    def first_token_s(self, uncached_tokens: int, token_s: float) -> float:
        """The expected seconds to the first token of a prompt with `uncached_tokens` to compute,
        which are weighted. `token_s` is used until the engine's own pace is known."""
        reported = self.reported
        waiting = reported.waiting_uncached_tokens + self.unstarted_tokens - self.unstarted_then
        waiting = max(waiting, self.unstarted_tokens)
        each = reported.prompt_token_s or token_s
        return reported.queue_s + (waiting + _OWN_WEIGHT * uncached_tokens) * each


def choose(options: Sequence[tuple[EngineLoad, int]]) -> int:
    """The index of the best engine. `options`: each engine's load, and the number of a prompt's
    tokens that it would compute."""
    loads = [load for load, _ in options]
    mean = sum(load.num_sequences for load in loads) / len(loads)
    limit = max(_MAX_IMBALANCE * mean, mean + _MIN_IMBALANCE)
    known = [load.reported.prompt_token_s for load in loads if load.reported.prompt_token_s]
    token_s = sum(known) / len(known) if known else _UNKNOWN_TOKEN_S
    seconds = {
        place: load.first_token_s(uncached, token_s)
        for place, (load, uncached) in enumerate(options)
        if load.num_sequences <= limit
    }
    enough = min(seconds.values()) * _EQUAL_FACTOR + _EQUAL_S

    def order(place: int) -> tuple[int, int, int]:
        """The sort key of equally good engines. An engine with more of the prompt comes first, then
        one with fewer sequences, so that new prefixes are spread over the caches."""
        load, uncached = options[place]
        return uncached, load.num_sequences, -load.reported.blocks_free

    return min((place for place, each in seconds.items() if each <= enough), key=order)
