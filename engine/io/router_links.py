"""All routers of an engine, at fixed addresses and at the current addresses of a name."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping

import zmq

from engine.io.router_link import RouterLink
from shared.network.curve import EngineKeyFiles
from shared.network.named_address import NameWatch, is_named

logger = logging.getLogger(__name__)


class RouterLinks:
    """The connections to all routers. Used on the IO thread only, once it runs."""

    def __init__(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        addresses: Mapping[str, EngineKeyFiles | None],
        watch: Callable[[str], NameWatch] = NameWatch,
    ) -> None:
        """Connect to ``addresses``, each with its keys. Names are looked up after `start`."""
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
        """Connect to new routers. Return their connections, and the connections to close.

        A router whose address has left the name is kept while it is connected or may have requests:
        a router that shuts down finishes them first.
        """
        if not self._watches:
            return [], []
        wanted = {each: watch.address for watch in self._watches for each in watch.found}
        new = [each for each in wanted if each not in self._links]
        for address in new:
            logger.info("found a router at %s for %s", address, wanted[address])
            link = RouterLink(self._context, address, self._keys[wanted[address]])
            self._links[address] = link
        old = [
            address
            for address, link in self._links.items()
            if address not in self._fixed and address not in wanted and link.is_away
        ]
        for address in old:
            logger.info("the router at %s is gone, and its address has left the name", address)
        return [self._links[each] for each in new], [self._links.pop(each) for each in old]

    def close(self) -> None:
        for watch in self._watches:
            watch.stop()
        for link in self:
            link.close()
