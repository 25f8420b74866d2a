"""Settings of `python -m scheduler_svc`."""

from __future__ import annotations

from typing import ClassVar, Self

from pydantic import Field, model_validator

from shared.config import Addresses, AutoInt, EngineName, ServiceSettings, check_step_limits

MAX_WAITING_TOKENS = 1 << 20
_TOKENS_OF_REQUEST = 256  # with which the usual queue is full in requests and in tokens


class SchedulerSettings(ServiceSettings):
    """Settings of an engine's scheduler."""

    program: ClassVar[str] = "python -m scheduler_svc"

    # Prompts arrive as token ids, already checked. The longest prompt of any model must fit.
    max_message_bytes: int = Field(64 << 20, gt=0)
    # The drain need not wait: frontends hold the streams and resubmit their requests.
    drain_timeout_s: float = Field(0.0, ge=0)
    scheduler_address: str = Field(
        "127.0.0.1:50052", description="address of the scheduler: host:port or unix:path"
    )
    engine_name: EngineName = "0"
    index: int = Field(0, ge=0, description="number of this scheduler on the host")
    worker_addresses: Addresses = Field(
        ("127.0.0.1:50053",), description="addresses of the workers, by rank"
    )
    model: str = Field("models/demo", description="model directory, for structured output")
    max_num_seqs: int = Field(256, gt=0, description="maximum number of sequences in a step")
    max_num_batched_tokens: AutoInt = Field(
        "auto", description="maximum number of tokens in a step (auto: as the workers report)"
    )
    max_num_prefill_tokens: AutoInt = Field(
        "auto",
        description="maximum number of prompt tokens in a step with decodes (auto: half a step)",
    )
    max_waiting: int = Field(
        4096, gt=0, description="maximum number of requests in the waiting queue"
    )
    kv_blocks: AutoInt = Field(
        "auto", description="blocks of the KV cache (auto: as the workers report)"
    )
    speculation: str = Field(
        "auto",
        description="source of drafts: none, ngram (auto), or a draft model's directory",
    )
    sync: bool = Field(False, description="plan a step only after the previous step's answer")

    @property
    def max_waiting_tokens(self) -> int:
        """The maximum number of tokens in the waiting queue, which grows with a longer queue."""
        return max(MAX_WAITING_TOKENS, _TOKENS_OF_REQUEST * self.max_waiting)

    @model_validator(mode="after")
    def _check(self) -> Self:
        check_step_limits(self.max_num_seqs, self.max_num_batched_tokens)
        self._check_listening("scheduler_address", self.scheduler_address)
        self._check_calling("worker_addresses", *self.worker_addresses)
        return self
