"""Values outside of pages, in the form in which attention on a CPU reads them."""

from __future__ import annotations

from collections.abc import Sequence
from math import lcm, prod

import numpy as np

from engine.cache.host_memory import HostMemory
from engine.cache.layout import Layout
from engine.cache.rounding import Array
from engine.plan import Slot

FEWEST_SLOTS, FEWEST_TOKENS = 16, 1_024
"""The first arrays have room for so many. Memory that is never written is not taken."""


class UnpackedRows:
    """Keys and values of some running sequences in each layer: (slots, kv_heads, capacity, dim).

    Addresses stay the same until a slot or a length is beyond the arrays. Positions behind those
    written are zero, or values that the same sequence had there."""

    def __init__(self, layout: Layout, page_tokens: int) -> None:
        self._layout = layout
        self._page_tokens, self._unit = page_tokens, lcm(FEWEST_TOKENS, page_tokens)
        self._tokens: dict[Slot, int] = {}  # room asked for
        self._reserve(FEWEST_SLOTS, self._unit)

    def _reserve(self, slots: int, capacity: int) -> None:
        self.slots, self.capacity = slots, capacity
        self.ends: list[dict[Slot, int]] = [{} for _ in self._layout.layers]
        """For each layer the slots with values, and how many leading positions have them."""
        self._made: dict[int, tuple[HostMemory, list[Array]]] = {}

    def __contains__(self, slot: Slot) -> bool:
        return slot in self._tokens

    def __bool__(self) -> bool:
        return bool(self._tokens)

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

    def keep(self, slot: Slot, tokens: int) -> None:
        """Keep values of ``slot`` from now on, of so many positions. No values are there yet,
        except those that were."""
        if slot >= self.slots or tokens > self.capacity:
            slots = max(self.slots, 1 << slot.bit_length())
            units = -(-max(self.capacity, tokens) // self._unit)
            self._reserve(slots, self._unit << (units - 1).bit_length())
        self._tokens[slot] = tokens

    def drop(self, slot: Slot) -> None:
        """Give the memory of ``slot`` back. It reads as zeros."""
        tokens = self._tokens.pop(slot, 0)
        for layer, (memory, arrays) in self._made.items():
            end = self.ends[layer].pop(slot, 0)
            for array in arrays if end else ():
                start = array[slot].ctypes.data - arrays[0].ctypes.data
                if not memory.give_back(start, array[slot].nbytes):
                    array[slot, :, : tokens + self._page_tokens] = 0

    @property
    def nbytes(self) -> int:
        if not self._tokens:
            return 0
        layers = zip(self._layout.layers, self.ends, strict=True)
        return sum(
            4 * its.kv_heads * (its.key_dim + its.value_dim) * sum(ends.values())
            for its, ends in layers
        )
