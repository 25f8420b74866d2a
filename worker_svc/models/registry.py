"""Makes the model of a checkpoint of any family."""

from __future__ import annotations

from collections.abc import Sequence
from importlib import import_module
from typing import Any, Protocol

import torch

from worker_svc.attention.base import Backend
from worker_svc.distributed import TensorParallel
from worker_svc.kernels.ops import Ops
from worker_svc.layers.embedding import VocabParallelHead
from worker_svc.layers.rotary import rotary_table
from worker_svc.loader import WeightLoader
from worker_svc.models.config import ModelConfig
from worker_svc.models.decoder import Parts
from worker_svc.step.tensors import StepTensors


class Model(Protocol):
    """The part of a model that one rank computes."""

    layers: Sequence[Any]
    lm_head: VocabParallelHead

    def hidden_states(
        self,
        tensors: StepTensors,
        last_tokens: torch.Tensor,
        caches: Sequence[torch.Tensor],
        metadata: Any,
        *,
        every_token: bool = False,
    ) -> torch.Tensor:
        """Runs the layers on a step -> the input of `lm_head`, which is the normalized hidden
        states [S, hidden] of each sequence's last token, or [T, hidden] of every token.

        last_tokens [R] int32 are the tokens that the previous step sampled. caches has one cache
        per layer, and metadata is the backend's plan of the step.
        """
        ...


def load_model(
    loader: WeightLoader,
    config: ModelConfig,
    max_model_len: int,
    ops: Ops,
    tp: TensorParallel,
    backend: Backend,
) -> Model:
    """Makes the model of `config` and loads its weights.

    Raises:
        ModelError: a weight is missing, unknown or of another shape, or the model cannot be split
            across this many ranks.
    """
    family = config.family
    module = import_module(f"worker_svc.models.{family.module}")
    cos_sin = rotary_table(config.head_dim, max_model_len, config.rope, loader.device)
    parts = Parts(config, loader, ops, tp, backend, cos_sin)
    model: Model = module.build(parts)
    loader.finish()
    return model
