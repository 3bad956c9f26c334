"""The addresses of clients, by which a server without API keys tells them apart."""

from __future__ import annotations

import ipaddress
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence

from starlette.datastructures import Headers
from starlette.types import Scope

from shared.network.client_address import TrustedProxies, client_network

_KEEP_S = 60.0
_MAX_KEPT = 10_000


class ClientAddresses:
    """Finds the address of a request's client, and remembers who was there lately."""

    def __init__(
        self, trusted_proxies: Sequence[str], clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._proxies = TrustedProxies(trusted_proxies)
        self._clock = clock
        self._seen_at: OrderedDict[str, float] = OrderedDict()

    def of(self, scope: Scope, headers: Headers) -> str:
        """Return the address of the client, or its network with IPv6, where one client has many
        addresses. Addresses that proxies forward count only if the proxy is trusted."""
        client = scope.get("client")
        address = client[0] if client else ""
        if self._proxies and self._proxies.trust(address):
            for forwarded in reversed(headers.getlist("x-forwarded-for")):
                for each in reversed(forwarded.split(",")):
                    try:
                        address = str(ipaddress.ip_address(each.strip()))
                    except ValueError:
                        return client_network(address)
                    if not self._proxies.trust(address):
                        return client_network(address)
        return client_network(address)

    def is_alone(self, address: str) -> bool:
        """Note a request of ``address``. Return whether no other sent any in the last minute."""
        now = self._clock()
        self._seen_at[address] = now
        self._seen_at.move_to_end(address)
        while len(self._seen_at) > _MAX_KEPT or next(iter(self._seen_at.values())) < now - _KEEP_S:
            self._seen_at.popitem(last=False)
        return len(self._seen_at) == 1
