"""Checks certificates before any process starts, with TLS handshakes in memory."""

from __future__ import annotations

import ssl
from collections.abc import Iterable

from deploy.errors import LaunchError
from nano_vllm_grpc.tls import ClientTls, FileError, client_context
from shared.rpc.roles import ROLE, roles_among
from shared.tls import ServerTls, present_context


def pinned(server: ServerTls, client_cert: str, client_key: str) -> ClientTls:
    """Returns settings for a client on the server's own host, such as the launcher. The client
    trusts only that server's certificate, under its first name, whatever address it dials.

    Raises:
        LaunchError: a file cannot be used, or the server would reject the client.
    """
    client = ClientTls(server.cert, client_cert, client_key)
    names = [name for name in _handshake(server, client) if not name.startswith(ROLE)]
    if not names:
        raise LaunchError(f"{server.setting}_cert: {server.cert} has no name in subjectAltName")
    return ClientTls(server.cert, client_cert, client_key, names[0].replace("*", "any", 1))


def check_certificates(server: ServerTls, client: ClientTls, addresses: Iterable[str]) -> None:
    """Checks that `client` would trust the server's certificate at each of `addresses`.

    Raises:
        LaunchError: a file cannot be used, or the client would not.
    """
    for address in addresses:
        host = "localhost" if address.startswith("unix:") else address.rpartition(":")[0]
        _handshake(server, client, host.strip("[]"))


def check_roles(
    server: ServerTls, client: ClientTls, services: Iterable[str], required: bool
) -> None:
    """Checks that the services' certificate is for all `services`.

    Raises:
        LaunchError: it lacks one of these roles, but has others, or must have roles (`required`).
    """
    roles = roles_among(_handshake(server, client))
    missing = [service for service in services if service not in roles]
    if missing and (roles or required):
        raise LaunchError(
            f"{server.setting}_cert: {server.cert} is for {', '.join(sorted(roles)) or 'no role'}, "
            f"but this host runs {', '.join(missing)}; add to its subjectAltName "
            f"{', '.join(f'URI:{ROLE}{service}' for service in missing)}"
        )


def _handshake(server: ServerTls, client: ClientTls, host: str | None = None) -> list[str]:
    """Returns the names in the server's certificate. If `host` is given, it must be one of them."""
    try:
        return _exchange(present_context(server), client_context(client, host), host)
    except FileError as error:
        raise LaunchError(str(error)) from error
    except ssl.SSLError as error:
        reason = getattr(error, "verify_message", "") or error.reason
        raise LaunchError(f"{server.setting}_cert: {server.cert}: {reason}") from error


def _exchange(
    server_context: ssl.SSLContext, client_context: ssl.SSLContext, host: str | None
) -> list[str]:
    to_server, to_client = ssl.MemoryBIO(), ssl.MemoryBIO()
    client = client_context.wrap_bio(to_client, to_server, server_hostname=host)
    server = server_context.wrap_bio(to_server, to_client, server_side=True)
    waiting = [client, server]
    while waiting:
        for side in tuple(waiting):
            try:
                side.do_handshake()
            except ssl.SSLWantReadError:
                continue
            waiting.remove(side)
    shown = client.getpeercert() or {}
    return [str(entry[1]) for entry in shown.get("subjectAltName", ())]
