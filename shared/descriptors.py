"""The limit of open file descriptors: each client and each block file needs one.

The default on macOS is 256.
"""

from __future__ import annotations

import resource

_MAX = 1 << 20
_MAC_MAX = 10_240
"""macOS's OPEN_MAX: higher values are refused there, even if the hard limit is "unlimited"."""


_MIN_RESERVE = 64


def reserve(limit: int) -> int:
    """Return how many descriptors of ``limit`` clients of the network must leave free: for
    processes of this server, files and libraries, some of which abort without one."""
    return min(limit // 2, max(_MIN_RESERVE, limit // 8))


def raise_descriptor_limit() -> int:
    """Raise this process's limit as far as allowed; return it.

    Hard limits of a billion are capped, because some programs allocate tables of that size.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = _MAX if hard == resource.RLIM_INFINITY else min(hard, _MAX)
    for limit in (most, min(most, _MAC_MAX)):
        if soft != resource.RLIM_INFINITY and soft >= limit:
            return soft
        try:
            resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))
        except (ValueError, OSError):
            continue
        return limit
    return soft
