"""Values outside of pages, in the form in which attention on a CPU reads them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import lcm, prod
from typing import NamedTuple

import numpy as np

from engine.cache.layout import Layout
from engine.cpu.pages.host_memory import HostMemory
from engine.cpu.pages.rounding import Array
from engine.plan import Slot

FEWEST_SLOTS, FEWEST_TOKENS = 16, 1_024
"""The first arrays have room for so many. Memory that is never written is not taken."""
IDLE_BYTES = 512 << 20
"""Max memory of slots that were freed, for the next sequences in them: it takes the system several
times as long to provide memory as to write values."""
NEW_AT_ONCE = 512
"""Max positions of prefixes that a pass copies to memory that nothing was written to before, so
that other rows hardly wait."""
FIRST_PASSES = 4
"""A row with more of these is copied in parts, from its next pass on. Until then that takes as long
as several passes that read the pages, and the first token has priority."""


class UnpackedRows:
    """Keys and values of some running sequences in each layer: (slots, kv_heads, capacity, dim).

    Addresses stay the same until a slot or a length is beyond the arrays. Where a row in use has no
    values yet, there are zeros or values that the same sequence had there."""

    def __init__(self, layout: Layout, page_tokens: int) -> None:
        self._layout = layout
        self._unit = lcm(FEWEST_TOKENS, page_tokens)
        self._rows: dict[Slot, _Row] = {}
        self._idle: dict[Slot, int] = {}
        """Freed slots, the first one first, and how many leading positions were written."""
        self._reserve(FEWEST_SLOTS, self._unit)

    def _reserve(self, slots: int, capacity: int) -> None:
        self.slots, self.capacity = slots, capacity
        self._made: dict[int, tuple[HostMemory, list[Array]]] = {}
        self.ends: list[dict[Slot, int]] = [{} for _ in self._layout.layers]
        """For each layer the number of leading positions that have values."""
        self.stale: list[dict[Slot, int]] = [{} for _ in self._layout.layers]
        """For each layer the number of leading positions that an earlier sequence may have
        written."""
        self._idle.clear()
        for slot, row in self._rows.items():
            self._rows[slot] = _Row(row.passes)

    def __contains__(self, slot: Slot) -> bool:
        return slot in self._rows

    def both(self, layer: int) -> Sequence[Array]:
        """Return the keys and the values of a layer."""
        if layer not in self._made:
            its = self._layout.layers[layer]
            shape = self.slots, its.kv_heads, self.capacity
            dims = its.key_dim, its.value_dim
            memory = HostMemory(4 * prod(shape) * sum(dims))
            values = memory.array((*shape, dims[1]), np.float32, 4 * prod(shape) * dims[0])
            self._made[layer] = memory, [memory.array((*shape, dims[0]), np.float32), values]
        return self._made[layer][1]

    def unpack(self, slot: Slot, tokens: int) -> None:
        """Keep values of ``slot`` from now on, with room for so many positions."""
        if slot >= self.slots or tokens > self.capacity:
            units = -(-max(self.capacity, tokens) // self._unit)
            slots = max(self.slots, 1 << slot.bit_length())
            self._reserve(slots, self._unit << (units - 1).bit_length())
        if slot not in self._rows:
            end = self._idle.pop(slot, 0)
            self._rows[slot] = _Row(written=end)
            for layer in self._made if end else ():
                self.stale[layer][slot] = end

    def begin(self, rows: Iterable[Sequence[int]]) -> Began:
        """Decide which ``rows`` of a pass, (slot, first new position, end, ...), are unpacked in
        it."""
        members: list[int] = []
        copied: dict[int, int] = {}
        most_new = NEW_AT_ONCE
        for i, (slot, start, end, *_) in enumerate(rows):
            row = self._rows.get(slot)
            if row is None:
                continue
            if row.end >= start:
                members.append(i)
                row.end = end
            else:
                row.passes += 1
                known = max(row.end, min(end, row.written))
                new = end - known
                if new > most_new and (row.passes <= FIRST_PASSES or not most_new):
                    continue
                new = min(new, most_new)
                most_new -= new
                row.end = copied[i] = known + new
            row.written = max(row.written, row.end)
        return Began(members, copied)

    def going_on(self, began: Began, rows: Sequence[Sequence[int]]) -> Began:
        """Return how the ``rows`` of a pass that ``began`` earlier are unpacked from here on: as
        before, unless their values are gone."""
        members = [i for i in began.members if self._has_values(rows[i][0], rows[i][2])]
        copied = {i: end for i, end in began.copied.items() if self._has_values(rows[i][0], end)}
        return Began(members, copied)

    def _has_values(self, slot: Slot, end: int) -> bool:
        return slot in self._rows and self._rows[slot].end == end

    def copy(
        self, layer: int, slot: Slot, heads: slice, both: Iterable[Array], low: int, end: int
    ) -> None:
        """Copy positions up to ``end`` that are missing in some ``heads`` of a layer from keys and
        values (heads, positions, dim), which have those from ``low`` on: nobody will attend to
        others. `filled` follows. May be called on any thread after `both`."""
        start = max(low, self.ends[layer].get(slot, 0))
        for array, values in zip(self.both(layer), both, strict=True):
            array[slot, heads, start:end] = values[:, start:end]

    def filled(self, layer: int, slot: Slot, end: int) -> None:
        """Record that a layer has the values of ``slot`` up to ``end``, and remove what an earlier
        sequence has left behind them."""
        self.ends[layer][slot] = end
        if (last := self.stale[layer].pop(slot, 0)) > end:
            for array in self.both(layer):
                array[slot, :, end:last] = 0

    def free(self, slot: Slot) -> None:
        """Keep no values of ``slot`` any more. Its memory may stay for the next sequence in it."""
        row = self._rows.pop(slot, None)
        if row is None:
            return
        for of_slots in (*self.ends, *self.stale):
            of_slots.pop(slot, None)
        self._idle[slot] = row.written
        while self.idle_bytes > IDLE_BYTES:
            self.give_back(next(iter(self._idle)))

    def give_back(self, slot: Slot) -> None:
        """Give the memory of ``slot`` back. It reads as zeros."""
        self.free(slot)
        end = self._idle.pop(slot, 0)
        for memory, arrays in self._made.values() if end else ():
            for array in arrays:
                start = array[slot].ctypes.data - arrays[0].ctypes.data
                if not memory.give_back(start, array[slot].nbytes):
                    array[slot, :, : -(-end // self._unit) * self._unit] = 0

    @property
    def idle_bytes(self) -> int:
        """Bytes of slots that were freed."""
        return sum(self._idle.values()) * self._layout.value_bytes

    @property
    def nbytes(self) -> int:
        """Bytes of values of running sequences."""
        layers = zip(self._layout.layers, self.ends, strict=True)
        return sum(
            4 * its.kv_heads * (its.key_dim + its.value_dim) * sum(ends.values())
            for its, ends in layers
        )


@dataclass
class _Row:
    passes: int = 0  # in which values were missing
    end: int = 0  # of the leading positions that have values
    written: int = 0  # of the leading positions that have memory


class Began(NamedTuple):
    """How the rows of a pass, by their indices in the batch, are unpacked."""

    members: list[int]
    """Those whose new values are unpacked, and which attend to unpacked values."""
    copied: dict[int, int]
    """Others, which are read from pages: positions up to these are then copied to their place."""
