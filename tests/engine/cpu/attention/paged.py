"""Slots whose pages are scattered in the host's memory."""

from collections.abc import Collection

import numpy as np

from engine.cache.layout import Layout
from engine.cache.slots import Slots
from engine.cpu.pages.host_pages import HostPages
from engine.plan import Table

PAGE = 64


def spoil(pages: HostPages) -> None:
    """Fill pages with NaN, or with codes whose scales are NaN."""
    sizes = [len(part) for part in pages.exporter(0)()]
    for page in range(pages.num_pages):
        pages.insert(page, tuple(b"\xff" * size for size in sizes))


def host_slots(layout: Layout, rows: int, tokens: int, unpacked: Collection[int] = ()) -> Slots:
    """Return ``rows`` slots with spoiled pages for so many ``tokens``. Some are unpacked."""
    pages = HostPages(layout, PAGE)
    pages.resize(rows * -(-tokens // PAGE))
    spoil(pages)
    slots = Slots(pages)
    shuffled = np.random.default_rng(0).permutation(pages.num_pages)
    for slot, table in enumerate(np.split(shuffled, rows)):
        slots.change(Table(slot, 0, tuple(table.tolist())))
    for slot in unpacked:
        pages.unpack(slot, tokens)
    return slots
