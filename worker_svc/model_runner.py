"""Runs the steps of a model on one device. It owns the KV cache and the sampler, but no RPC."""

from __future__ import annotations

import dataclasses
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import torch

from shared.errors import FailedPreconditionError
from worker_svc.devices.base import Platform, Stopwatch
from worker_svc.devices.choice import choose_platform
from worker_svc.devices.cuda_graph import DecodeGraphs, graph_sizes
from worker_svc.devices.warm_up import plain_decodes, warm_up_steps
from worker_svc.distributed import TensorParallel
from worker_svc.errors import StartError
from worker_svc.kept_memory import CacheMemory, KeptMemory
from worker_svc.kv_cache import TOKEN_ID_BYTES, TokenCache, blocks_that_fit, copy_blocks
from worker_svc.layers.embedding import VocabPartition
from worker_svc.loader import KeptLoader, WeightLoader
from worker_svc.models.config import load_model_config
from worker_svc.models.decoder import Decoder, attention_shape
from worker_svc.models.registry import load_model
from worker_svc.sampling.features import FeatureRunner
from worker_svc.sampling.logprobs import Logprobs
from worker_svc.sampling.sampler import Sampler
from worker_svc.settings import WorkerSettings
from worker_svc.step.decode import Step
from worker_svc.step.tensors import StepTensors, upload, upload_step
from worker_svc.step.wire import Int32s
from worker_svc.step_result import PendingStep
from worker_svc.weights.files import WeightReader
from worker_svc.weights.fingerprint import ModelFiles
from worker_svc.weights.packed_cache import open_cache
from worker_svc.weights.quantization.choice import Choice, choose_quantization

_READING = 8  # multiply-adds that a CPU does in the time that it takes to read one weight


@dataclass(frozen=True)
class RunnerInfo:
    """The properties and limits of a loaded model."""

    device: str
    dtype: str
    fingerprint: str  # of the model's files, then the format of its weights
    attention_backend: str
    block_size: int  # tokens
    num_blocks: int  # that fit into free memory
    max_num_blocks: int  # that would fit into empty memory, and whose slots fit into int32
    max_model_len: int  # tokens
    max_num_batched_tokens: int  # in a step
    vocab_size: int


