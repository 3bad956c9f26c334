"""Slots: rows of slabs, which hold the KV of running sequences."""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from dataclasses import dataclass

from engine.plan import SlabSpec, Slot


@dataclass(eq=False, slots=True)
class _SlabRows:
    slab: SlabSpec
    free: list[int]


class SlotTable:
    """Slabs and their free rows. A slab is freed only by `pop_empty_slab` and resized only by
    `resize`, so emptying and refilling a slab costs nothing."""

    def __init__(self) -> None:
        self._slabs: dict[int, _SlabRows] = {}
        self._empty: dict[int, SlabSpec] = {}
        self._next_id = 0
        self.used_rows = 0

    def slabs(self) -> Iterator[SlabSpec]:
        return (rows.slab for rows in self._slabs.values())

    def empty_slabs(self) -> Iterator[SlabSpec]:
        return iter(self._empty.values())

    def used(self) -> Iterator[tuple[int, int]]:
        """Yield for each slab the number of rows in use, and their capacity."""
        for rows in self._slabs.values():
            yield rows.slab.rows - len(rows.free), rows.slab.capacity

    def add(self, rows: int, capacity: int) -> SlabSpec:
        """Add a slab whose rows are all free."""
        slab = SlabSpec(self._next_id, rows, capacity)
        self._next_id += 1
        self._slabs[slab.slab_id] = _SlabRows(slab, list(range(rows)))
        self._empty[slab.slab_id] = slab
        return slab

    def slab_of(self, capacity: int) -> SlabSpec | None:
        """Return the oldest slab of exactly ``capacity`` tokens a row."""
        return next((slab for slab in self.slabs() if slab.capacity == capacity), None)

    def rows_to_keep(self, slab: SlabSpec) -> int:
        """Return the min number of rows of ``slab``: up to the last one in use."""
        free = set(self._slabs[slab.slab_id].free)
        return next((row + 1 for row in reversed(range(slab.rows)) if row not in free), 0)

    def resize(self, slab: SlabSpec, rows: int) -> SlabSpec:
        """Change the number of ``rows`` of ``slab``. Raises: ValueError if a row in use would be
        removed."""
        if rows < max(1, self.rows_to_keep(slab)):
            raise ValueError(f"slab {slab.slab_id} has rows in use from {rows} on")
        resized = SlabSpec(slab.slab_id, rows, slab.capacity)
        free = [row for row in self._slabs[slab.slab_id].free if row < rows]
        self._slabs[slab.slab_id] = _SlabRows(resized, sorted([*free, *range(slab.rows, rows)]))
        if slab.slab_id in self._empty:
            self._empty[slab.slab_id] = resized
        return resized

    def take(self, capacity: int) -> Slot | None:
        """Take a free row of exactly ``capacity`` tokens, None if there is none. It is the lowest
        one of the oldest slab, so that rows in use stay together. O(slabs)."""
        for rows in self._slabs.values():
            if rows.slab.capacity == capacity and rows.free:
                self._empty.pop(rows.slab.slab_id, None)
                self.used_rows += 1
                return Slot(rows.slab.slab_id, heapq.heappop(rows.free))
        return None

    def release(self, slot: Slot) -> None:
        """Free ``slot``. Raises: ValueError if it is free."""
        rows = self._slabs[slot.slab_id]
        if slot.row in rows.free:
            raise ValueError(f"{slot} is already free")
        heapq.heappush(rows.free, slot.row)
        self.used_rows -= 1
        if len(rows.free) == rows.slab.rows:
            self._empty[slot.slab_id] = rows.slab

    def clear(self) -> None:
        """Remove all slabs, in use or not."""
        self._slabs.clear()
        self._empty.clear()
        self.used_rows = 0

    def pop_empty_slab(self) -> SlabSpec:
        """Remove the slab that has been empty the longest. Raises: StopIteration if none is."""
        slab = self._empty.pop(next(iter(self._empty)))
        del self._slabs[slab.slab_id]
        return slab

    def used_slots(self) -> set[Slot]:
        return {
            Slot(number, row)
            for number, rows in self._slabs.items()
            for row in range(rows.slab.rows)
            if row not in rows.free
        }
