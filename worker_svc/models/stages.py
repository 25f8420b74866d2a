"""Divides the layers of a model over pipeline stages."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

from worker_svc.errors import ModelError
from worker_svc.models.config import ModelConfig

_CONTEXT = 2048  # tokens, to which attention is counted


def layers_of_stages(
    config: ModelConfig, num_stages: int, given: Sequence[int] = ()
) -> list[range]:
    """The layers of each stage: as many as are `given`, or such that the largest stage has as few
    multiply-adds per decoded token as possible. The last stage also has the head. To look up an
    embedding takes no time.

    Raises:
        ModelError: there are fewer layers than stages, or other numbers are given.
    """
    num_layers = config.num_layers
    if num_layers < num_stages:
        raise ModelError(f"pp: {num_stages} stages, but the model has {num_layers} layers")
    if given and (len(given) != num_stages or sum(given) != num_layers):
        raise ModelError(
            f"pp_layers: {','.join(map(str, given))} must be {num_stages} numbers, and their sum "
            f"the model's {num_layers} layers"
        )
    sizes = list(given) or _balanced(config, num_stages)
    ends = [sum(sizes[: number + 1]) for number in range(num_stages)]
    return [range(end - size, end) for size, end in zip(sizes, ends, strict=True)]


def _balanced(config: ModelConfig, num_stages: int) -> list[int]:
    attention = 2 * _CONTEXT * config.num_heads * config.head_dim
    costs = [config.layer_weights(n, active=True) + attention for n in range(config.num_layers)]
    costs[-1] += config.head_weights
    sums = [sum(costs[:end]) for end in range(len(costs) + 1)]

    @cache
    def best(first: int, stages: int) -> tuple[int, list[int]]:
        """The cost of the largest of the stages that have the layers from `first` on, and the
        number of layers of each."""
        if stages == 1:
            return sums[-1] - sums[first], [len(costs) - first]
        choices = []
        for end in range(first + 1, len(costs) - stages + 2):
            largest, others = best(end, stages - 1)
            choices.append((max(largest, sums[end] - sums[first]), [end - first, *others]))
        return min(choices)

    return best(0, num_stages)[1]
