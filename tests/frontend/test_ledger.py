"""The counts that a ledger keeps of the completions at an engine."""

from __future__ import annotations

from collections.abc import Sequence

from frontend.engines.ledger import Ledger
from frontend.engines.placement import EngineLoad, Fit
from frontend.engines.prefix_index import PrefixIndex
from frontend.engines.token_stream import TokenStream, Waiter, WakeUps
from frontend.request import GenerationRequest, Sampling

SAMPLING = Sampling(seed=0, max_tokens=100, eos_token_ids=(), stop_token_ids=(), stop=())


def test_a_prompt_is_pending_until_its_first_completion_begins_or_ends() -> None:
    load, index = EngineLoad(), PrefixIndex(4)
    ledger = Ledger(0, load)
    names: Sequence[int] = [11, 12]
    for number, end in ((1, ledger.remove), (3, lambda n: ledger.settle(ledger.entries[n]))):
        request = GenerationRequest("r", [1], SAMPLING, None)
        pair = [TokenStream(number + i, request, Waiter(WakeUps()), i) for i in range(2)]
        ledger.add(pair, Fit(7, 0, names, index))
        assert load.unstarted_tokens == 7
        assert index.matches(names, [0]) == {0: 2}
        end(number)
        assert load.unstarted_tokens == 0
        assert index.matches(names, [0]) == {0: 0}
