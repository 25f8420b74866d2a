"""Runs the steps of a model on one device. It owns the KV cache and the sampler, but no RPC."""

from __future__ import annotations

import dataclasses
import uuid
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import numpy as np
import torch

from shared.errors import FailedPreconditionError
from shared.graph_sizes import NUM_PROMPTS, GraphSize
from worker_svc.devices.base import Platform, Stopwatch
from worker_svc.devices.choice import choose_platform
from worker_svc.devices.cuda_graph import graph_sizes
from worker_svc.devices.warm_up import (
    half_drafted,
    plain_decodes,
    tokens_in_a_launch,
    warm_up_steps,
)
from worker_svc.kept_memory.memory import KeptMemory
from worker_svc.kv_cache import (
    TOKEN_ID_BYTES,
    NewTensor,
    TokenCache,
    blocks_that_fit,
    choose_max_model_len,
    copy_blocks,
)
from worker_svc.rank_models.draft_model import DraftModel
from worker_svc.rank_models.info import RunnerInfo
from worker_svc.rank_models.output import Found, Output
from worker_svc.rank_models.rank_model import RankModel
from worker_svc.ranks.distributed import Pipeline, Ranks, TensorParallel
from worker_svc.settings import WorkerSettings
from worker_svc.step.arrays import StepArrays
from worker_svc.step.tensors import StepTensors, upload
from worker_svc.step.wire import Int32s
from worker_svc.step_result import PendingStep
from worker_svc.tier.blocks import CacheBlocks
from worker_svc.tier.key import block_key