class ModelRunner:
    """Runs one rank. Use it from one thread, because torch keeps its number of threads per thread.

    Call `configure`, then `launch` for each step. Between steps the device keeps the KV cache, the
    ids of the cached tokens, and the tokens that the last step sampled.

    Args:
        memory: keeps weights and cache for the next fork, if they lie in the host's memory. If it
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
        platform = platform or choose_platform(settings)
        config = load_model_config(Path(settings.model))
        dtype = platform.choose_dtype(settings.dtype, config.dtype)
        config = dataclasses.replace(config, dtype=dtype)
        quantization = choose_quantization(settings.quantization, config.quantization)

        self.config = config
        self._settings = settings
        self._platform = platform
        self._memory = memory if platform.device.type == "cpu" else None
        self._max_model_len = _max_model_len(settings, config.max_model_len)
        self._max_num_batched_tokens = _max_num_batched_tokens(settings, platform)
        self._tp = TensorParallel(settings.rank, settings.tp)
        shape = attention_shape(config, settings.tp, platform.device, settings.kv_dtype)
        self._backend = platform.attention_backend(settings, shape)
        key = repr((config, settings, platform.ops.layout))
        notes = self._memory and self._memory.weights.notes(key)
        if notes:
            self._model, fingerprint = self._load_kept(), notes["fingerprint"]
        else:
            self._model, fingerprint = self._load(quantization)
        self._run_layers = platform.prepare(self._model.hidden_states, self._backend, self._tp)
        self._vocab = vocab = VocabPartition(config.vocab_size, settings.rank, settings.tp)
        self._sampler = Sampler(vocab, self._tp, platform.ops)
        self._upload = partial(upload, device=platform.device, pinned=platform.pinned)
        self._features = FeatureRunner(
            vocab, self._tp, platform.ops, self._model.lm_head, self._upload
        )
        # The token that each row of the last step sampled.
        self._last_tokens = torch.zeros(
            settings.max_num_seqs, dtype=torch.int32, device=platform.device
        )
        self._logits: torch.Tensor | None = None
        if platform.captures:  # all graphs share one buffer
            shape_of_logits = settings.max_num_seqs, vocab.shard_size
            self._logits = torch.empty(shape_of_logits, dtype=dtype, device=platform.device)
        self._graphs: DecodeGraphs | None = None
        self._allocated_blocks = self._configured_blocks = 0
        self.cache_id = self._memory.cache.id if self._memory else ""
        self.info = RunnerInfo(**notes) if notes else self._measure(fingerprint)
        if self._memory and not notes:
            self._memory.weights.seal(key, dataclasses.asdict(self.info))

    def _load_kept(self) -> Decoder:
        """Makes the model of the weights that the last fork has kept."""
        assert self._memory
        ops, dtype = self._platform.ops, self.config.dtype
        loader = KeptLoader(self._memory.weights.states(), ops, dtype)
        return load_model(loader, self.config, self._max_model_len, ops, self._tp, self._backend)

    def _load(self, quantization: Choice) -> tuple[Decoder, str]:
        """Reads the model's files -> the model and its fingerprint."""
        settings, platform, dtype = self._settings, self._platform, self.config.dtype
        model_dir = Path(settings.model)
        files, cache = ModelFiles(model_dir), None
        if quantization.quantize_to:
            cache = open_cache(
                model_dir,
                files.fingerprint,
                quantization.name,
                platform.ops.layout,
                dtype,
                settings.rank,
                settings.tp,
            )
        copies = platform.weight_copies()
        memory = self._memory.weights if self._memory else None
        if memory:
            memory.reset()
        with WeightReader(model_dir, dtype, platform.device, copies) as reader:
            loader = WeightLoader(reader, platform.ops, quantization, cache, memory)
            model = load_model(
                loader, self.config, self._max_model_len, platform.ops, self._tp, self._backend
            )
        files.check_unchanged()
        if cache:
            cache.save()
        return model, f"{files.fingerprint}-{quantization.name}"

    def _measure(self, fingerprint: str) -> RunnerInfo:
        """Warms up, and computes how many blocks fit into the memory that a step leaves."""
        settings, platform, backend = self._settings, self._platform, self._backend
        cache_bytes = platform.cache_bytes(settings, self._warm_up())
        size = backend.block_size
        block_bytes = (backend.shape.cache_bytes_per_token + TOKEN_ID_BYTES) * size
        return RunnerInfo(
            device=str(platform.device),
            dtype=str(self.config.dtype).removeprefix("torch."),
            fingerprint=fingerprint,
            attention_backend=backend.name,
            block_size=size,
            num_blocks=blocks_that_fit(
                settings, cache_bytes, block_bytes, size, self._max_model_len
            ),
            max_num_blocks=min(
                platform.memory_bytes() // block_bytes, np.iinfo(np.int32).max // size
            ),
            max_model_len=self._max_model_len,
            max_num_batched_tokens=self._max_num_batched_tokens,
            vocab_size=self.config.vocab_size,
        )

    def configure(
        self,
        epoch: int,
        num_blocks: int,
        superseded: Callable[[], bool] = lambda: False,
        keep: str = "",
    ) -> None:
        """Joins the other ranks, allocates a KV cache or keeps the one that there is, and captures
        graphs that use it. Sets `cache_id`.

        Args:
            superseded: whether to stop waiting for the other ranks because there is a newer epoch.
            keep: the id of the cache to keep. Without one, the contents are unknown.

        Raises:
            FailedPreconditionError: there is no such cache.
            RuntimeError: the other ranks did not join, or there is not enough memory.
            CaptureError: decodes cannot run from CUDA graphs.
        """
        if keep and not self._has_cache(keep, num_blocks):
            raise FailedPreconditionError(f"keep_cache_id: there is no cache {keep}")
        if not keep:
            self.forget_cache()
        alone = self._tp.size == 1
        if not alone or num_blocks != self._configured_blocks:
            self._configured_blocks = 0  # until everything below has succeeded
            self._graphs = None
            if not keep:
                self._allocate(0)  # frees the old cache before the new cache is allocated
            settings = self._settings
            device = self._platform.device
            self._tp.join(epoch, device, settings.master_addr, settings.master_port, superseded)
            if num_blocks != self._allocated_blocks:
                self._allocate(num_blocks, self._memory.cache if self._memory else None)
            if self._platform.captures:
                self._graphs = self._capture(superseded)
            self._configured_blocks = num_blocks
        if not keep:
            self.cache_id = self._new_cache_id(num_blocks)

    def forget_cache(self) -> None:
        """Notes that the contents of the cache are unknown."""
        self.cache_id = ""
        if self._memory:
            self._memory.cache.forget()

    def _has_cache(self, cache_id: str, num_blocks: int) -> bool:
        if cache_id != self.cache_id:
            return False
        if self._memory and not self._allocated_blocks:  # of the last fork
            return self._memory.cache.holds(cache_id, num_blocks)
        return num_blocks == self._allocated_blocks

    def _new_cache_id(self, num_blocks: int) -> str:
        if self._memory:
            return self._memory.cache.new_id(num_blocks)
        if self._platform.captures and self._tp.size > 1:
            return ""  # graphs are captured again in each epoch, which may write to the cache
        return uuid.uuid4().hex

    def _capture(self, superseded: Callable[[], bool]) -> DecodeGraphs:
        with torch.inference_mode():
            return DecodeGraphs(
                self._platform,
                self._backend,
                lambda step, tensors: self._run(step, tensors, self._max_model_len),
                self._settings.max_num_seqs,
                -(-self._max_model_len // self._backend.block_size),
                superseded,
            )

    def launch(self, step: Step) -> PendingStep:
        """Starts `step`, which `worker_svc.step.decode.decode_step` has checked. On a GPU, it
        returns before the step is done, and maybe before the previous step is done."""
        with torch.inference_mode():
            stopwatch = self._platform.start(self._work(step))
            if len(step.copies):
                sources, destinations = self._upload(list(np.ascontiguousarray(step.copies.T)))
                copy_blocks(self._caches, self._tokens, sources, destinations)
            of_prompts: list[Logprobs] = []
            if self._graphs and step.decodes_only and step.prompt_targets is None:
                tensors, logits = self._graphs.replay(step)
            else:
                tensors = self._to_device(step)
                logits, of_prompts = self._run_eagerly(step, tensors)
            of_samples: list[Logprobs] = []
            if step.features is not None:
                of_samples = self._features.sample(
                    step.features, step, tensors, logits, self._last_tokens, self._tokens
                )
            return self._fetch(step, stopwatch, of_samples + of_prompts)

    def run(self, step: Step) -> Int32s:
        """Runs `step` to its end -> the token sampled per row [S]."""
        return self.launch(step).wait()[0]

    def logits(self, step: Step, *, every_token: bool = False) -> torch.Tensor:
        """This rank's logits [N, shard_size] of the N rows of `step` that sample, or after every
        one of its N tokens."""
        with torch.inference_mode():
            tensors, longest = self._to_device(step), int(step.context_lens.max())
            hidden = self._hidden_states(step, tensors, longest, every_token=every_token)
            logits = self._model.lm_head(hidden)
            return logits if every_token else logits[np.flatnonzero(step.samples)]

    @property
    def waits_for_ranks(self) -> bool:
        """Whether a collective on a CPU is waiting for other ranks right now."""
        return self._tp.waiting

    @property
    def compiling(self) -> bool:
        """Whether a step may be waiting for a compiler right now."""
        return self._platform.compiling

    def _work(self, step: Step) -> int:
        """This rank's multiply-adds in a step, with `_READING` more for each weight to read."""
        config = self.config
        attended = int(np.dot(step.query_lens.astype(np.int64), step.context_lens))
        attention = 2 * attended * config.num_layers * config.num_heads * config.head_dim
        products = (len(step.input_ids) + _READING) * config.num_weights
        return (products + attention) // self._tp.size

    def _allocate(self, num_blocks: int, memory: CacheMemory | None = None) -> None:
        """Allocates the cache, in `memory` if there is one. Leaves what that holds."""
        new, size = None, self._backend.block_size
        if memory:
            memory.rewind()
            new = memory.tensor
        self._caches = self._backend.allocate(num_blocks, new) if num_blocks else []
        self._tokens = TokenCache.allocate(num_blocks, size, self._platform.device, new)
        self._allocated_blocks = num_blocks

    def _run(self, step: Step, tensors: StepTensors, max_context_len: int) -> torch.Tensor:
        """Runs a step -> this rank's logits [S, shard_size]. The tokens go to `_last_tokens`."""
        return self._sample(self._hidden_states(step, tensors, max_context_len), tensors)

    def _run_eagerly(self, step: Step, tensors: StepTensors) -> tuple[torch.Tensor, list[Logprobs]]:
        """Does what `_run` does -> its logits, and the log-probabilities of prompts."""
        max_context_len = int(step.context_lens.max())
        if step.prompt_targets is None:
            return self._run(step, tensors, max_context_len), []
        hidden = self._hidden_states(step, tensors, max_context_len, every_token=True)
        logprobs = self._features.score(step.prompt_targets, step, hidden)
        return self._sample(hidden[tensors.query_starts[1:] - 1], tensors), logprobs

    def _hidden_states(
        self, step: Step, tensors: StepTensors, max_context_len: int, *, every_token: bool = False
    ) -> torch.Tensor:
        self._platform.ops.store_tokens(
            self._tokens.slots, tensors.slot_mapping, tensors.input_ids, self._last_tokens
        )
        metadata = self._backend.plan(step, tensors, max_context_len)
        return self._run_layers(
            tensors, self._last_tokens, self._caches, metadata, every_token=every_token
        )

    def _sample(self, hidden: torch.Tensor, tensors: StepTensors) -> torch.Tensor:
        logits = self._model.lm_head(hidden, self._logits)
        tokens = self._sampler(logits, tensors.temperatures, tensors.uniforms)
        self._last_tokens[: len(tokens)] = tokens
        return logits

    def _fetch(self, step: Step, stopwatch: Stopwatch, logprobs: Sequence[Logprobs]) -> PendingStep:
        results = [self._last_tokens[: step.num_seqs]]
        for each in logprobs:
            results += [each.ids, each.values]
        counts = [each.counts for each in logprobs]
        return PendingStep(step.samples, counts, stopwatch.fetch(results))

    def _to_device(self, step: Step) -> StepTensors:
        plan_column, platform = self._backend.plan_column(step), self._platform
        return upload_step(step, plan_column, platform.device, pinned=platform.pinned)

    def _warm_up(self) -> int:
        """Runs the largest possible prompts and decodes -> the bytes of device memory that a step
        needs besides the weights and the cache.

        So kernels are compiled and memory is allocated before the first request.
        """
        platform = self._platform
        prompts, decodes = warm_up_steps(
            self._settings.max_num_seqs,
            self._max_num_batched_tokens,
            platform.device.type == "cpu",
            self._max_model_len,
            self._backend.block_size,
            self._vocab.vocab_size,
        )
        self._allocate(1)
        prompts_bytes = platform.measure_peak_bytes(partial(self.run, prompts))
        decodes_bytes = platform.measure_peak_bytes(partial(self.run, decodes))
        if platform.compiles and not platform.captures:
            # Each number of sequences has its own kernels. Capturing graphs would compile them too.
            for size in graph_sizes(self._settings.max_num_seqs):
                self.run(plain_decodes(size, self._max_model_len, self._backend.block_size))
        self._allocate(0)
        # Graphs have a memory pool of their own.
        if platform.captures:
            return prompts_bytes + decodes_bytes
        return max(prompts_bytes, decodes_bytes)


def _max_model_len(settings: WorkerSettings, limit: int) -> int:
    if settings.max_model_len == "auto":
        return limit
    if settings.max_model_len > limit:
        raise StartError(f"max_model_len: {settings.max_model_len} is over the model's {limit}")
    return settings.max_model_len


def _max_num_batched_tokens(settings: WorkerSettings, platform: Platform) -> int:
    if settings.max_num_batched_tokens == "auto":
        return max(platform.num_batched_tokens, settings.max_num_seqs)
    return settings.max_num_batched_tokens
