"""Muon, an optimizer for matrices that makes the momentum orthogonal before it applies it.

Source: Keller Jordan, https://kellerjordan.github.io/posts/muon. `torch.optim.Muon` iterates in
bfloat16, which takes about three times as long as float32 on a CPU without bfloat16 arithmetic.
"""

from collections import defaultdict
from collections.abc import Iterable

import torch
from torch import Tensor


def orthogonalize(matrices: Tensor) -> Tensor:
    """[n, rows, columns] -> the nearest semi-orthogonal matrices, by five Newton-Schulz steps."""
    transposed = matrices.shape[1] > matrices.shape[2]
    x: Tensor = matrices.mT if transposed else matrices
    x = x / (x.norm(dim=(1, 2), keepdim=True) + 1e-7)
    for _ in range(5):
        gram = x @ x.mT
        x = 3.4445 * x + (-4.7750 * gram + 2.0315 * gram @ gram) @ x
    result: Tensor = x.mT if transposed else x
    return result


class Muon(torch.optim.Optimizer):
    """The optimizer. Its steps have the size of AdamW's, so that both share a learning rate."""

    def __init__(
        self,
        params: Iterable[Tensor],
        lr: float,
        momentum: float = 0.95,
        weight_decay: float = 0.01,
    ) -> None:
        super().__init__(params, {"lr": lr, "momentum": momentum, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        for group in self.param_groups:
            by_shape: defaultdict[torch.Size, list[Tensor]] = defaultdict(list)
            for param in group["params"]:
                by_shape[param.shape].append(param)
            for shape, params in by_shape.items():
                updates = torch.stack([self._momentum(p, group["momentum"]) for p in params])
                scale = 0.2 * max(shape) ** 0.5
                for param, update in zip(params, orthogonalize(updates), strict=True):
                    param.mul_(1 - group["lr"] * group["weight_decay"])
                    param.add_(update, alpha=-group["lr"] * scale)

    def _momentum(self, param: Tensor, momentum: float) -> Tensor:
        """Returns the Nesterov momentum of `param`'s gradient."""
        assert param.grad is not None
        average = self.state[param].setdefault("average", torch.zeros_like(param))
        average.lerp_(param.grad, 1 - momentum)
        return param.grad.lerp(average, momentum)
