"""Runs steps: the model, its KV cache and its sampler on one device, without any RPC."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from numpy.typing import NDArray

from shared.config import WorkerSettings
from worker_svc.config import find_model_dir, load_model_config
from worker_svc.cuda_graph import DecodeGraphs
from worker_svc.distributed import TensorParallel
from worker_svc.errors import StartError
from worker_svc.kv_cache import blocks_that_fit
from worker_svc.layers.embedding import VocabPartition
from worker_svc.models.qwen3 import Qwen3ForCausalLM, attention_shape
from worker_svc.platforms.base import PendingTokens, Platform
from worker_svc.sampler import Sampler
from worker_svc.step import Int32s, Step
from worker_svc.step_tensors import StepTensors, columns, pack, unpack
from worker_svc.weights import WeightReader, model_fingerprint

# On a CPU a few tokens warm up: a full step of a large model takes minutes there.
CPU_WARM_UP_TOKENS = 8


@dataclass(frozen=True)
class RunnerInfo:
    """What a loaded model can do."""

    device: str
    dtype: str
    fingerprint: str
    attention_backend: str
    block_size: int  # tokens
    num_blocks: int  # that fit
    max_model_len: int  # tokens
    vocab_size: int


@dataclass(frozen=True)
class PendingStep:
    """A step that the device may still be working on."""

    samples: NDArray[np.bool_]
    tokens: PendingTokens

    def ready(self) -> bool:
        """Whether `wait` would return at once."""
        return self.tokens.ready()

    def wait(self) -> tuple[Int32s, float]:
        """-> the token sampled per row [S], -1 for rows that sample nothing, and the seconds that
        the step took.

        Raises:
            RuntimeError: the device failed.
        """
        tokens, seconds = self.tokens.wait()
        return np.where(self.samples, tokens, -1).astype("<i4"), seconds


class ModelRunner:
    """One rank. Use from one thread: torch keeps its number of threads per thread.

    `configure`, then `launch` step after step. Between steps the KV cache and the tokens of the
    last step stay on the device, nothing else.

    Raises:
        StartError: the model or the settings cannot be served.
    """

    def __init__(self, settings: WorkerSettings, platform: Platform | None = None) -> None:
        platform = platform or choose_platform(settings)
        model_dir = find_model_dir(settings.model)
        config = load_model_config(model_dir)
        config = dataclasses.replace(
            config, dtype=platform.choose_dtype(settings.dtype, config.dtype)
        )
        max_model_len = _max_model_len(settings, config.max_model_len)
        shape = attention_shape(config, settings.tp, platform.device)

        self._settings = settings
        self._platform = platform
        self._max_model_len = max_model_len
        self._tp = TensorParallel(settings.rank, settings.tp)
        self._backend = platform.attention_backend(settings, shape)
        with WeightReader(model_dir, config.dtype, platform.device) as reader:
            self._model = Qwen3ForCausalLM(
                reader, config, max_model_len, platform.ops, self._tp, self._backend
            )
        vocab = VocabPartition(config.vocab_size, settings.rank, settings.tp)
        self._sampler = Sampler(vocab, self._tp, platform.ops)
        # What each row of the last step sampled.
        self._last_tokens = torch.zeros(
            settings.max_num_seqs, dtype=torch.int32, device=platform.device
        )
        self._caches: list[torch.Tensor] = []
        self._num_blocks = 0
        self._graphs: DecodeGraphs | None = None
        activations = self._warm_up()
        self.info = RunnerInfo(
            device=str(platform.device),
            dtype=str(config.dtype).removeprefix("torch."),
            fingerprint=model_fingerprint(model_dir),
            attention_backend=self._backend.name,
            block_size=self._backend.block_size,
            num_blocks=blocks_that_fit(
                settings,
                platform.cache_bytes(settings, activations),
                shape.cache_bytes_per_token * self._backend.block_size,
                self._backend.block_size,
                max_model_len,
            ),
            max_model_len=max_model_len,
            vocab_size=config.vocab_size,
        )

    def configure(self, epoch: int, num_blocks: int) -> None:
        """Joins the other ranks and allocates an empty KV cache, whose graphs are captured.

        Raises:
            RuntimeError: the other ranks did not come, or there is not enough memory.
        """
        alone = self._tp.size == 1
        if alone and num_blocks == self._num_blocks:
            return  # nobody reads what an earlier epoch wrote
        self._graphs = None
        self._caches, self._num_blocks = [], 0  # free the old one before the new one is allocated
        settings = self._settings
        device = self._platform.device
        self._tp.join(epoch, device, settings.master_addr, settings.master_port)
        self._caches = self._backend.allocate(num_blocks)
        self._num_blocks = num_blocks
        if self._platform.captures:
            with torch.inference_mode():
                self._graphs = DecodeGraphs(
                    self._platform,
                    self._backend,
                    lambda step, tensors: self._run(step, tensors, self._max_model_len),
                    settings.max_num_seqs,
                    -(-self._max_model_len // self._backend.block_size),
                )

    def launch(self, step: Step) -> PendingStep:
        """Starts `step`, which has been checked (`worker_svc.step.decode_step`). On a GPU it
        returns before the step, or even the one before it, is done."""
        with torch.inference_mode():
            stopwatch = self._platform.start()
            if self._graphs and step.decodes_only:
                self._graphs.replay(step)
            else:
                self._run(step, self._to_device(step), int(step.context_lens.max()))
            return PendingStep(step.samples, stopwatch.fetch(self._last_tokens[: step.num_seqs]))

    def run(self, step: Step) -> Int32s:
        """`launch` and wait -> the token sampled per row [S]."""
        return self.launch(step).wait()[0]

    def logits(self, step: Step) -> torch.Tensor:
        """This rank's logits [N, shard_size] of the N rows of `step` that sample."""
        with torch.inference_mode():
            tensors = self._to_device(step)
            logits = self._forward(step, tensors, int(step.context_lens.max()))
            return logits[np.flatnonzero(step.samples)]

    def is_lost(self, error: Exception) -> bool:
        """Whether no step can succeed in this process after `error`."""
        return self._platform.is_lost(error)

    def _run(self, step: Step, tensors: StepTensors, max_context_len: int) -> None:
        logits = self._forward(step, tensors, max_context_len)
        tokens = self._sampler(logits, tensors.temperatures, tensors.uniforms)
        self._last_tokens[: len(tokens)] = tokens

    def _forward(self, step: Step, tensors: StepTensors, max_context_len: int) -> torch.Tensor:
        metadata = self._backend.plan(step, tensors, max_context_len)
        return self._model.forward(tensors, self._last_tokens, self._caches, metadata)

    def _to_device(self, step: Step) -> StepTensors:
        arrays = columns(step, self._backend.column(step))
        host = pack(arrays, pinned=self._platform.pinned)
        device = host.to(self._platform.device, non_blocking=True)
        return unpack(device, [len(array) for array in arrays])

    def _warm_up(self) -> int:
        """Runs the largest prompts and decodes there can be, so that kernels are compiled and
        memory is taken before the first request -> the bytes of device memory that steps need
        beside the weights and the cache."""
        settings = self._settings
        most_tokens, most_seqs = settings.max_num_batched_tokens, settings.max_num_seqs
        longest = self._max_model_len
        if self._platform.device.type == "cpu":
            most_tokens, most_seqs, longest = CPU_WARM_UP_TOKENS, 1, CPU_WARM_UP_TOKENS
        most_seqs = min(most_seqs, most_tokens)
        longest = min(longest, self._max_model_len)
        shares = np.diff(np.linspace(0, most_tokens, most_seqs + 1).astype(np.int32))
        prompts = np.minimum(shares, longest)
        self._caches = self._backend.allocate(1)
        measure = self._platform.peak_bytes
        prompts_bytes = measure(partial(self.run, self._dummy_step(prompts, prompts)))
        ones = np.ones_like(prompts)
        decodes_bytes = measure(partial(self.run, self._dummy_step(ones, ones * longest)))
        self._caches = []
        # Graphs have a pool of memory of their own.
        if self._platform.captures:
            return prompts_bytes + decodes_bytes
        return max(prompts_bytes, decodes_bytes)

    def _dummy_step(self, query_lens: Int32s, context_lens: Int32s) -> Step:
        """All in one block."""
        size = self._backend.block_size
        starts = context_lens - query_lens
        positions = np.concatenate(list(map(np.arange, starts, context_lens))).astype(np.int32)
        offsets = np.concatenate(([0], np.cumsum(-(-context_lens // size)))).astype(np.int32)
        num_seqs = len(query_lens)
        return Step(
            step_id=0,
            input_ids=np.zeros(len(positions), np.int32),
            positions=positions,
            slot_mapping=positions % size,
            query_lens=query_lens,
            context_lens=context_lens,
            block_table=np.zeros(offsets[-1], np.int32),
            block_table_offsets=offsets,
            samples=np.ones(num_seqs, np.bool_),
            temperatures=np.ones(num_seqs, np.float32),
            seeds=np.zeros(num_seqs, np.uint64),
        )


def choose_platform(settings: WorkerSettings) -> Platform:
    """
    Raises:
        StartError: the device asked for is not there.
    """
    # Only the one that is needed: there is no Triton without a GPU, and a GPU needs no numba.
    if settings.device == "cuda" or (settings.device == "auto" and torch.cuda.is_available()):
        from worker_svc.platforms.cuda import CudaPlatform

        return CudaPlatform(settings)
    from worker_svc.platforms.cpu import CpuPlatform

    return CpuPlatform(settings)


def _max_model_len(settings: WorkerSettings, limit: int) -> int:
    if settings.max_model_len == "auto":
        return limit
    if settings.max_model_len > limit:
        raise StartError(f"max_model_len: {settings.max_model_len} is over the model's {limit}")
    return settings.max_model_len
