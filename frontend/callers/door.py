"""The address, on loopback, at which a frontend serves the gateway of its stack."""

from __future__ import annotations

from collections.abc import Callable, Collection

import structlog

from frontend.callers.tenants import Client
from shared.errors import PermissionDeniedError
from shared.rpc.peers import is_own_process

log = structlog.get_logger(__name__)

_HTTP = "http"


class Door:
    """Admits processes of the stack's own user, without TLS and tokens, neither of which gateways
    have for it: they have asked their own callers for them.

    Where clients have names, all that call here are one, `http`, whose line in the tokens file says
    what it may.

    Args:
        address: on loopback, or a Unix socket, which only this user can open anyway.
        methods: paths of the methods that are called there.
        find: a client by its name; None: clients have no names.
    """

    def __init__(
        self, address: str, methods: Collection[str], find: Callable[[str], Client | None] | None
    ) -> None:
        self.methods = frozenset(methods)
        self._address = address
        self._find = find

    def client(self) -> Client | None:
        """The client that those who call here are."""
        if self._find is None:
            return None
        return self._find(_HTTP) or Client(_HTTP)

    def check(self, peer: str) -> None:
        """
        Args:
            peer: who calls, as gRPC writes it.

        Raises:
            PermissionDeniedError: it is not a process of this user.
        """
        if self._address.startswith("unix:"):
            return
        host, _, port = self._address.rpartition(":")
        try:
            if is_own_process(peer, host, int(port)):
                return
        except OSError as error:
            log.error("cannot tell whose process calls", reason=str(error))
        raise PermissionDeniedError("for processes of the user that runs this stack alone")
