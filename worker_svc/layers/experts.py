"""Mixtures of experts, whose experts are split across the ranks."""

from __future__ import annotations

import torch

from worker_svc.kernels.ops import Experts, Ops
from worker_svc.loader import Rows, WeightLoader
from worker_svc.ranks.distributed import TensorParallel


class MixtureOfExperts:
    """Gated feed-forward layers, of which each token takes those with the largest router logits.

    Source: Shazeer et al., "Outrageously Large Neural Networks" (2017).

    Args:
        name: of `gate`, which is the router, and of `experts` in the checkpoint.
        size: the intermediate size of an expert.
    """

    def __init__(
        self,
        loader: WeightLoader,
        ops: Ops,
        tp: TensorParallel,
        name: str,
        experts: Experts,
        hidden_size: int,
        size: int,
    ) -> None:
        self._router = loader.router(f"{name}.gate", experts.count, hidden_size)
        names = [f"{name}.experts.{number}" for number in range(experts.count)]
        own = names[experts.of_rank.start : experts.of_rank.stop]
        gate_up = [
            [Rows(f"{each}.{part}_proj", 0, size) for part in ("gate", "up")] for each in own
        ]
        self._gate_up = loader.experts(gate_up, hidden_size)
        down = [[Rows(f"{each}.down_proj", 0, hidden_size)] for each in own]
        self._down = loader.experts(down, size)
        projections = "gate_proj", "up_proj", "down_proj"
        loader.skip(*(f"{each}.{part}" for each in {*names} - {*own} for part in projections))
        self._ops, self._tp, self._experts = ops, tp, experts

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """[T, hidden] -> [T, hidden]"""
        logits = self._router.matmul(x.float(), None)
        mixed = self._ops.mix_experts(x, logits, self._gate_up, self._down, self._experts)
        return self._tp.all_reduce(mixed)
