"""The host names under which clients may call a server without keys.

A web page can make its own host name resolve to an address of the user's machine (DNS rebinding),
and then read the responses of a server there. Its requests carry that name as `Host`.
"""

from __future__ import annotations

import ipaddress
import re
import socket
from collections.abc import Sequence

from shared.network.host_names import MAX_NAME_CHARS, with_parents

_PORT = re.compile(r":\d*$")


class AllowedHosts:
    """Allows addresses, this machine's names, names without a dot, and ``names``.

    No web page comes from a name without a dot, which containers use to reach each other. In
    ``names``, a name that begins with a dot stands for all its subdomains, and ``*`` for all names.
    """

    def __init__(self, names: Sequence[str]) -> None:
        own = socket.gethostname().lower()
        self._names = {*map(str.lower, names), own, f"{own.partition('.')[0]}.local"}

    def allows(self, host: str | None) -> bool:
        """Return whether a request with this ``Host`` may be answered.

        A request without one does not come from a browser.
        """
        if host is None or "*" in self._names:
            return True
        name = host.strip().lower()
        if name.startswith("["):
            return _is_address(name[1:].partition("]")[0])
        name = _PORT.sub("", name).removesuffix(".")
        if len(name) > MAX_NAME_CHARS:
            return False
        if "." not in name or name.endswith(".localhost") or _is_address(name):
            return True
        return not self._names.isdisjoint(with_parents(name))


def _is_address(text: str) -> bool:
    try:
        ipaddress.ip_address(text)
    except ValueError:
        return False
    return True
