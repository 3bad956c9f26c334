"""Addresses of clients and of proxies before them."""

from __future__ import annotations

import ipaddress
from collections.abc import Sequence
from functools import lru_cache

_IPV6_PREFIX = 64
"""Bits that a client's provider decides; the others are the client's own choice."""


@lru_cache(1024)
def client_network(address: str) -> str:
    """Return ``address`` if it is IPv4's, and its network if it is IPv6's."""
    if ":" not in address:
        return address
    try:
        found = ipaddress.IPv6Address(address.partition("%")[0])
    except ValueError:
        return address
    if found.ipv4_mapped is not None:
        return str(found.ipv4_mapped)
    return str(ipaddress.IPv6Network((found, _IPV6_PREFIX), strict=False))


class TrustedProxies:
    """The proxies of ``--trusted-proxy``: addresses and networks."""

    def __init__(self, given: Sequence[str]) -> None:
        """Raises ValueError."""
        self._networks = [ipaddress.ip_network(each, strict=False) for each in given]

    def __bool__(self) -> bool:
        return bool(self._networks)

    def trust(self, address: str) -> bool:
        try:
            found = ipaddress.ip_address(address)
        except ValueError:
            return False
        mapped = getattr(found, "ipv4_mapped", None)
        return any((mapped or found) in network for network in self._networks)
