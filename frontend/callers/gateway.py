"""Admits the gateway of a frontend's stack, by the user of the process that calls over loopback."""

from __future__ import annotations

import ipaddress
import os
import socket
import struct
from collections.abc import Callable, Collection
from urllib.parse import unquote

import structlog

from frontend.callers.tenants import Tenant
from shared.errors import PermissionDeniedError

log = structlog.get_logger(__name__)

_HTTP = "http"
# From linux/sock_diag.h, linux/netlink.h and linux/inet_diag.h.
_SOCK_DIAG = 4
_BY_FAMILY = 20
_REQUEST = 1
_ESTABLISHED = 1
_ANY_STATE = _NO_COOKIE = 0xFFFFFFFF
_HEADER = struct.Struct("=IHHII")
_QUERY = struct.Struct("=BBBxI")
_PORTS = struct.Struct(">HH")
_UID_AT = _HEADER.size + 4 + 48 + 12  # after state and kind, the connection, and three counters


class GatewayAddress:
    """The address at which a frontend serves the gateway of its stack. It admits processes of the
    stack's own user. They need no TLS and no tokens, which gateways lack here. Gateways have asked
    their own callers for tokens.

    If clients have names, all callers at this address are one client, `http`. Its line in the
    tokens file has its limits.

    Args:
        address: on loopback, or a Unix socket, which only this user can open.
        methods: paths of the methods that are served there.
        find: returns a client by its name; None if clients have no names.
    """

    def __init__(
        self, address: str, methods: Collection[str], find: Callable[[str], Tenant | None] | None
    ) -> None:
        self.methods = frozenset(methods)
        self._address = address
        self._find = find

    def client(self) -> Tenant | None:
        """The client that stands for all callers at this address."""
        if self._find is None:
            return None
        return self._find(_HTTP) or Tenant(_HTTP)

    def check(self, peer: str) -> None:
        """Checks that the caller is a process of this user.

        Args:
            peer: the caller's address, as gRPC writes it.

        Raises:
            PermissionDeniedError: the caller is not a process of this user.
        """
        if self._address.startswith("unix:"):
            return
        host, _, port = self._address.rpartition(":")
        try:
            if _is_own_process(peer, host, int(port)):
                return
        except OSError as error:
            log.error("cannot look up the caller's process; rejecting the call", reason=str(error))
        raise PermissionDeniedError("only processes of the stack's user may call this address")


def _is_own_process(peer: str, host: str, port: int) -> bool:
    """Whether the other end of an open connection belongs to a process of this user.

    Asks the kernel for that one socket (sock_diag(7)), which takes some 15 us.

    Args:
        peer: the other end as gRPC writes it, `ipv4:127.0.0.1:41234`.
        host, port: this end, on loopback.

    Raises:
        OSError: the kernel cannot be asked.
    """
    kind, _, rest = peer.partition(":")
    if kind not in ("ipv4", "ipv6"):
        return False
    theirs, _, their_port = unquote(rest).rpartition(":")
    end = ipaddress.ip_address(theirs.strip("[]"))
    own = ipaddress.ip_address("127.0.0.1" if host == "localhost" else host.strip("[]"))
    if not end.is_loopback or end.version != own.version:
        return False
    family = socket.AF_INET if end.version == 4 else socket.AF_INET6
    connection = (
        _PORTS.pack(int(their_port), port)
        + end.packed.ljust(16, b"\0")
        + own.packed.ljust(16, b"\0")
        + struct.pack("=III", 0, _NO_COOKIE, _NO_COOKIE)
    )
    query = _QUERY.pack(family, socket.IPPROTO_TCP, 0, _ANY_STATE) + connection
    with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW | socket.SOCK_CLOEXEC, _SOCK_DIAG) as ask:
        ask.sendall(_HEADER.pack(_HEADER.size + len(query), _BY_FAMILY, _REQUEST, 1, 0) + query)
        answer = ask.recv(1 << 12)
    if _HEADER.unpack_from(answer)[1] != _BY_FAMILY:
        return False  # the connection no longer exists
    state = answer[_HEADER.size + 1]
    (uid,) = struct.unpack_from("=I", answer, _UID_AT)
    # The kernel reports a socket that its process has closed as root's.
    return bool(state == _ESTABLISHED and uid == os.geteuid())
