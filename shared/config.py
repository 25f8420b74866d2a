"""Settings of the services: one frozen class each, in the service's package, read once at startup.

A value comes from a flag (`--max-num-seqs 64`), else the environment (`NANO_MAX_NUM_SEQS=64`), else
a TOML file (`NANO_CONFIG_FILE=nano.toml`, `max_num_seqs = 64`), else the default. All services of a
stack can share one environment and one file, because a service ignores other services' settings.
A service does not start if it is given a setting that no service has.
"""

from __future__ import annotations

import os
import sys
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, TypeVar

from pydantic import BeforeValidator, Field, ValidationError
from pydantic_settings import NoDecode

from shared.security import SecuritySettings

PREFIX = "NANO_"


def _split_commas(value: object) -> object:
    """Splits a string `a,b` into a tuple; returns others unchanged."""
    return tuple(part for part in value.split(",") if part) if isinstance(value, str) else value


Addresses = Annotated[tuple[str, ...], NoDecode, BeforeValidator(_split_commas)]
AutoInt = Literal["auto"] | Annotated[int, Field(gt=0)]
EngineName = Annotated[
    str,
    Field(max_length=256, pattern=r"^[^\x00-\x1f\x7f]+$", description="name of the engine"),
]


class SettingsError(ValueError):
    """A setting is unknown or its value is impossible; the message names the setting."""


class ServiceSettings(SecuritySettings):
    """The settings that every service has."""

    program: ClassVar[str] = "nano-vllm-grpc"  # the command that reads them

    log_level: Literal["debug", "info", "warning", "error"] = Field(
        "info", description="lowest level of the lines that are logged"
    )
    drain_timeout_s: float = Field(
        10.0, ge=0, description="seconds that calls in progress have to end when a process stops"
    )
    hang_timeout_s: float = Field(
        3.0, gt=0, description="seconds without a sign of life after which a process is replaced"
    )
    spares: int = Field(
        0,
        ge=0,
        le=1,
        description="successors that wait beside each parent process and serve when it dies",
    )
    exit_with_parent: bool = Field(False, description="end with the parent process")
    max_message_bytes: int = Field(4 << 20, gt=0, description="maximum size of a message, in bytes")
    metrics_address: str = Field(
        "",
        pattern=r"^(\S+:[1-9]\d{0,4})?$",
        description="host:port for Prometheus (empty: none)",
    )
    metrics_directory: str = Field(
        "",
        description="directory in which the process lists a free loopback port for Prometheus",
    )
    otlp_endpoint: str = Field(
        "",
        pattern="^(https?://.+)?$",
        description="OpenTelemetry collector, http://HOST:PORT (empty: no traces)",
    )
    trace_sample_ratio: float = Field(
        0.01,
        ge=0,
        le=1,
        description="share of calls without a trace flag that are traced",
    )

    @property
    def callers_need_tokens(self) -> bool:
        return False


Settings = TypeVar("Settings", bound=ServiceSettings)
# The settings that only some services have. A service must tell other services' settings from
# misspelt ones. It cannot import the other services, because an image may hold only one service.
_NAMES_OF_SERVICES = """
    allow_public_plaintext attention auth_tokens_file batch_invariant block_size
    cache_dir cache_dir_gb cache_dir_mb_per_s device
    draft_quantization dtype enforce_eager engine_name engines_on_host
    host http_hosts http_origins http_port index
    kv_blocks kv_dtype master_addr master_port max_model_len
    max_num_batched_tokens max_num_prefill_tokens max_num_seqs max_requests_per_client max_waiting
    memory_utilization model pooling port pp pp_layers
    quantization rank ranks_on_host report_cached_tokens responses_directory
    scheduler_address scheduler_addresses
    served_model_name speculation sync threads tls_cert tls_client_ca tls_key tp
    ui_port worker_addresses
"""
KNOWN_NAMES = frozenset((*ServiceSettings.model_fields, *_NAMES_OF_SERVICES.split()))
# Variables that PyTorch's launchers and clusters set without the prefix.
PYTORCH_NAMES = ("master_addr", "master_port")
# Settings of clients and of the launcher, which may share the services' environment.
CLIENT_NAMES = {
    "token": "token that the client sends with its calls",
    "tls_ca": "PEM file of the CA that signed the server's certificate",
    "tls_server_name": "name in the server's certificate, if it differs from the host",
    "client_cert": "PEM file of the certificate that the client presents",
    "client_key": "PEM file of the key of client_cert",
}
# Variables that are not settings.
OTHER_NAMES = {
    "config_file": "TOML file of settings",
    "cpu_features": "features of the CPU that workers may use, such as avx2,fma (for tests)",
}


def load_settings(
    cls: type[Settings], args: list[str], environment: Mapping[str, str] = os.environ
) -> Settings:
    """Reads a service's settings from flags, environment and file.

    Raises:
        SettingsError: settings are unknown or have impossible values; the message names each.
    """
    names = (*KNOWN_NAMES, *CLIENT_NAMES, *OTHER_NAMES)
    variables = {PREFIX + name.upper(): name for name in names}
    given = {name: value for name, value in environment.items() if name.startswith(PREFIX)}
    if unknown := given.keys() - variables:
        raise SettingsError(f"unknown in the environment: {', '.join(sorted(unknown))}")
    values: dict[str, Any] = {
        name: environment[name.upper()] for name in PYTORCH_NAMES if name.upper() in environment
    }
    values |= _read_file(given.get(PREFIX + "CONFIG_FILE", ""))
    values |= {variables[name]: value for name, value in given.items()}
    own = {name: value for name, value in values.items() if name in cls.model_fields}
    cli: Any = {"_cli_parse_args": args, "_cli_kebab_case": True, "_cli_prog_name": cls.program}
    try:
        return cls(**cli, **own)
    except ValidationError as error:
        raise SettingsError("; ".join(_describe(e) for e in error.errors())) from error


def settings_or_exit(cls: type[Settings], args: list[str]) -> Settings:
    """Calls `load_settings`; on an error, prints a line to stderr and exits with status 2."""
    try:
        return load_settings(cls, args)
    except SettingsError as error:
        print(f"{cls.program}: {error}", file=sys.stderr)
        raise SystemExit(2) from None


def _read_file(path: str) -> dict[str, Any]:
    """Reads the settings in a TOML file; returns `{}` if `path` is empty."""
    if not path:
        return {}
    try:
        values = tomllib.loads(Path(path).read_text(encoding="utf-8"))
    except (OSError, tomllib.TOMLDecodeError) as error:
        raise SettingsError(f"{PREFIX}CONFIG_FILE: {error}") from error
    if unknown := values.keys() - KNOWN_NAMES:
        raise SettingsError(f"unknown in {path}: {', '.join(sorted(unknown))}")
    return values


def _describe(error: Any) -> str:
    name = ".".join(str(part) for part in error["loc"][:1])
    message = error["msg"].removeprefix("Value error, ")
    return f"{name}: {message}, not {error['input']!r}" if name else message


def check_step_limits(max_num_seqs: int, max_num_batched_tokens: int | Literal["auto"]) -> None:
    """Raises ValueError if a step has no room for a token of each sequence."""
    if max_num_batched_tokens != "auto" and max_num_seqs > max_num_batched_tokens:
        raise ValueError(
            f"max_num_seqs: {max_num_seqs} sequences need a token each in a step of "
            f"max_num_batched_tokens, which is {max_num_batched_tokens}"
        )
