"""Settings of `python -m worker_svc`, one process per rank."""

from __future__ import annotations

from typing import ClassVar, Literal, Self

from pydantic import Field, model_validator

from shared.config import Addresses, AutoInt, EngineName, ServiceSettings, check_step_limits

NO_DRAFT_MODEL = ("auto", "none", "ngram")  # values of `speculation` that name no directory


class WorkerSettings(ServiceSettings):
    """Settings of one rank."""

    program: ClassVar[str] = "python -m worker_svc"

    max_message_bytes: int = Field(64 << 20, gt=0)
    drain_timeout_s: float = Field(0.0, ge=0)
    model: str = Field(
        "models/demo",
        description="model directory; up also takes a GGUF file, smollm2, gemma3, or "
        "hub:OWNER/NAME@REVISION",
    )
    device: Literal["auto", "cpu", "cuda"] = Field(
        "auto", description="device of the workers (auto: a GPU if there is one)"
    )
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = Field(
        "auto", description="number format of computations (auto: the model's)"
    )
    quantization: Literal["auto", "none", "int8", "int4", "fp8"] = Field(
        "auto", description="format of the weights (auto: the checkpoint's)"
    )
    kv_dtype: Literal["auto", "int8", "fp8"] = Field(
        "auto", description="format of the KV cache (auto: the dtype)"
    )
    speculation: str = Field(
        "auto",
        description="source of drafts: none, ngram (auto), or a draft model's directory",
    )
    draft_quantization: Literal["auto", "none", "int8", "int4", "fp8"] = Field(
        "auto", description="format of the draft model's weights (auto: its checkpoint's)"
    )
    rank: int = Field(0, ge=0, description="rank of this worker: stage x tp + its place there")
    tp: int = Field(1, gt=0, description="number of ranks that share each layer")
    pp: int = Field(1, gt=0, le=8, description="number of pipeline stages, of tp ranks each")
    pp_layers: str = Field(
        "",
        pattern=r"^([1-9]\d{0,4}(,[1-9]\d{0,4})*)?$",
        description="layers of each stage, such as 19,9 (empty: divided by their weights)",
    )
    index: int | None = Field(
        None, ge=0, description="number of this process among those of its service on the host"
    )
    engines_on_host: int = Field(
        1, gt=0, description="number of engines that share the host's cores and memory"
    )
    ranks_on_host: AutoInt = Field(
        "auto", description="number of an engine's ranks on this host (auto: all)"
    )
    engine_name: EngineName = "0"
    worker_addresses: Addresses = Field(
        ("127.0.0.1:50053",), description="addresses of the workers, by rank"
    )
    # `load_settings` also reads MASTER_ADDR and MASTER_PORT, which PyTorch's launchers set.
    master_addr: str = Field(
        "127.0.0.1", description="host of rank 0, to which the other ranks connect"
    )
    master_port: int = Field(
        50054, gt=0, le=65535, description="port of rank 0, to which the other ranks connect"
    )
    max_num_seqs: int = Field(256, gt=0, description="maximum number of sequences in a step")
    max_num_batched_tokens: AutoInt = Field(
        "auto",
        description="maximum number of tokens in a step (auto: 2048 on a CPU, 8192 on a GPU)",
    )
    max_model_len: AutoInt = Field(
        "auto", description="maximum number of tokens in a sequence (auto: the model's)"
    )
    kv_blocks: AutoInt = Field(
        "auto", description="blocks of the KV cache (auto: as many as fit the memory)"
    )
    block_size: AutoInt = Field(
        "auto", description="tokens in a block of the KV cache (auto: the backend's)"
    )
    memory_utilization: float | Literal["auto"] = Field(
        "auto",
        description="share of a GPU's memory (auto: 0.9), or of a CPU's free memory for the cache "
        "(auto: 0.4)",
    )
    cache_dir: str = Field(
        "", description="directory for blocks that may leave the KV cache (empty: none)"
    )
    cache_dir_gb: float = Field(
        16.0, gt=0, le=1e6, description="maximum size of each rank's files in cache_dir, in GB"
    )
    cache_dir_mb_per_s: float = Field(
        200.0,
        gt=0,
        le=1e6,
        description="maximum rate at which each rank writes to cache_dir, in MB/s",
    )
    attention: Literal["auto", "fa3", "flash_attn", "triton", "torch"] = Field(
        "auto", description="attention backend of prompts; on a GPU, Triton's kernel decodes"
    )
    enforce_eager: bool = Field(False, description="run steps without CUDA graphs")
    batch_invariant: bool = Field(
        False,
        description="keep other requests from changing a request's tokens on a GPU, more slowly. "
        "On a CPU they cannot, except with AMX or more than two ranks",
    )
    threads: AutoInt = Field(
        "auto", description="CPU threads of a step (auto: a rank's share of the cores)"
    )

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.rank >= self.num_ranks:
            raise ValueError(f"rank: {self.rank} is not below tp x pp, which is {self.num_ranks}")
        if len(self.worker_addresses) != self.num_ranks:
            raise ValueError(
                f"worker_addresses: {len(self.worker_addresses)} given, tp x pp is {self.num_ranks}"
            )
        if self.pp > 1 and self.speculation not in ("auto", "none"):
            raise ValueError(f"speculation: {self.speculation} is not served with pp above 1")
        share = self.memory_utilization
        if share != "auto" and not 0 < share <= 1:
            raise ValueError(f"memory_utilization: {share} is not in (0, 1]")
        check_step_limits(self.max_num_seqs, self.max_num_batched_tokens)
        self._check_listening("worker_addresses", self.worker_addresses[self.rank])
        return self

    @property
    def num_ranks(self) -> int:
        """The number of ranks of the engine."""
        return self.tp * self.pp

    @property
    def num_sharing(self) -> int:
        """The number of ranks that share the host's cores and memory."""
        here = self.num_ranks if self.ranks_on_host == "auto" else self.ranks_on_host
        return self.engines_on_host * here

    @property
    def stage(self) -> int:
        """The number of this rank's pipeline stage."""
        return self.rank // self.tp

    @property
    def tensor_rank(self) -> int:
        """This rank's number among those of its stage."""
        return self.rank % self.tp

    @property
    def is_sampling_rank(self) -> bool:
        """Whether this rank answers steps with tokens: the first one of the last stage."""
        return self.rank == self.num_ranks - self.tp

    @property
    def draft_model(self) -> str:
        """The directory of the draft model, or an empty text if there is none."""
        return "" if self.speculation in NO_DRAFT_MODEL else self.speculation

    @property
    def place(self) -> int:
        """This rank's index among the ranks of all engines on the host."""
        return self.rank if self.index is None else self.index
