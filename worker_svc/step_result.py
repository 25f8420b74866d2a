"""The results of a step, and a step whose results the device has not sent yet."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from worker_svc.devices.base import PendingArrays
from worker_svc.sampling.logprobs import requested_entries
from worker_svc.step.wire import Float32s, Int32s

_NO_IDS, _NO_VALUES = np.zeros(0, "<i4"), np.zeros(0, "<f4")


class StepResult(NamedTuple):
    """The results of a step of S sequences."""

    token_ids: Int32s  # [S], -1 for rows that sample nothing
    seconds: float
    logprob_ids: Int32s  # laid out as in `StepResponse`
    logprob_values: Float32s  # laid out as in `StepResponse`
    draft_ids: Int32s = _NO_IDS  # of the rows whose tokens were drafted
    hidden_states: Float32s = _NO_VALUES  # laid out as in `StepResponse`


@dataclass(frozen=True)
class PendingStep:
    """A step that the device may still be computing."""

    samples: NDArray[np.bool_]
    logprob_counts: list[Int32s]  # of each `Logprobs`
    # The tokens, then the ids and the values of each `Logprobs`, then any drafted ids, then any
    # hidden states.
    arrays: PendingArrays
    is_pooled: bool = False  # whether there are hidden states

    def ready(self) -> bool:
        """Whether `wait` would return at once."""
        return self.arrays.ready()

    def wait(self) -> StepResult:
        """Waits for the results.

        Raises:
            RuntimeError: the device failed.
        """
        (tokens, *others), seconds = self.arrays.wait()
        token_ids = np.where(self.samples, tokens, -1).astype("<i4")
        num_logprobs = 2 * len(self.logprob_counts)
        logprobs, others = others[:num_logprobs], others[num_logprobs:]
        hidden_states = others.pop() if self.is_pooled else _NO_VALUES
        rest = (others[0] if others else _NO_IDS), hidden_states
        if not logprobs:
            return StepResult(token_ids, seconds, _NO_IDS, _NO_VALUES, *rest)
        requested = [
            requested_entries(*of_rows)
            for of_rows in zip(self.logprob_counts, logprobs[::2], logprobs[1::2], strict=True)
        ]
        ids, values = map(np.concatenate, zip(*requested, strict=True))
        return StepResult(token_ids, seconds, ids, values, *rest)
