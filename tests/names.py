"""A name server that may know no name: `dns://SERVER/NAME:PORT` has gRPC ask it."""

from __future__ import annotations

import asyncio
import struct
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

_HEADER = struct.Struct(">HHHHHH")  # RFC 1035, 4.1.1
_ANSWER, _NO_SUCH_NAME = 0x8180, 0x8183
_LOOPBACK = struct.pack(">HHHIH4s", 0xC00C, 1, 1, 0, 4, bytes([127, 0, 0, 1]))


class Names(asyncio.DatagramProtocol):
    """All names are those of this host once they are `known`, before that there are none."""

    def __init__(self) -> None:
        self.known = False
        self.num_asked = 0
        self._address = ""

    def address(self, target: str) -> str:
        """The gRPC address of `name:port`, looked up here."""
        return f"dns://{self._address}/{target}"

    def connection_made(self, transport: Any) -> None:
        self._transport = transport
        self._address = "{}:{}".format(*transport.get_extra_info("sockname"))

    def datagram_received(self, data: bytes, sender: tuple[str | Any, int]) -> None:
        self.num_asked += 1
        (query,) = struct.unpack_from(">H", data)
        end = data.index(b"\0", _HEADER.size) + 5
        is_ipv4 = data[end - 4 : end - 2] == b"\0\1"
        flags = _ANSWER if self.known else _NO_SUCH_NAME
        found = _LOOPBACK if self.known and is_ipv4 else b""
        header = _HEADER.pack(query, flags, 1, bool(found), 0, 0)
        self._transport.sendto(header + data[_HEADER.size : end] + found, sender)


@asynccontextmanager
async def name_server() -> AsyncIterator[Names]:
    loop = asyncio.get_running_loop()
    transport, names = await loop.create_datagram_endpoint(Names, local_addr=("127.0.0.1", 0))
    try:
        yield names
    finally:
        transport.close()
