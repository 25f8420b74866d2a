"""Runs steps: the model, its KV cache and its sampler on one device, without any RPC."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import numba
import numpy as np
import torch

from shared.config import WorkerSettings
from worker_svc import cpu
from worker_svc.attention.torch_backend import TorchBackend
from worker_svc.config import find_model_dir, load_model_config
from worker_svc.distributed import TensorParallel
from worker_svc.errors import ModelError, StartError
from worker_svc.kv_cache import blocks_that_fit
from worker_svc.layers.embedding import VocabPartition
from worker_svc.models.qwen3 import Qwen3ForCausalLM, attention_shape
from worker_svc.sampler import Sampler
from worker_svc.step import Int32s, Step
from worker_svc.weights import WeightReader, model_fingerprint


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


class ModelRunner:
    """One rank. Use from one thread: torch keeps its number of threads per thread.

    `configure`, then `run` step after step. Between steps the KV cache and the tokens of the last
    step stay on the device, nothing else.

    Raises:
        StartError: the model or the settings cannot be served.
    """

    def __init__(self, settings: WorkerSettings) -> None:
        device = _device(settings)
        _set_num_threads(settings)
        model_dir = find_model_dir(settings.model)
        config = load_model_config(model_dir)
        if settings.dtype != "auto":
            config = dataclasses.replace(config, dtype=getattr(torch, settings.dtype))
        _check_dtype(config.dtype, device)
        max_model_len = _max_model_len(settings, config.max_model_len)
        shape = attention_shape(config, settings.tp, device)

        self._device = device
        self._tp = TensorParallel(settings.rank, settings.tp)
        self._master = (settings.master_addr, settings.master_port)
        block_size = settings.block_size
        self._backend = TorchBackend(
            shape, TorchBackend.default_block_size if block_size == "auto" else block_size
        )
        with WeightReader(model_dir, config.dtype, device) as reader:
            self._model = Qwen3ForCausalLM(reader, config, max_model_len, self._tp, self._backend)
        vocab = VocabPartition(config.vocab_size, settings.rank, settings.tp)
        self._sampler = Sampler(vocab, self._tp)
        self._last_tokens = torch.zeros(0, dtype=torch.int64, device=device)
        self._caches: list[torch.Tensor] = []
        self._warm_up(max_model_len)
        self.info = RunnerInfo(
            device=str(device),
            dtype=str(config.dtype).removeprefix("torch."),
            fingerprint=model_fingerprint(model_dir),
            attention_backend=self._backend.name,
            block_size=self._backend.block_size,
            num_blocks=blocks_that_fit(settings, shape, self._backend.block_size, max_model_len),
            max_model_len=max_model_len,
            vocab_size=config.vocab_size,
        )

    def configure(self, epoch: int, num_blocks: int) -> None:
        """Joins the other ranks and allocates an empty KV cache.

        Raises:
            RuntimeError: the other ranks did not come, or there is not enough memory.
        """
        self._caches = []  # free the old one before the new one is allocated
        self._tp.join(epoch, self._device, *self._master)
        self._caches = self._backend.allocate(num_blocks)
        self._last_tokens = self._last_tokens[:0]

    def run(self, step: Step) -> Int32s:
        """-> the token sampled per row [S], -1 for rows that sample nothing.

        `step` has been checked (`worker_svc.step.decode_step`).
        """
        with torch.inference_mode():
            rows = np.flatnonzero(step.samples)
            tokens = torch.full((step.num_seqs,), -1, dtype=torch.int64, device=self._device)
            logits = self._forward(step, rows)
            if len(rows):
                tokens[self._to_device(rows)] = self._sampler(
                    logits, step.temperatures[rows], step.seeds[rows], step.context_lens[rows]
                )
            self._last_tokens = tokens
            return tokens.cpu().numpy().astype("<i4")

    def logits(self, step: Step) -> torch.Tensor:
        """This rank's logits [N, shard_size] of the N rows of `step` that sample."""
        with torch.inference_mode():
            return self._forward(step, np.flatnonzero(step.samples))

    def _forward(self, step: Step, rows: np.ndarray) -> torch.Tensor:
        ids = self._to_device(step.input_ids)
        if (step.input_ids < 0).any():
            known = ids.clamp(min=0)
            ids = torch.where(ids < 0, self._last_tokens[(-1 - ids).clamp_(min=0)], known)
        last_rows = np.cumsum(step.query_lens)[rows] - 1
        return self._model.forward(
            ids,
            self._to_device(step.positions),
            self._caches,
            self._backend.plan(step),
            self._to_device(last_rows),
        )

    def _to_device(self, array: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(array.astype(np.int64)).to(self._device)

    def _warm_up(self, max_model_len: int) -> None:
        """Runs a prompt and a decode, so that kernels are compiled and weights touched before the
        first request. On a CPU a few tokens do: activations are small beside the memory that
        `blocks_that_fit` leaves alone, and a full step of a large model takes minutes."""
        length = min(8, max_model_len)
        blocks = -(-length // self._backend.block_size)
        self._caches = self._backend.allocate(blocks)
        for context_len, query_len in ((length - 1, length - 1), (length, 1)):
            positions = np.arange(context_len - query_len, context_len, dtype=np.int32)
            self.run(
                Step(
                    step_id=0,
                    input_ids=np.zeros(query_len, np.int32),
                    positions=positions,
                    slot_mapping=positions,
                    query_lens=np.array([query_len], np.int32),
                    context_lens=np.array([context_len], np.int32),
                    block_table=np.arange(blocks, dtype=np.int32),
                    block_table_offsets=np.array([0, blocks], np.int32),
                    samples=np.array([True]),
                    temperatures=np.array([1.0], np.float32),
                    seeds=np.zeros(1, np.uint64),
                )
            )
        self._caches = []


def _device(settings: WorkerSettings) -> torch.device:
    if settings.device == "cuda":
        raise StartError("device: cuda has no attention backend yet; use cpu")
    return torch.device("cpu")


def _check_dtype(dtype: torch.dtype, device: torch.device) -> None:
    served = {torch.float32, torch.bfloat16} | ({torch.float16} if device.type == "cuda" else set())
    if dtype not in served:
        name = str(dtype).removeprefix("torch.")
        raise ModelError(f"dtype: {name} is not served on {device.type}; use float32 or bfloat16")


def _max_model_len(settings: WorkerSettings, limit: int) -> int:
    if settings.max_model_len == "auto":
        return limit
    if settings.max_model_len > limit:
        raise StartError(f"max_model_len: {settings.max_model_len} is over the model's {limit}")
    return settings.max_model_len


def _set_num_threads(settings: WorkerSettings) -> None:
    """A thread per core, divided among the ranks of one machine. For the calling thread: both
    libraries keep the number per thread."""
    share = max(cpu.num_cores() // settings.tp, 1)
    threads = share if settings.threads == "auto" else settings.threads
    torch.set_num_threads(threads)
    numba.set_num_threads(min(threads, numba.config.NUMBA_NUM_THREADS))
