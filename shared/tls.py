"""The certificates that servers present and the clients that they admit, from PEM files."""

from __future__ import annotations

import base64
import re
import ssl
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import grpc
import structlog

from nano_vllm_grpc.tls import FileError, Stamp, load_files, read_file, stamp_of

log = structlog.get_logger(__name__)

Contents = TypeVar("Contents")


@dataclass(frozen=True)
class ServerTls:
    """The certificate that a server presents, and the authorities of the clients that it admits.

    `client_ca`: a client's certificate must be signed by one of these; empty: anybody may connect.
    `setting`: the prefix of the settings' names. `apart_from`: internal_tls_ca, if no certificate
    in that file may also be in `client_ca`.
    """

    cert: str
    key: str
    client_ca: str = ""
    setting: str = "tls"
    apart_from: str = ""

    def stamp(self) -> Stamp:
        """Returns a value that changes when a file changes; empty while a file is missing."""
        return stamp_of(self.cert, self.key, self.client_ca, self.apart_from)


def server_credentials(tls: ServerTls) -> grpc.ServerCredentials:
    """Credentials that follow the files: each new connection gets their present contents. If the
    files do not fit together, as in a half-finished replacement, the last usable ones stay in use.

    Raises:
        FileError: a file cannot be used.
    """
    follower = _Follower(tls, _configuration)
    return grpc.dynamic_ssl_server_credentials(
        follower.current,
        follower.reread,  # type: ignore[arg-type]  # the stubs lack the None that is documented
        require_client_authentication=bool(tls.client_ca),
    )


def server_context(tls: ServerTls) -> ssl.SSLContext:
    """A context for servers of asyncio that follows the files like `server_credentials`.

    Raises:
        FileError: a file cannot be used.
    """
    context = _FollowingContext(ssl.PROTOCOL_TLS_SERVER)
    context.follower = _Follower(tls, present_context)
    return context


def _check_apart(client_ca: str, internal_ca: str) -> None:
    """Checks that no authority signs the certificates of both clients and services. Otherwise a
    client could pass for a service. The check finds equal certificates in the files, but not an
    authority that has signed another.

    Raises:
        FileError: both files hold a certificate, or a file cannot be read.
    """
    if client_ca and internal_ca and _certificates(client_ca) & _certificates(internal_ca):
        raise FileError(
            f"tls_client_ca, internal_tls_ca: {client_ca} and {internal_ca} hold the same "
            "certificate, so that every client could pass for a service: use another authority for "
            "clients, or internal_tls_roles=required and a role in each service's certificate"
        )


def _certificates(path: str) -> set[bytes]:
    """The certificates in a PEM file, decoded."""
    found = re.findall(rb"-----BEGIN CERTIFICATE-----(.*?)-----END", read_file(path), re.DOTALL)
    return {base64.b64decode(each) for each in found}


class _Follower(Generic[Contents]):
    """Reads a server's certificate again when its files change."""

    def __init__(self, tls: ServerTls, read: Callable[[ServerTls], Contents]) -> None:
        self._tls = tls
        self._read = read
        self._seen = tls.stamp()
        self.current = read(tls)

    def reread(self) -> Contents | None:
        """Returns the contents of the files, or None if they have not changed or cannot be used.
        Call it at the start of each connection."""
        stamp = self._tls.stamp()
        if stamp == self._seen:
            return None
        try:
            found = self._read(self._tls)
        except FileError as error:
            reason = str(error)
            log.warning("cannot reload certificates; keeping the last ones", reason=reason)
            found = None
        if self._tls.stamp() == stamp:  # else a file changed meanwhile: try again next time
            self._seen = stamp
            self.current = found or self.current
            return found
        return None


class _FollowingContext(ssl.SSLContext):
    """A context for asyncio's servers, with the files' present contents for each connection."""

    follower: _Follower[ssl.SSLContext]

    def wrap_bio(self, *args: Any, **kwargs: Any) -> ssl.SSLObject:
        self.follower.reread()
        return self.follower.current.wrap_bio(*args, **kwargs)


def present_context(tls: ServerTls) -> ssl.SSLContext:
    """A context for servers with the files' present contents.

    Raises:
        FileError: a file cannot be used.
    """
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    load_files(tls.setting, context, tls.cert, tls.key, tls.client_ca)
    _check_apart(tls.client_ca, tls.apart_from)
    if tls.client_ca:
        context.verify_mode = ssl.CERT_REQUIRED
        context.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN  # as gRPC does
    context.set_alpn_protocols(["http/1.1"])
    return context


def _configuration(tls: ServerTls) -> grpc.ServerCertificateConfiguration:
    present_context(tls)  # which checks the files
    return grpc.ssl_server_certificate_configuration(
        [(read_file(tls.key), read_file(tls.cert))],
        root_certificates=read_file(tls.client_ca) if tls.client_ca else None,
    )
