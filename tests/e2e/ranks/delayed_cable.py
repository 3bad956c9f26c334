"""A cable between two network namespaces whose packets arrive late, where the kernel has no netem.

``python -m tests.e2e.ranks.delayed_cable DEVICE DESCRIPTOR DELAY_S`` is one end: it carries what is
sent through the TUN device to the other end, at the socket DESCRIPTOR, and back.
"""

from __future__ import annotations

import fcntl
import os
import select
import socket
import struct
import subprocess
import sys
import time
from collections import deque
from contextlib import suppress

_TUNSETIFF, _IFF_TUN, _IFF_NO_PI = 0x400454CA, 0x0001, 0x1000
MTU = 60_000


def lay(addresses: tuple[str, str], second: tuple[str, ...], delay_s: float) -> list[int]:
    """Connect this network and that in which ``second`` runs commands. Return the processes of the
    two ends, which end with either."""
    ends = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    found = []
    for number, (end, address) in enumerate(zip(ends, addresses, strict=True)):
        prefix, device = second if number else (), f"delayed{number}"
        for command in (
            f"ip tuntap add dev {device} mode tun",
            f"ip addr add {address}/24 dev {device}",
            f"ip link set {device} mtu {MTU} up",
        ):
            subprocess.run([*prefix, *command.split()], check=True)
        words = (device, str(end.fileno()), str(delay_s))
        process = subprocess.Popen(
            [*prefix, sys.executable, "-m", "tests.e2e.ranks.delayed_cable", *words],
            pass_fds=(end.fileno(),),
        )
        found.append(process.pid)
        end.close()
    return found


def carry(device: str, peer: socket.socket, delay_s: float) -> None:
    """Carry packets until the other end or the device is gone."""
    tun = os.open("/dev/net/tun", os.O_RDWR)
    fcntl.ioctl(tun, _TUNSETIFF, struct.pack("16sH", device.encode(), _IFF_TUN | _IFF_NO_PI))
    late: deque[tuple[float, bytes]] = deque()
    while True:
        wait_s = max(0.0, late[0][0] - time.monotonic()) if late else None
        for ready in select.select([tun, peer.fileno()], [], [], wait_s)[0]:
            if ready == tun:
                late.append((time.monotonic() + delay_s, os.read(tun, MTU)))
            elif packet := peer.recv(MTU):
                os.write(tun, packet)
            else:
                return
        while late and late[0][0] <= time.monotonic():
            peer.send(late.popleft()[1])


if __name__ == "__main__":
    name, number, seconds = sys.argv[1:]
    with suppress(OSError):
        carry(name, socket.socket(fileno=int(number)), float(seconds))
