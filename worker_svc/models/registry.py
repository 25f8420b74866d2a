"""Makes the model of a checkpoint of any family."""

from __future__ import annotations

from functools import partial
from importlib import import_module

from worker_svc.attention.base import Backend
from worker_svc.kernels.ops import Ops
from worker_svc.layers.rotary import rotary_table
from worker_svc.loader import WeightLoader
from worker_svc.models.config import ModelConfig
from worker_svc.models.decoder import EMBEDDING, HEAD, LAYERS, NORM, Decoder, Parts
from worker_svc.ranks.distributed import Pipeline, TensorParallel


def load_model(
    loader: WeightLoader,
    config: ModelConfig,
    max_model_len: int,
    ops: Ops,
    tp: TensorParallel,
    backend: Backend,
    pipeline: Pipeline | None = None,
) -> Decoder:
    """Makes the model of `config`, or the stage of a pipeline, and loads its weights.

    Raises:
        ModelError: a weight is missing, unknown or of another shape, or the model cannot be split
            across this many ranks.
    """
    family = config.family
    module = import_module(f"worker_svc.models.{family.module}")
    sizes = config.head_dim, max_model_len
    tables = {
        rope: loader.computed(partial(rotary_table, *sizes, rope, loader.device))
        for rope in dict.fromkeys(layer.rope for layer in config.layers)
    }
    stage = backend.shape.stage or range(config.num_layers)
    parts = Parts(config, loader, ops, tp, backend, tables, pipeline or Pipeline(), stage)
    model: Decoder = module.build(parts)
    if len(stage) < config.num_layers:
        others = (n for n in range(config.num_layers) if n not in stage)
        loader.skip_under(*(f"{LAYERS}.{n}." for n in others))
        loader.skip(EMBEDDING, NORM, HEAD)
    loader.finish()
    return model
