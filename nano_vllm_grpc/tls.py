"""The files by which clients verify servers, loaded for gRPC and for Python's own TLS."""

from __future__ import annotations

import os
import ssl
from collections.abc import Mapping
from dataclasses import dataclass

import grpc

Stamp = tuple[tuple[int, int, int], ...]


class FileError(OSError):
    """A file that a setting names cannot be used; the message names the setting."""


@dataclass(frozen=True)
class ClientTls:
    """The files by which a client verifies servers, and the certificate that it presents.

    `ca`: of the authority for the servers' certificates, by default any that gRPC itself trusts.
    `cert` and `key`: the client's own, if servers require them. `server_name`: the name in the
    server's certificate, by default the host that is dialled (for a Unix socket `localhost`).
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

    def stamp(self) -> Stamp:
        """A value that changes when a file does; empty while one is missing."""
        return stamp_of(self.ca, self.cert, self.key)


def channel_credentials(tls: ClientTls) -> grpc.ChannelCredentials:
    """Credentials from the current contents of the files.

    Raises:
        FileError: a file cannot be read, or is invalid.
    """
    load_files("TLS", ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT), tls.cert, tls.key, tls.ca)
    return grpc.ssl_channel_credentials(
        root_certificates=read_file(tls.ca) if tls.ca else None,
        private_key=read_file(tls.key) if tls.key else None,
        certificate_chain=read_file(tls.cert) if tls.cert else None,
    )


def client_context(client: ClientTls, host: str | None = None) -> ssl.SSLContext:
    """A context for Python's own TLS that verifies servers as gRPC does.

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
    """Loads files into `context`, which checks that they exist, are valid and match.
    `setting`: the prefix of the settings that an error names.

    Raises:
        FileError: a file is missing or invalid, or the files do not match.
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


def read_file(path: str) -> bytes:
    """Reads a file. Raises FileError if that fails."""
    try:
        with open(path, "rb") as file:
            return file.read()
    except OSError as error:
        raise FileError(f"{path}: {error.strerror}") from error


def stamp_of(*paths: str | os.PathLike[str]) -> Stamp:
    """A value that changes when a file does; empty while one is missing."""
    try:
        found = [os.stat(path) for path in paths if path]
    except OSError:
        return ()
    return tuple((each.st_mtime_ns, each.st_size, each.st_ino) for each in found)
