"""Addresses of routers that come and go: ``dns+tcp://NAME:PORT`` means every address of NAME."""

from __future__ import annotations

import logging
import socket
import threading
from collections.abc import Callable

logger = logging.getLogger(__name__)

PREFIX = "dns+tcp://"
LOOK_UP_S = 5.0


def is_named(address: str) -> bool:
    return address.startswith(PREFIX)


def look_up(address: str) -> frozenset[str]:
    """Return ``tcp://`` addresses for all addresses that the name has now.

    These are IPv4 addresses, or IPv6 if the name has no IPv4 address: a router with both is one
    router. Raises: `OSError`, and `UnicodeError` if it is not a valid name.
    """
    host, _, port = address.removeprefix(PREFIX).rpartition(":")
    found = socket.getaddrinfo(host.strip("[]"), int(port), type=socket.SOCK_STREAM)
    short = frozenset(
        f"tcp://{at[0]}:{port}" for family, *_, at in found if family == socket.AF_INET
    )
    return short or frozenset(f"tcp://[{at[0]}]:{port}" for *_, at in found)


class NameWatch(threading.Thread):
    """Looks up a name repeatedly, on a thread because a lookup may take seconds.

    A name that is not found keeps its addresses: the answer is missing, not the routers.
    """

    def __init__(
        self,
        address: str,
        look_up: Callable[[str], frozenset[str]] = look_up,
        interval_s: float = LOOK_UP_S,
    ) -> None:
        super().__init__(name="names", daemon=True)
        self.address = address
        self.found: frozenset[str] = frozenset()
        """The addresses from the last successful lookup."""
        self._look_up, self._interval_s = look_up, interval_s
        self._stopping = threading.Event()

    def run(self) -> None:
        complaint = ""
        while not self._stopping.is_set():
            try:
                self.found = self._look_up(self.address)
                complaint = ""
            except (OSError, UnicodeError) as error:
                if str(error) != complaint:  # only the first failure in a row is logged
                    logger.warning("cannot look up %s: %s", self.address, error)
                complaint = str(error)
            self._stopping.wait(self._interval_s)

    def stop(self) -> None:
        self._stopping.set()
