"""Settings of `python -m frontend`."""

from __future__ import annotations

import re
from typing import ClassVar, Literal, Self

from pydantic import Field, model_validator

from shared.config import Addresses, ServiceSettings
from shared.tls import ServerTls


class PublicSettings(ServiceSettings):
    """The settings that say where and how clients are served."""

    _tls_prefix: ClassVar[str] = "tls"
    _plaintext: ClassVar[str] = "allow_public_plaintext"

    host: str = Field("127.0.0.1", description="address that the public port listens on")
    port: int = Field(50051, ge=0, le=65535, description="public port, which names the stack")
    tls_cert: str = Field("", description="PEM file of the certificate that clients see")
    tls_key: str = Field("", description="PEM file of the key of tls_cert")
    tls_client_ca: str = Field(
        "", description="PEM file of a CA; clients must present a certificate that it signed"
    )
    allow_public_plaintext: bool = Field(
        False, description="serve clients beyond loopback without TLS"
    )
    auth_tokens_file: str = Field(
        "", description="file with a token on each line; clients must send one of the tokens"
    )
    max_requests_per_client: int = Field(
        512, gt=0, description="maximum number of a client's calls in progress, per frontend"
    )

    @model_validator(mode="after")
    def _check_public(self) -> Self:
        if bool(self.tls_cert) != bool(self.tls_key):
            raise ValueError("tls_cert, tls_key: set both or neither")
        if self.tls_client_ca and not self.tls_cert:
            raise ValueError("tls_client_ca: requires tls_cert and tls_key")
        self._check_listening("host", f"{self.host}:{self.port}")
        return self

    @property
    def server_tls(self) -> ServerTls | None:
        if not self.tls_cert:
            return None
        inner = self.internal_tls_ca if self.internal_tls_roles == "optional" else ""
        return ServerTls(self.tls_cert, self.tls_key, self.tls_client_ca, apart_from=inner)

    @property
    def callers_need_tokens(self) -> bool:
        return bool(self.auth_tokens_file)

    @property
    def reflected(self) -> bool:
        if self.reflection == "auto":
            return not self.callers_need_tokens
        return super().reflected


class FrontendSettings(PublicSettings):
    """Settings of one frontend."""

    program: ClassVar[str] = "python -m frontend"

    model: str = Field("models/demo", description="model directory, for its tokenizer and defaults")
    served_model_name: str = Field(
        "",
        description="name of the model for clients (empty: the name of its directory)",
        max_length=256,
        pattern=r"^[^\x00-\x1f\x7f]*$",
    )
    pooling: Literal["auto", "last", "mean"] = Field(
        "auto",
        description="how an embedding is made of a prompt's tokens (auto: as the model's "
        "1_Pooling/config.json says, else last)",
    )
    scheduler_address: str = Field(
        "127.0.0.1:50052", description="address of the scheduler: host:port or unix:path"
    )
    scheduler_addresses: Addresses = Field(
        (),
        description="schedulers of several engines: host:port, unix:path, dns:host:port (all "
        "addresses of a name), or file:path (an address per line)",
    )
    index: int = Field(
        0, ge=0, description="number of this frontend among those that share the port"
    )
    http_port: int = Field(
        0, ge=0, le=65535, description="port of HTTP, on the address of host (0: no HTTP)"
    )
    http_hosts: Addresses = Field(
        (), description="names of this server in the Host headers of its clients, besides localhost"
    )
    http_origins: Addresses = Field(
        (), description="origins of web pages that may send requests, https://HOST (*: all)"
    )
    report_cached_tokens: bool = Field(
        False, description="tell HTTP clients how many of their prompt tokens were cached"
    )
    responses_directory: str = Field(
        "", description="directory of background responses (empty: they are not served)"
    )

    @model_validator(mode="after")
    def _check(self) -> Self:
        if not self.scheduler_addresses:
            self._check_calling("scheduler_address", self.scheduler_address)
        for source in self.scheduler_addresses:
            kind, _, rest = source.partition(":")
            if kind == "dns" and not re.fullmatch(r"[^:/]+:\d{1,5}", rest):
                raise ValueError(f"scheduler_addresses: {source}: must have the form dns:host:port")
            if kind == "file" and not rest:
                raise ValueError("scheduler_addresses: file: must be followed by a path")
            if kind != "file":
                self.check_scheduler(source)
        return self

    def check_scheduler(self, address: str) -> None:
        """Raises ValueError if `address` is that of a scheduler that must not be called."""
        self._check_calling("scheduler_addresses", address)
