"""The state of running sequences, by slot."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import mlx.core as mx

from engine.cache.pages import Pages
from engine.cache.states import StateStore
from engine.plan import Slot, Table


class Slots:
    """Tables of pages, recurrent state and last tokens of running sequences."""

    def __init__(self, pages: Pages) -> None:
        self.pages = pages
        self.states = StateStore()
        self.tables: dict[Slot, tuple[int, ...]] = {}
        """The pages of each slot. Tables are replaced and never changed, so that a pass keeps the
        one that it began with."""
        self.last_tokens = mx.zeros((0,), mx.int32)
        """(slots,): the token that each slot sampled last, on the device."""

    @property
    def contents(self) -> list[mx.array]:
        """All arrays that graphs of a step write, to be evaluated."""
        return [*self.pages.contents, self.last_tokens]

    def free(self, slots: Iterable[Slot]) -> None:
        """Drop all that is kept for ``slots``."""
        for slot in slots:
            self.tables.pop(slot, None)
            self.states.free(slot)
            self.pages.drop(slot)

    def change(self, table: Table) -> None:
        """Change a slot's table as a plan says."""
        before = self.tables.get(table.slot, ())
        self.tables[table.slot] = (*before[: table.first], *table.pages)

    def set_last_tokens(self, slots: Sequence[Slot], tokens: mx.array) -> None:
        """Record that ``slots`` sampled ``tokens`` (slots,). Nothing is evaluated."""
        if (missing := max(slots) + 1 - self.last_tokens.size) > 0:
            self.last_tokens = mx.concatenate([self.last_tokens, mx.zeros((missing,), mx.int32)])
        self.last_tokens[mx.array(slots)] = tokens
