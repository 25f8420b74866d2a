"""Decides which steps with prompts run from CUDA graphs."""

from __future__ import annotations

from collections import Counter

import structlog

from scheduler_svc.core.step import Step
from shared.graph_sizes import GraphSize, graph_size

log = structlog.get_logger(__name__)

_MAX_LOSSES = 2  # the first one may have another cause


class PromptGraphs:
    """Has a step run from a graph if its padded size was needed before in the epoch. So a size that
    is needed once costs no capture."""

    def __init__(self) -> None:
        self._limits = (0, 0)
        self._uses = Counter[GraphSize]()
        self._capturing: dict[int, GraphSize] = {}  # by the id of a step that is not answered yet
        self._losses = Counter[GraphSize]()  # of the workers, while they captured a size

    def begin(self, max_num_seqs: int, max_tokens: int) -> None:
        """Begins an epoch with these limits, see `graph_size`. A size is not tried again if the
        workers were lost twice while they captured it."""
        self._limits = max_num_seqs, max_tokens
        self._uses.clear()
        for size in {*self._capturing.values()}:
            self._losses[size] += 1
            log.warning(
                "workers lost while they captured a graph",
                losses=self._losses[size],
                **size._asdict(),
            )
        self._capturing.clear()

    def has(self, step: Step, step_id: int) -> bool:
        """Whether a step runs from a graph, which the workers capture if it is the first one."""
        lens = [row.num_tokens for row in step.rows[step.num_decodes :] if row.num_tokens > 1]
        size = graph_size(len(step.rows) - len(lens), len(lens), sum(lens), *self._limits)
        if size is None or self._losses[size] == _MAX_LOSSES:
            return False
        self._uses[size] += 1
        if self._uses[size] == 2:
            self._capturing[step_id] = size
        return self._uses[size] > 1

    def answered(self, step_id: int) -> None:
        """Notes that the workers have answered a step."""
        self._capturing.pop(step_id, None)
