"""The certificates that servers present, and whom they admit, from PEM files."""

from __future__ import annotations

import base64
import re
import ssl
from collections.abc import Callable
from dataclasses import dataclass

import grpc

from nano_vllm_grpc.tls import FileError, Stamp, load_files, read_file, stamp_of


@dataclass(frozen=True)
class ServerTls:
    """The certificate that a server presents, and which clients it admits.

    `client_ca`: clients must have a certificate signed by one of these; empty: anybody may connect.
    `setting`: the prefix of the settings' names. `apart_from`: internal_tls_ca, if no certificate
    in that file may also be in `client_ca`.
    """

    cert: str
    key: str
    client_ca: str = ""
    setting: str = "tls"
    apart_from: str = ""

    def stamp(self) -> Stamp:
        """A value that changes when a file does; empty while one is missing."""
        return stamp_of(self.cert, self.key, self.client_ca, self.apart_from)


def server_credentials(tls: ServerTls, warn: Callable[[str], None]) -> grpc.ServerCredentials:
    """Credentials that follow the files: each new connection gets what they hold at the time. Files
    that do not fit together, such as half-replaced ones, change nothing; `warn` gets the reason.

    Raises:
        FileError: a file cannot be used.
    """
    follower = _Follower(tls, warn)
    return grpc.dynamic_ssl_server_credentials(
        follower.first,
        follower.reread,  # type: ignore[arg-type]  # the stubs lack the None that is documented
        require_client_authentication=bool(tls.client_ca),
    )


def check_apart(client_ca: str, internal_ca: str) -> None:
    """Checks that no authority signs the certificates of both clients and services: whoever has one
    for a client could pass for a service. Only equal certificates are found, not one authority that
    has signed another.

    Raises:
        FileError: one does, or a file cannot be read.
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


class _Follower:
    """The latest usable certificate of a server."""

    def __init__(self, tls: ServerTls, warn: Callable[[str], None]) -> None:
        self._tls = tls
        self._warn = warn
        self._seen = tls.stamp()
        self.first = self._read()

    def reread(self) -> grpc.ServerCertificateConfiguration | None:
        """Returns what the files hold, or None if nothing has changed or they cannot be used. gRPC
        calls it at the start of each connection."""
        stamp = self._tls.stamp()
        if stamp == self._seen:
            return None
        try:
            config = self._read()
        except FileError as error:
            self._warn(str(error))
            config = None
        if self._tls.stamp() == stamp:  # else they changed while being read: try again next time
            self._seen = stamp
            return config
        return None

    def _read(self) -> grpc.ServerCertificateConfiguration:
        tls = self._tls
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        load_files(tls.setting, context, tls.cert, tls.key, tls.client_ca)
        check_apart(tls.client_ca, tls.apart_from)
        return grpc.ssl_server_certificate_configuration(
            [(read_file(tls.key), read_file(tls.cert))],
            root_certificates=read_file(tls.client_ca) if tls.client_ca else None,
        )
