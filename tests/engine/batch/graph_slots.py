"""Slots whose pages are scattered in MLX's memory."""

from __future__ import annotations

import numpy as np

from engine.cache.graph_pages import GraphPages
from engine.cache.layout import Layout
from engine.cache.slots import Slots
from engine.plan import Table


def spoil(pages: GraphPages) -> None:
    """Fill pages with NaN, or with codes whose scales are NaN."""
    sizes = pages.layout.page_buffers(pages.page_tokens)
    for page in range(pages.num_pages):
        pages.insert(page, tuple(b"\xff" * size for size in sizes))


def graph_slots(layout: Layout, rows: int, tokens: int, page_tokens: int = 16) -> Slots:
    """Return ``rows`` slots with spoiled pages for so many ``tokens``."""
    pages = GraphPages(layout, page_tokens, rows * -(-tokens // page_tokens))
    spoil(pages)
    slots = Slots(pages)
    shuffled = np.random.default_rng(0).permutation(pages.num_pages)
    for slot, table in enumerate(np.split(shuffled, rows)):
        slots.change(Table(slot, 0, tuple(table.tolist())))
    return slots
