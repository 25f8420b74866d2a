"""Roles in the services' certificates. A role is a URI among a certificate's names, such as
`urn:nano-vllm-grpc:role:worker`. The owner may call other services as the service that it names.

Unless roles are required, the owner of a certificate without a role may make any service's calls.
Servers need no role, because gRPC checks that a server's certificate has the host's name.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from dataclasses import dataclass

from shared.errors import PermissionDeniedError
from shared.rpc.interceptors import Context, SpanInterceptor

ROLE = "urn:nano-vllm-grpc:role:"


@dataclass(frozen=True)
class Callers:
    """The services that may call a service: those with `role`. Any service may call the methods in
    `reads`, which only report something."""

    role: str
    reads: tuple[str, ...] = ()


def roles_among(names: Iterable[str]) -> set[str]:
    """The roles among the alternative names of a certificate."""
    return {name.removeprefix(ROLE) for name in names if name.startswith(ROLE)}


class RoleInterceptor(SpanInterceptor):
    """Rejects calls of `service` if `callers` does not allow them to the roles of the certificate.
    Health and reflection are open to every certificate.

    Args:
        required: whether certificates without a role are rejected, too.
    """

    def __init__(self, service: str, callers: Callers, required: bool) -> None:
        self._service = f"/{service}"
        self._callers = callers
        self._required = required

    @asynccontextmanager
    async def span(self, method: str, context: Context) -> AsyncIterator[None]:
        service, _, name = method.rpartition("/")
        if service == self._service:
            self._check(context, None if name in self._callers.reads else self._callers.role)
        yield

    def _check(self, context: Context, needed: str | None) -> None:
        uris = context.auth_context().get("peer_uri", ())
        roles = roles_among(uri.decode(errors="replace") for uri in uris)
        if not roles and not self._required:
            return
        if not roles:
            raise PermissionDeniedError(
                f"the certificate names no role, and this service requires one: {ROLE}"
                f"{self._callers.role}"
            )
        if needed and needed not in roles:
            raise PermissionDeniedError(
                f"the certificate is for {', '.join(sorted(roles))}; only a {needed} may call this"
            )
