"""Names of callers that have no name of their own."""

from __future__ import annotations

from ipaddress import IPv6Address, IPv6Network, ip_address
from urllib.parse import unquote


def host_of(peer: str) -> str:
    """The host in `ipv4:10.0.0.1:41234`; all clients on Unix sockets count as one."""
    return peer.rpartition(":")[0] if peer.startswith("ip") else "unix"


def network_of(peer: str) -> str:
    """The network of addresses that count as one anonymous caller. All loopback addresses belong to
    one host, and an IPv6 network of 64 bits usually does, too."""
    kind, _, rest = host_of(peer).partition(":")
    if not rest:
        return kind
    try:
        address = ip_address(unquote(rest).strip("[]"))
    except ValueError:
        return rest
    if isinstance(address, IPv6Address):
        address = address.ipv4_mapped or address
    if address.is_loopback:
        return "loopback"
    if isinstance(address, IPv6Address):
        return str(IPv6Network((int(address) >> 64 << 64, 64)))
    return str(address)