class ModelRunner:
    """Runs one rank. Use it from one thread, because torch keeps its number of threads per thread.

    Call `configure`, then `launch` for each step. Between steps the device keeps the KV cache, the
    ids of the cached tokens, and the tokens that the last step sampled.

    Args:
        memory: keeps weights and cache for the next fork, if the device's memory can be kept. If it
            holds weights, none are read, and nothing is warmed up.

    Raises:
        StartError: the model or the settings cannot be served.
    """

    def __init__(
        self,
        settings: WorkerSettings,
        platform: Platform | None = None,
        memory: KeptMemory | None = None,
    ) -> None:
        self._settings = settings
        self._platform = platform = platform or choose_platform(settings)
        device = platform.memory() if memory else None
        self._memory = memory.use(device) if memory and device else None
        self._ranks = Ranks(
            TensorParallel(settings.tensor_rank, settings.tp, settings.batch_invariant),
            Pipeline(settings.stage, settings.pp),
        )
        self._model = RankModel(settings, platform, self._ranks)
        self.config, self._backend = self._model.config, self._model.backend
        self._max_model_len = choose_max_model_len(settings, self.config.max_model_len)
        self._max_num_batched_tokens = platform.choose_num_batched_tokens(settings)
        # The token that each row of the last step sampled, and from max_num_seqs on the tokens that
        # a draft model drafted. Input ids -1-i refer to both.
        self._last_tokens = torch.zeros(
            settings.max_num_seqs * (2 if settings.draft_model else 1),
            dtype=torch.int32,
            device=platform.device,
        )
        self._draft: DraftModel | None = None
        if settings.draft_model:
            self._draft = DraftModel(
                settings, platform, self._ranks, self._model, self._last_tokens
            )
        self._models = [self._model, *([self._draft] if self._draft else [])]
        key = repr(([each.config for each in self._models], settings, platform.ops.layout))
        notes = self._memory.weights.notes(key) if self._memory else None
        fingerprint = self._load(notes)
        self._upload = partial(upload, device=platform.device, pinned=platform.pinned)
        self._output: Output | None = None  # on the last stage
        if head := self._model.decoder.lm_head:
            of_rank = platform, self._ranks.tensor, self.config, head
            self._output = Output(settings, *of_rank, self._last_tokens, self._upload)
        self._allocated_blocks = 0
        self._configured = (0, 0)  # blocks, and prompt tokens in a graph
        self.cache_id = self._memory.cache.id if self._memory else ""
        self.info = RunnerInfo.kept(notes) if notes else self._measure(fingerprint)
        if self._memory and not notes:
            self._memory.weights.keep(key, dataclasses.asdict(self.info))

    @property
    def drafts(self) -> bool:
        """Whether there is a draft model."""
        return self._draft is not None

    def _load(self, notes: Mapping[str, Any] | None) -> str:
        """Makes the models, of the weights that the last fork has kept if it left `notes`, else of
        their files -> the fingerprint of the model that is served."""
        memory = self._memory.weights if self._memory else None
        if memory and notes:
            states = memory.states()
            for each in self._models:
                each.restore(self._max_model_len, states)
            return str(notes["fingerprint"])
        if self._memory:
            self._memory.reset()
        fingerprint, *_ = [each.load(self._max_model_len, memory) for each in self._models]
        return fingerprint

    def _measure(self, fingerprint: str) -> RunnerInfo:
        """Warms up, and computes how many blocks fit into the memory that a step leaves."""
        settings, platform, backend = self._settings, self._platform, self._backend
        activations, graph_tokens = self._warm_up()
        paging, slots = backend.layout.paging, backend.layout.paging.slots_per_block
        cached = sum(each.backend.block_bytes for each in self._models)
        block_bytes = cached + TOKEN_ID_BYTES * slots
        memory = platform.cache_bytes(settings, activations)
        num_blocks = blocks_that_fit(settings, memory, block_bytes, paging, self._max_model_len)
        return RunnerInfo(
            device=str(platform.device),
            dtype=str(self.config.dtype).removeprefix("torch."),
            fingerprint=fingerprint,
            attention_backend=backend.name,
            paging=paging,
            num_blocks=num_blocks,
            max_num_blocks=min(
                platform.memory_bytes() // block_bytes, np.iinfo(np.int32).max // slots
            ),
            max_model_len=self._max_model_len,
            max_num_batched_tokens=self._max_num_batched_tokens,
            vocab_size=self.config.vocab_size,
            graph_tokens=graph_tokens,
        )

    def configure(
        self,
        epoch: int,
        num_blocks: int,
        superseded: Callable[[], bool] = lambda: False,
        keep: str = "",
        graph_tokens: int = 0,
    ) -> None:
        """Joins the other ranks, allocates a KV cache or keeps the one that there is, and captures
        graphs that use it. Sets `cache_id`.

        Args:
            graph_tokens: the maximum of prompt tokens in a step that runs from a CUDA graph.
            superseded: whether to stop waiting for the other ranks because there is a newer epoch.
            keep: the id of the cache to keep. Without one, the contents are unknown.

        Raises:
            FailedPreconditionError: there is no such cache.
            RuntimeError: the other ranks did not join, or there is not enough memory.
            CaptureError: steps cannot run from CUDA graphs.
        """
        if keep and not self._has_cache(keep, num_blocks):
            raise FailedPreconditionError("keep_cache_id: this worker has no such cache")
        if not keep:
            self.forget_cache()
        alone = self._ranks.size == 1
        if not alone or (num_blocks, graph_tokens) != self._configured:
            self._configured = (0, 0)  # until everything below has succeeded
            for each in self._models:
                each.graphs = None
            self._platform.drop_graphs()
            self._ranks.leave()  # otherwise, a lost rank may keep the GPU busy
            if not keep:
                self._allocate(0)  # frees the old cache before the new cache is allocated
            settings = self._settings
            device = self._platform.device
            self._ranks.join(epoch, device, settings.master_addr, settings.master_port, superseded)
            if num_blocks != self._allocated_blocks:
                try:
                    self._allocate(num_blocks, self._memory.cache.tensor if self._memory else None)
                except RuntimeError:
                    self.forget_cache()
                    raise
            if self._platform.captures:
                self._capture(graph_tokens, superseded, lazily=bool(keep))
            self._configured = (num_blocks, graph_tokens)
        if not keep:
            memory = self._memory
            self.cache_id = memory.cache.new_id(num_blocks) if memory else uuid.uuid4().hex

    def cache_blocks(self) -> CacheBlocks:
        """The blocks of the cache, for copies beside steps."""
        platform, tensors = self._platform, [t for each in self._models for t in each.tensors]
        key = partial(block_key, self._settings, self._model, self.info, platform.ops.layout)
        return CacheBlocks(platform, tensors, self._tokens, self._allocated_blocks, key)

    def forget_cache(self) -> None:
        """Notes that the contents of the cache are unknown."""
        self.cache_id = ""
        if self._memory:
            self._memory.cache.forget()

    def _has_cache(self, cache_id: str, num_blocks: int) -> bool:
        if cache_id != self.cache_id or not self._memory or self._allocated_blocks:
            return (cache_id, num_blocks) == (self.cache_id, self._allocated_blocks)
        if not (found := self._memory.cache.find(cache_id, num_blocks)):  # of the last fork
            self.forget_cache()
        return found

    def _capture(self, graph_tokens: int, superseded: Callable[[], bool], *, lazily: bool) -> None:
        largest = GraphSize(self._settings.max_num_seqs, NUM_PROMPTS, graph_tokens)
        pool = self._platform.graph_pool()
        with torch.inference_mode():
            self._model.capture(self._run, largest, pool, superseded, lazily)
            if self._draft:
                self._draft.capture(self._draft.run_padded, largest, pool, superseded, lazily)

    def launch(
        self, step: StepArrays, superseded: Callable[[], bool] = lambda: False
    ) -> PendingStep:
        """Starts `step`, which `worker_svc.step.decode.decode_step` has checked. On a GPU, it
        returns before the step is done, and maybe before the previous step is done.

        Args:
            superseded: whether a newer epoch waits, so that other ranks may be gone.

        Raises:
            CaptureError, SupersededError: as `configure`.
        """
        with torch.inference_mode():
            stopwatch = self._platform.start(self._model.multiply_adds(step))
            if len(step.copies):
                sources, destinations = self._upload(list(np.ascontiguousarray(step.copies.T)))
                caches = [tensor for each in self._models for tensor in each.tensors]
                copy_blocks(caches, self._tokens, sources, destinations)
            num_drafted = 0
            if self._draft:
                step, num_drafted = self._draft.draft(step, superseded)
            found = Found([], [])
            graphs = self._model.graphs
            if graphs and (step.graph or step.decodes_only) and not step.reads_hidden_states:
                tensors, result = graphs.replay(step, superseded)
            else:
                tensors, longest = self._model.to_device(step), int(step.context_lens.max())
                result = self._hidden_states(
                    step, tensors, longest, every_token=step.reads_every_token
                )
                if self._output:
                    result, found = self._output.find(step, tensors, result)
            if self._output:  # then the result is logits
                of_samples = self._output.resample(step, tensors, result, self._tokens)
                found = Found(of_samples + found.logprobs, found.pooled)
            return self._fetch(step, stopwatch, found, num_drafted)

    def run(self, step: StepArrays) -> Int32s:
        """Runs `step` to its end -> the token sampled per row [S]."""
        return self.launch(step).wait()[0]

    def logits(self, step: StepArrays, *, every_token: bool = False) -> torch.Tensor:
        """This rank's logits [N, shard_size] of the N rows of `step` that sample, or after every
        one of its N tokens."""
        with torch.inference_mode():
            tensors, longest = self._model.to_device(step), int(step.context_lens.max())
            hidden = self._hidden_states(step, tensors, longest, every_token=every_token)
            assert self._model.decoder.lm_head
            logits = self._model.decoder.lm_head(hidden)
            return logits if every_token else logits[np.flatnonzero(step.samples)]

    @property
    def waits_for_ranks(self) -> bool:
        """Whether a collective on a CPU is waiting for other ranks right now."""
        return self._ranks.waiting

    @property
    def stage_wait_s(self) -> float:
        """The seconds so far that this rank waited for other stages, on a CPU."""
        return self._ranks.pipeline.waited_s

    @property
    def compiling(self) -> bool:
        """Whether a step may be waiting for a compiler or a capture right now."""
        return self._platform.compiling or any(each.capturing for each in self._models)

    def _allocate(self, num_blocks: int, new: NewTensor | None = None) -> None:
        """Allocates the caches, the model's by `new` if it is given. The next fork need not find a
        draft model's cache, which cannot make a token wrong."""
        size = self._backend.block_size
        self._model.allocate(num_blocks, new)
        if self._draft:
            self._draft.allocate(num_blocks)
        num_parts = num_blocks * self._backend.layout.paging.num_parts
        self._tokens = TokenCache.allocate(num_parts, size, self._platform.device, new)
        self._allocated_blocks = num_blocks

    def _run(self, step: StepArrays, tensors: StepTensors, max_context_len: int) -> torch.Tensor:
        """Runs a step -> this rank's logits [S, shard_size], or nothing [0] in a stage before the
        last one. The tokens go to `_last_tokens`."""
        hidden = self._hidden_states(step, tensors, max_context_len)
        return self._output.sample(hidden, tensors) if self._output else hidden.new_empty(0)

    def _hidden_states(
        self,
        step: StepArrays,
        tensors: StepTensors,
        max_context_len: int,
        *,
        every_token: bool = False,
    ) -> torch.Tensor:
        slots = tensors.of_table(0).slot_mapping
        self._platform.ops.store_tokens(
            self._tokens.slots, slots, tensors.input_ids, self._last_tokens
        )
        return self._model.hidden_states(
            step, tensors, self._last_tokens, max_context_len, every_token=every_token
        )

    def _fetch(
        self,
        step: StepArrays,
        stopwatch: Stopwatch,
        found: Found,
        num_drafted: int,
    ) -> PendingStep:
        results, pooled = [self._last_tokens[: step.num_seqs]], found.pooled
        for each in found.logprobs:
            results += [each.ids, each.values]
        if num_drafted:
            first = self._settings.max_num_seqs
            results.append(self._last_tokens[first : first + num_drafted])
        counts = [each.counts for each in found.logprobs]
        return PendingStep(step.samples, counts, stopwatch.fetch([*results, *pooled]), bool(pooled))

    def _warm_up(self) -> tuple[int, int]:
        """Runs the largest possible prompts and decodes -> the bytes of device memory that a step
        needs besides the weights and the cache, and the maximum of prompt tokens in a graph.

        So kernels are compiled and memory is allocated before the first request.
        """
        platform, max_num_seqs = self._platform, self._settings.max_num_seqs
        prompts, decodes = warm_up_steps(
            max_num_seqs,
            self._max_num_batched_tokens,
            platform.device.type == "cpu",
            self._max_model_len,
            self._backend.block_size,
            len(self._backend.layout.paging.tables),
            self.config.vocab_size,
        )
        decodes = half_drafted(decodes) if self._draft else decodes
        self._allocate(1)
        graph_tokens = tokens_in_a_launch(self.launch, prompts) if platform.captures else 0
        prompts_bytes = platform.measure_peak_bytes(partial(self.run, prompts))
        decodes_bytes = platform.measure_peak_bytes(partial(self.run, decodes))
        if platform.compiles and not platform.captures:
            # Each number of sequences has its own kernels. Capturing graphs would compile them too.
            for size in graph_sizes(max_num_seqs):
                step = plain_decodes(size, self._max_model_len, self._backend.block_size)
                self.run(half_drafted(step) if self._draft else step)
        self._allocate(0)
        if not platform.captures:
            return max(prompts_bytes, decodes_bytes), 0
        # Graphs have a memory pool of their own.
        largest = prompts_bytes * (max_num_seqs + graph_tokens) // prompts.num_tokens
        return prompts_bytes + max(largest, decodes_bytes), graph_tokens
