"""The number of descriptors that a process may have: each client, and each block file, needs one.

On a Mac it is 256 at first.
"""

from __future__ import annotations

import resource

_MOST = 1 << 20
_MAC_MOST = 10_240
"""macOS's OPEN_MAX: more is refused there, even where the hard limit says "unlimited"."""


def raise_descriptor_limit() -> int:
    """Raise the limit of this process to what it may be at most; return it.

    Hard limits of a billion are cut: tables of that size are allocated by some programs.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = _MOST if hard == resource.RLIM_INFINITY else min(hard, _MOST)
    for limit in (most, min(most, _MAC_MOST)):
        if soft != resource.RLIM_INFINITY and soft >= limit:
            return soft
        try:
            resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))
        except (ValueError, OSError):
            continue
        return limit
    return soft
