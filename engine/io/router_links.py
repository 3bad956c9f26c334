"""All routers of an engine: those at fixed addresses, and those to which a name leads now."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping

import zmq

from engine.io.router_link import RouterLink
from shared.network.curve import EngineKeys
from shared.network.named_address import NameWatch, is_named

logger = logging.getLogger(__name__)


class RouterLinks:
    """The connections to all routers. Used on the IO thread only, once it runs."""

    def __init__(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        addresses: Mapping[str, EngineKeys | None],
        watch: Callable[[str], NameWatch] = NameWatch,
    ) -> None:
        """Connect to ``addresses``, each with its keys. Names are looked up from `start` on."""
        self._context, self._keys = context, addresses
        self._watches = [watch(address) for address in addresses if is_named(address)]
        self._links = {
            address: RouterLink(context, address, keys)
            for address, keys in addresses.items()
            if not is_named(address)
        }
        self._fixed = frozenset(self._links)

    def __iter__(self) -> Iterator[RouterLink]:
        return iter(tuple(self._links.values()))

    def start(self) -> None:
        for watch in self._watches:
            watch.start()

    def follow_names(self) -> tuple[list[RouterLink], list[RouterLink]]:
        """Connect to routers that are new. Return their connections, and those to be closed.

        A router that has lost its name is kept as long as it is connected, or may have requests:
        one that ends finishes them first.
        """
        if not self._watches:
            return [], []
        wanted = {each: watch.address for watch in self._watches for each in watch.found}
        new = [each for each in wanted if each not in self._links]
        for address in new:
            logger.info("a router at %s, which is %s now", address, wanted[address])
            link = RouterLink(self._context, address, self._keys[wanted[address]])
            self._links[address] = link
        old = [
            address
            for address, link in self._links.items()
            if address not in self._fixed and address not in wanted and link.is_away
        ]
        for address in old:
            logger.info("the router at %s has lost its name and is gone", address)
        return [self._links[each] for each in new], [self._links.pop(each) for each in old]

    def close(self) -> None:
        for watch in self._watches:
            watch.stop()
        for link in self:
            link.close()
