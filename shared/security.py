"""Settings that decide who may connect, call and eavesdrop."""

from __future__ import annotations

from typing import ClassVar, Literal, Self

from pydantic import Field, model_validator
from pydantic_settings import BaseSettings, PydanticBaseSettingsSource, SettingsConfigDict

from nano_vllm_grpc.channels import stays_on_host
from nano_vllm_grpc.tls import ClientTls
from shared.channels import Dialer
from shared.tls import ServerTls


class SecuritySettings(BaseSettings):
    """Settings of TLS between services, which trust each other: mutual TLS or none."""

    model_config = SettingsConfigDict(frozen=True, extra="forbid")
    # The prefix of the settings of `server_tls`, and the setting that permits plaintext.
    _tls_prefix: ClassVar[str] = "internal_tls"
    _plaintext: ClassVar[str] = "allow_plaintext"

    internal_tls_cert: str = Field(
        "", description="PEM file of the certificate that other services see"
    )
    internal_tls_key: str = Field("", description="PEM file of the key of internal_tls_cert")
    internal_tls_ca: str = Field(
        "", description="PEM file of the CA that signed the certificates of all services"
    )
    internal_tls_roles: Literal["optional", "required"] = Field(
        "optional", description="required: reject services whose certificate names no role"
    )
    allow_plaintext: bool = Field(
        False, description="permit calls between services without TLS beyond loopback"
    )
    reflection: Literal["auto", "on", "off"] = Field(
        "auto", description="gRPC reflection (auto: off if clients need tokens)"
    )

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        *_: PydanticBaseSettingsSource,
        **__: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        """Limits the sources to flags and arguments, because `load_settings` reads the environment
        and the file."""
        return (init_settings,)

    @model_validator(mode="after")
    def _check_internal_tls(self) -> Self:
        files = (self.internal_tls_cert, self.internal_tls_key, self.internal_tls_ca)
        if any(files) and not all(files):
            raise ValueError(
                "internal_tls_cert, internal_tls_key, internal_tls_ca: give all three, or none"
            )
        if self.internal_tls_roles == "required" and not any(files):
            raise ValueError("internal_tls_roles: needs internal_tls_cert, _key and _ca")
        return self

    @property
    def internal_tls(self) -> ServerTls | None:
        """The TLS that an internal service listens with; None is plaintext."""
        if not self.internal_tls_cert:
            return None
        return ServerTls(
            self.internal_tls_cert, self.internal_tls_key, self.internal_tls_ca, "internal_tls"
        )

    @property
    def server_tls(self) -> ServerTls | None:
        """The TLS that this service listens with; None is plaintext."""
        return self.internal_tls

    @property
    def reflected(self) -> bool:
        """Whether every client that may call this service may list its methods."""
        return self.reflection != "off"

    @property
    def dialer(self) -> Dialer:
        """The dialer of this service's channels to others."""
        files = self.internal_tls_ca, self.internal_tls_cert, self.internal_tls_key
        return Dialer(ClientTls(*files) if all(files) else None)

    def _check_listening(self, name: str, address: str) -> None:
        """Rejects a listening address at which others could read plaintext traffic."""
        if self.server_tls is None and not getattr(self, self._plaintext):
            _check_stays(name, address, "listen", self._tls_prefix, self._plaintext)

    def _check_calling(self, name: str, *addresses: str) -> None:
        """Rejects addresses of services to which others could read or answer plaintext calls."""
        if self.internal_tls is None and not self.allow_plaintext:
            for address in addresses:
                _check_stays(name, address, "be called", "internal_tls", "allow_plaintext")


def _check_stays(name: str, address: str, what: str, prefix: str, permission: str) -> None:
    if not stays_on_host(address):
        raise ValueError(
            f"{name}: {address} would {what} in plaintext: set {prefix}_cert and the other TLS "
            f"settings (NANO_{prefix.upper()}_CERT, ...), or {permission} "
            f"(NANO_{permission.upper()}=1) if the network is private"
        )
