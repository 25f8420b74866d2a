"""A slow link between two network namespaces: each packet arrives some time after it was sent.

    python -m tests.two_hosts.link NAMESPACE ADDRESS NAMESPACE ADDRESS MILLISECONDS

It makes an interface `slow0` in each namespace, and prints a line once packets pass. Needs root.
The kernel's own netem is not in every kernel.
"""

from __future__ import annotations

import ctypes
import fcntl
import os
import selectors
import struct
import subprocess
import sys
import time
from collections import deque
from pathlib import Path

# Of linux/if_tun.h and sched.h.
_TUNSETIFF, _IFF_TUN, _IFF_NO_PI, _CLONE_NEWNET = 0x400454CA, 0x0001, 0x1000, 0x40000000
_MTU = 65_000  # few packets, because each takes the time of a process


def open_interface(namespace: str, address: str) -> int:
    """Makes an interface with an address -> the descriptor of its packets."""
    libc = ctypes.CDLL(None, use_errno=True)
    with (
        Path("/proc/self/ns/net").open("rb") as home,
        Path(f"/run/netns/{namespace}").open("rb") as there,
    ):
        if libc.setns(there.fileno(), _CLONE_NEWNET):
            raise OSError(ctypes.get_errno(), f"cannot enter {namespace}")
        packets = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
        fcntl.ioctl(packets, _TUNSETIFF, struct.pack("16sH22x", b"slow0", _IFF_TUN | _IFF_NO_PI))
        for words in (f"addr add {address}/24 dev slow0", f"link set dev slow0 mtu {_MTU} up"):
            subprocess.run(["ip", *words.split()], check=True)
        libc.setns(home.fileno(), _CLONE_NEWNET)
    return packets


def relay(first: int, second: int, delay_s: float) -> None:
    """Passes packets on until the process is killed."""
    others = {first: second, second: first}
    on_the_way: deque[tuple[float, int, bytes]] = deque()  # when they are due, and where
    selector = selectors.DefaultSelector()
    for each in others:
        selector.register(each, selectors.EVENT_READ)
    while True:
        wait_s = max(on_the_way[0][0] - time.monotonic(), 0) if on_the_way else None
        for key, _ in selector.select(wait_s):
            packet = os.read(key.fd, _MTU + 100)
            on_the_way.append((time.monotonic() + delay_s, others[key.fd], packet))
        while on_the_way and on_the_way[0][0] <= time.monotonic():
            _, target, packet = on_the_way.popleft()
            os.write(target, packet)


def main() -> None:
    one, address, other, other_address, milliseconds = sys.argv[1:]
    ends = open_interface(one, address), open_interface(other, other_address)
    print("ready", flush=True)
    relay(*ends, float(milliseconds) / 1e3)


if __name__ == "__main__":
    main()
