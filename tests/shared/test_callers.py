from __future__ import annotations

import pytest

from shared.rpc.callers import network_of


@pytest.mark.parametrize(
    ("peer", "network"),
    [
        ("unix:", "unix"),
        ("unix:/run/s.sock", "unix"),
        ("ipv4:127.0.0.1:41234", "loopback"),
        ("ipv4:127.255.3.4:1", "loopback"),
        ("ipv6:%5B::1%5D:41234", "loopback"),
        ("ipv6:[::ffff:127.0.0.9]:1", "loopback"),
        ("ipv6:%5B::ffff:10.0.0.7%5D:1", "10.0.0.7"),
        ("ipv4:10.0.0.7:41234", "10.0.0.7"),
        ("ipv6:%5B2001:db8:1:2:3:4:5:6%5D:443", "2001:db8:1:2::/64"),
        ("ipv6:%5Bfe80::1%25eth0%5D:1", "fe80::/64"),
    ],
)
def test_a_caller_without_a_name_is_its_network(peer: str, network: str) -> None:
    assert network_of(peer) == network
