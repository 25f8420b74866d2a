"""Settings of the services: one frozen class each, read once at start.

A value comes from a flag (`--max-num-seqs 64`), else the environment (`NANO_MAX_NUM_SEQS=64`), else
a TOML file (`NANO_CONFIG_FILE=nano.toml`, `max_num_seqs = 64`), else the default. All services of a
stack can share one environment and one file: what a service does not use it ignores, what none of
them knows stops it.
"""

from __future__ import annotations

import os
import sys
import tomllib
from pathlib import Path
from typing import Annotated, Any, Literal, Self, TypeVar

from pydantic import Field, ValidationError, field_validator, model_validator
from pydantic_settings import (
    BaseSettings,
    InitSettingsSource,
    NoDecode,
    PydanticBaseSettingsSource,
    SettingsConfigDict,
)

from shared.security import PREFIX as PREFIX
from shared.security import PublicSettings, SecuritySettings

Addresses = Annotated[tuple[str, ...], NoDecode]
AutoInt = Literal["auto"] | Annotated[int, Field(gt=0)]


class SettingsError(ValueError):
    """A setting is unknown or impossible; the message names it."""


class ServiceSettings(SecuritySettings):
    """What every service has."""

    model_config = SettingsConfigDict(env_prefix=PREFIX, frozen=True, extra="forbid")

    log_level: Literal["debug", "info", "warning", "error"] = "info"
    log_format: Literal["auto", "console", "json"] = "auto"
    drain_timeout_s: float = Field(10.0, ge=0, description="grace for calls in progress, seconds")
    exit_with_parent: bool = Field(False, description="end when the parent process is gone")
    max_message_bytes: int = Field(4 << 20, gt=0, description="largest request that is accepted")

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,
        file_secret_settings: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        return init_settings, env_settings, InitSettingsSource(settings_cls, _read_file(cls))


class FrontendSettings(PublicSettings, ServiceSettings):
    """Settings of `python -m frontend`."""

    model: str = Field("models/demo", description="model directory, for its tokenizer and defaults")
    scheduler_address: str = "127.0.0.1:50052"
    tokenizer_threads: int = Field(2, gt=0)


class SchedulerSettings(ServiceSettings):
    """Settings of `python -m scheduler_svc`."""

    # Prompts arrive here already checked, as ids: room for the longest one that any model takes.
    max_message_bytes: int = Field(64 << 20, gt=0)
    # Frontends hold the streams and resubmit them: there is nothing to wait for.
    drain_timeout_s: float = Field(0.0, ge=0)
    scheduler_address: str = "127.0.0.1:50052"
    worker_addresses: Addresses = ("127.0.0.1:50053",)
    model: str = Field("models/demo", description="model directory, for structured output")
    max_num_seqs: int = Field(256, gt=0, description="sequences in a step")
    max_num_batched_tokens: AutoInt = Field(
        "auto", description="tokens in a step (auto: what the workers say)"
    )
    max_num_prefill_tokens: AutoInt = Field(
        "auto", description="prompt tokens in a step that has decodes too (auto: half of a step)"
    )
    max_waiting: int = Field(4096, gt=0, description="requests in the waiting queue")
    max_waiting_tokens: int = Field(1 << 20, gt=0, description="their tokens")
    kv_blocks: AutoInt = "auto"
    sync: bool = Field(False, description="plan a step only when the one before was answered")
    hang_timeout_s: float = Field(
        3.0, gt=0, description="a worker without a sign of life for so long is replaced, seconds"
    )

    _split = field_validator("worker_addresses", mode="before")(lambda v: split_commas(v))

    @model_validator(mode="after")
    def _check(self) -> Self:
        _check_step_limits(self)
        self._check_listening("scheduler_address", self.scheduler_address)
        return self


