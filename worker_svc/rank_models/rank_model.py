"""A model on one rank: its weights, its KV cache, and how the device runs its layers."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np
import psutil
import torch

from shared.graph_sizes import GraphSize
from worker_svc.devices.base import Platform
from worker_svc.devices.cuda_graph import StepGraphs
from worker_svc.errors import ModelError
from worker_svc.kept_memory.weights import State, WeightMemory
from worker_svc.kv_cache import NewTensor, choose_max_model_len
from worker_svc.loader import KeptLoader, WeightLoader
from worker_svc.models.config import load_model_config
from worker_svc.models.decoder import Decoder, attention_shape
from worker_svc.models.registry import load_model
from worker_svc.models.stages import layers_of_stages
from worker_svc.ranks.distributed import Ranks
from worker_svc.settings import WorkerSettings
from worker_svc.step.arrays import StepArrays
from worker_svc.step.tensors import StepTensors, upload_step
from worker_svc.weights.files import WeightReader
from worker_svc.weights.fingerprint import ModelFiles
from worker_svc.weights.packed_cache import open_cache
from worker_svc.weights.quantization.choice import choose_quantization

_READING = 8  # multiply-adds that a CPU does in the time that it takes to read one weight
_BITS = {"int8": 8, "int4": 4, "fp8": 8}  # of a weight, by format


class RankModel:
    """A model on one rank. Call `load` or `restore`, then `allocate`, then run steps.

    Args:
        settings: say which model it is, and in which formats it runs.

    Raises:
        StartError: the model or the settings cannot be served.
    """

    def __init__(self, settings: WorkerSettings, platform: Platform, ranks: Ranks) -> None:
        config = load_model_config(Path(settings.model))
        dtype = platform.choose_dtype(settings.dtype, config.dtype)
        self.config = config = dataclasses.replace(config, dtype=dtype)
        self._quantization = choose_quantization(settings.quantization, config.quantization)
        # A draft model needs all blocks of the target, whatever their windows are.
        longest = 0
        if not settings.draft_model:
            longest = choose_max_model_len(settings, config.max_model_len)
        given = [int(each) for each in settings.pp_layers.split(",") if each]
        stages = layers_of_stages(config, settings.pp, given)
        self.stage = stages[settings.stage]
        shape = attention_shape(
            config, settings.tp, platform.device, settings.kv_dtype, longest, self.stage
        )
        self.backend = platform.attention_backend(settings, shape)
        self.tensors: Sequence[torch.Tensor] = []  # of the cache, see `CacheLayout`
        self.caches: Sequence[torch.Tensor] = []  # one per layer
        self.graphs: StepGraphs | None = None
        self._settings = settings
        self._platform = platform
        self._ranks = ranks
        self._weights_per_token = self.num_weights(active=True)

    def load(self, max_model_len: int, memory: WeightMemory | None = None) -> str:
        """Reads the model's files -> its fingerprint.

        Args:
            max_model_len: the maximum number of tokens in a sequence.
            memory: keeps the weights for the next fork.

        Raises:
            ModelError: the files cannot be served.
        """
        self._check_memory()
        settings, ops, dtype = self._settings, self._platform.ops, self.config.dtype
        quantization, model_dir = self._quantization, Path(settings.model)
        files, cache = ModelFiles(model_dir), None
        if quantization.format != "none":
            packing = quantization.name, ops.layout, dtype, settings.tensor_rank, settings.tp
            layers = self.stage if settings.pp > 1 else None
            cache = open_cache(model_dir, files.fingerprint, *packing, layers)
        copies = self._platform.weight_copies()
        with WeightReader(model_dir, dtype, self._platform.device, copies) as reader:
            loader = WeightLoader(reader, ops, quantization, cache, memory)
            self._make(loader, max_model_len)
        files.check_unchanged()
        if cache:
            cache.save()
        return f"{files.fingerprint}-{quantization.name}"

    def _check_memory(self) -> None:
        """Checks that the weights fit, because Linux kills a process that takes too much memory.

        Raises:
            ModelError: they do not.
        """
        bits = _BITS.get(self._quantization.format, 8 * self.config.dtype.itemsize)
        size = self.num_weights(active=False) * bits // 8
        free = psutil.virtual_memory().available
        if self._platform.device.type == "cpu" and size > free:
            raise ModelError(
                f"memory: the weights need {size >> 20} MiB, but only {free >> 20} MiB are free; "
                "use quantization=int8 or int4, or end other processes"
            )

    def restore(self, max_model_len: int, states: Iterator[State]) -> None:
        """Makes the model of the weights that the last fork has kept."""
        platform = self._platform
        loader = KeptLoader(states, platform.ops, self.config.dtype, platform.device)
        self._make(loader, max_model_len)

    def _make(self, loader: WeightLoader, max_model_len: int) -> None:
        platform, ranks, backend = self._platform, self._ranks, self.backend
        self._max_model_len = max_model_len
        self.decoder: Decoder = load_model(
            loader, self.config, max_model_len, platform.ops, ranks.tensor, backend, ranks.pipeline
        )
        self._run_layers: Callable[..., torch.Tensor] = platform.prepare(
            self.decoder.hidden_states, backend, ranks
        )

    def num_weights(self, *, active: bool) -> int:
        """The number of this rank's weights in products, see `ModelConfig.layer_weights`."""
        config = self.config
        num_weights = sum(config.layer_weights(n, active=active) for n in self.stage)
        if self._ranks.pipeline.is_last:
            num_weights += config.head_weights
        return num_weights // self._settings.tp

    def multiply_adds(self, step: StepArrays) -> int:
        """This rank's multiply-adds in a step, with `_READING` more for each weight to read."""
        config = self.config
        attended = int(np.dot(step.query_lens.astype(np.int64), step.context_lens))
        attention = 2 * attended * len(self.stage) * config.num_heads * config.head_dim
        products = (len(step.input_ids) + _READING) * self._weights_per_token
        return products + attention // self._settings.tp

    def allocate(self, num_blocks: int, new: NewTensor | None = None) -> None:
        """Allocates a cache of `num_blocks` blocks, by `new` if it is given. 0 frees the cache."""
        self.tensors = self.backend.allocate(num_blocks, new) if num_blocks else []
        self.caches = self.backend.layout.layers_of(self.tensors) if num_blocks else []

    def capture(
        self,
        run: Callable[[StepArrays, StepTensors, int], torch.Tensor],
        largest: GraphSize,
        pool: object,
        superseded: Callable[[], bool],
        lazily: bool,
    ) -> None:
        """Captures graphs of `run`, which gets a padded step, its columns on the device, and the
        maximum of tokens in a sequence. See `StepGraphs`."""
        max_model_len = self._max_model_len
        self.graphs = StepGraphs(
            self._platform,
            self.backend,
            lambda step, tensors: run(step, tensors, max_model_len),
            largest,
            max_model_len,
            pool,
            superseded,
            lazily,
        )

    @property
    def capturing(self) -> bool:
        """Whether a graph is being captured."""
        return self.graphs is not None and self.graphs.capturing

    def to_device(self, step: StepArrays) -> StepTensors:
        plan_column, platform = self.backend.plan_column(step), self._platform
        return upload_step(step, plan_column, platform.device, pinned=platform.pinned)

    def hidden_states(
        self,
        step: StepArrays,
        tensors: StepTensors,
        last_tokens: torch.Tensor,
        max_context_len: int,
        *,
        every_token: bool = False,
    ) -> torch.Tensor:
        """Runs the layers on a step, whose columns on the device are `tensors`. See
        `Decoder.hidden_states`, and `AttentionBackend.plan` for max_context_len."""
        metadata = [
            self.backend.plan(step, tensors.of_table(number), max_context_len)
            for number in range(len(self.backend.layout.paging.tables))
        ]
        return self._run_layers(
            tensors, last_tokens, self.caches, metadata, every_token=every_token
        )
