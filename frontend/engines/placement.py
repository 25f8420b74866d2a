"""Chooses the engine on which a request has its first token soonest.

The time to the first token is that of the prompts that wait there, and of what of the request's own
prompt is not in that engine's cache, at the pace that the engine measures. A prompt computed again
delays those behind it as well, so that its own time counts twice. Engines that have many more
sequences than others are left out: their prefixes do not draw everything to them.

After the cost function of NVIDIA Dynamo's KV router (prefill tokens after overlap, and active
load), in seconds rather than in blocks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from shared.pb import scheduler_pb2 as pb

_OWN_WEIGHT = 2.0  # of the seconds that the request's own prompt takes
_UNKNOWN_TOKEN_S = 1e-5  # until an engine has computed a prompt
# Up to so much longer than the shortest time is as good: a prompt that is computed again delays
# others and evicts what they need, and costs more than it looks from one request.
_EQUAL_FACTOR, _EQUAL_S = 2.0, 0.002
# An engine is left out that has more sequences than this, by factor and number, beyond the mean.
_MAX_IMBALANCE, _MIN_IMBALANCE = 1.25, 4


@dataclass
class EngineLoad:
    """An engine's load, as it told last, and what this frontend has sent there since."""

    told: pb.GetLoadResponse = field(default_factory=pb.GetLoadResponse)
    # This frontend's part: sequences, and tokens of prompts that have no first token yet; now, and
    # when the engine told.
    num_open: int = 0
    unstarted_tokens: int = 0
    num_open_then: int = 0
    unstarted_then: int = 0

    def tell(self, load: pb.GetLoadResponse) -> None:
        """Takes in what the engine tells."""
        self.told = load
        self.num_open_then, self.unstarted_then = self.num_open, self.unstarted_tokens

    @property
    def num_sequences(self) -> int:
        told = self.told.running + self.told.waiting + self.num_open - self.num_open_then
        return max(told, self.num_open)

    def first_token_s(self, uncached_tokens: int, token_s: float) -> float:
        """The expected seconds to the first token of a prompt with so many tokens to compute, its
        own weighted; `token_s` stands for the engine's pace until that is known."""
        told = self.told
        waiting = told.waiting_uncached_tokens + self.unstarted_tokens - self.unstarted_then
        waiting = max(waiting, self.unstarted_tokens)
        each = told.prompt_token_s or token_s
        return told.queue_s + (waiting + _OWN_WEIGHT * uncached_tokens) * each


def choose(options: Sequence[tuple[EngineLoad, int]]) -> int:
    """The place of the best of several engines, given each one's load and the tokens of a prompt
    that it would compute."""
    loads = [load for load, _ in options]
    mean = sum(load.num_sequences for load in loads) / len(loads)
    limit = max(_MAX_IMBALANCE * mean, mean + _MIN_IMBALANCE)
    known = [load.told.prompt_token_s for load in loads if load.told.prompt_token_s]
    token_s = sum(known) / len(known) if known else _UNKNOWN_TOKEN_S
    seconds = {
        place: load.first_token_s(uncached, token_s)
        for place, (load, uncached) in enumerate(options)
        if load.num_sequences <= limit
    }
    enough = min(seconds.values()) * _EQUAL_FACTOR + _EQUAL_S

    def order(place: int) -> tuple[int, int, int]:
        """Of engines that are as good as each other, the one with most of the prompt, then with
        least else: new prefixes are spread over the caches."""
        load, uncached = options[place]
        return uncached, load.num_sequences, -load.told.blocks_free

    return min((place for place, each in seconds.items() if each <= enough), key=order)
