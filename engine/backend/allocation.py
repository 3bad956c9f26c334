"""How the C library of Linux allocates: in huge pages, and without giving memory back.

A page of 4 KB costs a fault when it is first touched, which in a virtual machine may take
longer than to compute what is stored there. glibc reads this when a process starts, so it
has to be in the environment of an engine; other systems ignore it.
"""

from __future__ import annotations

import os
from collections.abc import Mapping

VARIABLE = "GLIBC_TUNABLES"

_TUNABLES = {
    "glibc.malloc.hugetlb": 1,  # ask for huge pages where the system leaves it to programs
    # From the heap come also arrays that would each get pages of their own, which are
    # given back and faulted in again, and lie across the borders of huge pages.
    "glibc.malloc.mmap_threshold": 1 << 30,
    "glibc.malloc.trim_threshold": 1 << 32,
    "glibc.malloc.top_pad": 64 << 20,
}


def environment(given: Mapping[str, str]) -> dict[str, str]:
    """What to add to the environment ``given`` of an engine: nothing that is there already."""
    if VARIABLE in given:
        return {}
    return {VARIABLE: ":".join(f"{name}={value}" for name, value in _TUNABLES.items())}


def prefault(size: int) -> None:
    """Writes to ``size`` bytes that the heap then keeps, so that it is not the first requests
    that wait for the system to find them: 3 ms a megabyte where a virtual machine's host has
    to as well. Nothing where the heap would give them back."""
    if os.environ.get(VARIABLE) == environment({})[VARIABLE]:
        _ = b"\1" * size
