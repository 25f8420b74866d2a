"""Makes gRPC credentials from PEM files. Needs only gRPC: the client library uses it, too."""

from __future__ import annotations

import base64
import os
import re
import ssl
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import grpc

_Stamp = tuple[tuple[int, int, int], ...]


class FileError(OSError):
    """A file that a setting names cannot be used; the message names the setting."""


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

    def stamp(self) -> _Stamp:
        """A value that changes when a file does; empty while one is missing."""
        return _stamp(self.cert, self.key, self.client_ca, self.apart_from)


@dataclass(frozen=True)
class ClientTls:
    """The files by which a client verifies servers, and the certificate that it presents.

    `ca`: signed the servers' certificates, by default whatever gRPC itself trusts; `cert` and
    `key`: the client's own, if servers require them; `server_name`: the name in the server's
    certificate, by default the host that is dialled (for a Unix socket `localhost`).
    """

    ca: str = ""
    cert: str = ""
    key: str = ""
    server_name: str = ""

    @classmethod
    def from_environment(cls, environment: Mapping[str, str] = os.environ) -> ClientTls | None:
        """Reads NANO_TLS_CA, NANO_CLIENT_CERT, NANO_CLIENT_KEY and NANO_TLS_SERVER_NAME; None if
        none of them is set."""
        names = ("NANO_TLS_CA", "NANO_CLIENT_CERT", "NANO_CLIENT_KEY", "NANO_TLS_SERVER_NAME")
        values = [environment.get(name, "") for name in names]
        return cls(*values) if any(values) else None

    def stamp(self) -> _Stamp:
        """A value that changes when a file does; empty while one is missing."""
        return _stamp(self.ca, self.cert, self.key)


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


def channel_credentials(tls: ClientTls) -> grpc.ChannelCredentials:
    """Credentials from what the files hold now.

    Raises:
        FileError: a file cannot be read, or is not what it should be.
    """
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    load_files("TLS", context, tls.cert, tls.key, tls.ca)
    return grpc.ssl_channel_credentials(
        root_certificates=_read(tls.ca) if tls.ca else None,
        private_key=_read(tls.key) if tls.key else None,
        certificate_chain=_read(tls.cert) if tls.cert else None,
    )


def client_context(client: ClientTls, host: str | None = None) -> ssl.SSLContext:
    """A context for Python's own TLS that verifies as gRPC would.

    Args:
        host: the name that the server's certificate must have; None: any.

    Raises:
        FileError: a file cannot be used.
    """
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = host is not None
    context.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN  # as gRPC does
    load_files("client", context, client.cert, client.key, client.ca)
    return context


def load_files(setting: str, context: ssl.SSLContext, cert: str, key: str, ca: str) -> None:
    """Loads files into `context`, which checks that they exist, are what they should be and match.
    `setting` is for the message.

    Raises:
        FileError: they do not.
    """
    try:
        if cert or key:
            what = f"{setting}_cert, {setting}_key: {cert or 'none'} with {key or 'none'}"
            # Without a password, even an empty one, OpenSSL would ask for one on the terminal.
            context.load_cert_chain(cert, key or None, password="")
        if ca:
            what = f"{setting}_ca: {ca}"
            context.load_verify_locations(ca)
    except OSError as error:  # ssl.SSLError is one
        reason = getattr(error, "reason", None) or error.strerror or str(error)
        raise FileError(f"{what}: {reason}") from error


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
    found = re.findall(rb"-----BEGIN CERTIFICATE-----(.*?)-----END", _read(path), re.DOTALL)
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
            [(_read(tls.key), _read(tls.cert))],
            root_certificates=_read(tls.client_ca) if tls.client_ca else None,
        )


def _read(path: str) -> bytes:
    try:
        with open(path, "rb") as file:
            return file.read()
    except OSError as error:
        raise FileError(f"{path}: {error.strerror}") from error


def _stamp(*paths: str) -> _Stamp:
    try:
        found = [os.stat(path) for path in paths if path]
    except OSError:
        return ()
    return tuple((each.st_mtime_ns, each.st_size, each.st_ino) for each in found)