class WorkerSettings(ServiceSettings):
    """Settings of `python -m worker_svc`, one process per tensor-parallel rank."""

    max_message_bytes: int = Field(64 << 20, gt=0)
    drain_timeout_s: float = Field(0.0, ge=0)
    model: str = Field("models/demo", description="model directory as Hugging Face lays it out")
    device: Literal["auto", "cpu", "cuda"] = "auto"
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    rank: int = Field(0, ge=0)
    tp: int = Field(1, gt=0, description="tensor-parallel ranks")
    worker_addresses: Addresses = ("127.0.0.1:50053",)
    # The names that PyTorch's launchers and clusters set.
    master_addr: str = Field(
        default_factory=lambda: os.environ.get("MASTER_ADDR", "127.0.0.1"),
        description="host of rank 0, where the ranks meet (default: MASTER_ADDR)",
    )
    master_port: int = Field(
        default_factory=lambda: os.environ.get("MASTER_PORT", 50054),
        validate_default=True,
        gt=0,
        le=65535,
        description="default: MASTER_PORT",
    )
    max_num_seqs: int = Field(256, gt=0)
    max_num_batched_tokens: AutoInt = Field(
        "auto", description="tokens in a step (auto: 2048 on a CPU, 8192 on a GPU)"
    )
    max_model_len: AutoInt = "auto"
    kv_blocks: AutoInt = "auto"
    block_size: AutoInt = "auto"
    memory_utilization: float | Literal["auto"] = Field("auto", description="share of the memory")
    attention: Literal[
        "auto", "fa3", "fa3+triton", "flash_attn", "flash_attn+triton", "triton", "torch"
    ] = Field("auto", description="attention backend; a+b: a for prompts, b for decodes")
    enforce_eager: bool = Field(False, description="no CUDA graphs")
    threads: AutoInt = Field("auto", description="CPU threads of a step")
    hang_timeout_s: float = Field(
        3.0, gt=0, description="a worker without a sign of life for so long is replaced, seconds"
    )

    _split = field_validator("worker_addresses", mode="before")(lambda v: split_commas(v))

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.rank >= self.tp:
            raise ValueError(f"rank: {self.rank} is not below tp, which is {self.tp}")
        if len(self.worker_addresses) != self.tp:
            raise ValueError(
                f"worker_addresses: {len(self.worker_addresses)} given, tp is {self.tp}"
            )
        share = self.memory_utilization
        if share != "auto" and not 0 < share <= 1:
            raise ValueError(f"memory_utilization: {share} is not in (0, 1]")
        _check_step_limits(self)
        self._check_listening("worker_addresses", self.worker_addresses[self.rank])
        return self


Settings = TypeVar("Settings", bound=ServiceSettings)
_ALL: tuple[type[ServiceSettings], ...] = (FrontendSettings, SchedulerSettings, WorkerSettings)
KNOWN_NAMES = frozenset(name for each in _ALL for name in each.model_fields)
# What clients of a stack read, the launcher among them; they may share the services' environment.
_CLIENT_NAMES = ("token", "tls_ca", "tls_server_name", "client_cert", "client_key")


def load_settings(cls: type[Settings], args: list[str]) -> Settings:
    """Reads flags, environment and file.

    Raises:
        SettingsError: a value is unknown or impossible; the message names each.
    """
    ours = {name for name in os.environ if name.startswith(PREFIX)}
    known = {PREFIX + name.upper() for name in (*KNOWN_NAMES, *_CLIENT_NAMES, "config_file")}
    unknown = ours - known
    if unknown:
        raise SettingsError(f"unknown in the environment: {', '.join(sorted(unknown))}")
    cli: Any = {
        "_cli_parse_args": args,
        "_cli_kebab_case": True,
        "_cli_prog_name": _PROGRAMS.get(cls, "python -m deploy"),
    }
    try:
        return cls(**cli)
    except ValidationError as error:
        raise SettingsError("; ".join(_describe(e) for e in error.errors())) from error


def settings_or_exit(cls: type[Settings], args: list[str]) -> Settings:
    """`load_settings` for a program's start: an error is a line on stderr and exit status 2."""
    try:
        return load_settings(cls, args)
    except SettingsError as error:
        print(f"{_PROGRAMS[cls]}: {error}", file=sys.stderr)
        raise SystemExit(2) from None


_PROGRAMS: dict[type[ServiceSettings], str] = {
    FrontendSettings: "python -m frontend",
    SchedulerSettings: "python -m scheduler_svc",
    WorkerSettings: "python -m worker_svc",
}


def _read_file(cls: type[BaseSettings]) -> dict[str, Any]:
    """The part of NANO_CONFIG_FILE that is for `cls`, `{}` without a file."""
    path = os.environ.get(PREFIX + "CONFIG_FILE")
    if not path:
        return {}
    try:
        values = tomllib.loads(Path(path).read_text(encoding="utf-8"))
    except (OSError, tomllib.TOMLDecodeError) as error:
        raise SettingsError(f"{PREFIX}CONFIG_FILE: {error}") from error
    if unknown := values.keys() - KNOWN_NAMES:
        raise SettingsError(f"unknown in {path}: {', '.join(sorted(unknown))}")
    return {name: value for name, value in values.items() if name in cls.model_fields}


def _describe(error: Any) -> str:
    name = ".".join(str(part) for part in error["loc"][:1])
    message = error["msg"].removeprefix("Value error, ")
    return f"{name}: {message}, not {error['input']!r}" if name else message


def split_commas(value: object) -> object:
    """`a,b` as a tuple, for settings that are lists; anything else as it is."""
    return tuple(part for part in value.split(",") if part) if isinstance(value, str) else value


def _check_step_limits(settings: SchedulerSettings | WorkerSettings) -> None:
    tokens = settings.max_num_batched_tokens
    if tokens != "auto" and settings.max_num_seqs > tokens:
        raise ValueError(
            f"max_num_seqs: {settings.max_num_seqs} sequences need a token each in a step of "
            f"max_num_batched_tokens, which is {tokens}"
        )
