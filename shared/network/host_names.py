"""Names of hosts, as in DNS."""

from __future__ import annotations

import ipaddress

MAX_NAME_CHARS, MAX_LABEL_CHARS = 253, 63
"""Check them first: what is done with longer names takes time or memory by the square of their
length."""


def with_parents(name: str) -> set[str]:
    """Return ``name`` and, with a dot before them, its parent domains, in which an operator may
    have allowed all hosts. Only for a name of at most `MAX_NAME_CHARS`."""
    return {name, *(name[at:] for at, char in enumerate(name) if char == ".")}


def is_loopback(host: str) -> bool:
    """Return whether only this machine can reach ``host``."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
