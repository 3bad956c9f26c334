"""The recurrent state of the slots."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import mlx.core as mx

from engine.plan import Slot


@dataclass(frozen=True, eq=False)
class _StateBatch:
    """State that one pass computed."""

    slots: tuple[Slot, ...]
    arrays: tuple[mx.array, ...]  # each is (slots, ...)


KeptStates = dict[Slot, tuple[_StateBatch, int]]
"""The states of slots at a point in time, for `StateStore`."""


class StateStore:
    """The current state of each slot's sequence, as arrays in the layout's order.

    State is replaced as a whole with every token, so arrays are never written in place. The
    arrays of a batch stay together, and the next batch of the same slots uses them without a
    copy. If the next batch has other slots, each slot left behind gets a copy of its own row,
    so that it does not keep the whole array alive.
    """

    def __init__(self) -> None:
        self._by_slot: KeptStates = {}

    def get(self, number: int, slots: Sequence[Slot]) -> mx.array:
        """Return array ``number`` of ``slots``: (slots, ...)."""
        held = [self._by_slot[slot] for slot in slots]
        first = held[0][0]
        if first.slots == tuple(slots) and all(batch is first for batch, _ in held):
            return first.arrays[number]
        parts = [batch.arrays[number][mx.array([row])] for batch, row in held]
        return parts[0] if len(parts) == 1 else mx.concatenate(parts)

    def put(self, slots: Sequence[Slot], arrays: Sequence[mx.array]) -> list[mx.array]:
        """Replace the state of ``slots``. Return the arrays to evaluate."""
        # Many models return the end of a longer array, which would stay in memory.
        arrays = [mx.contiguous(array) for array in arrays]
        new = _StateBatch(tuple(slots), tuple(arrays))
        return arrays + self._replace({slot: (new, row) for row, slot in enumerate(slots)})

    def keep(self, slots: Iterable[Slot]) -> KeptStates:
        """Return what is needed to restore the present state of those ``slots`` that have one. It
        takes no memory until they are replaced."""
        return {slot: self._by_slot[slot] for slot in slots if slot in self._by_slot}

    def put_back(self, kept: KeptStates, slots: Iterable[Slot]) -> list[mx.array]:
        """Give ``slots`` the state that they have in ``kept``, if any. Return the arrays to
        evaluate."""
        return self._replace({slot: kept[slot] for slot in slots if slot in kept})

    def _replace(self, changed: KeptStates) -> list[mx.array]:
        """Replace states. Slots left alone in their batches get their own copies, which are
        returned."""
        left = {self._by_slot[slot][0] for slot in changed if slot in self._by_slot}
        self._by_slot.update(changed)
        touched: list[mx.array] = []
        for batch in left:
            for row, slot in enumerate(batch.slots):
                if self._by_slot.get(slot) == (batch, row):
                    own = self.copy_of(slot)
                    self._by_slot[slot] = (_StateBatch((slot,), tuple(own)), 0)
                    touched += own
        return touched

    def copy_of(self, slot: Slot) -> list[mx.array]:
        """Return a copy of the state of ``slot``, arrays of (1, ...) that refer to no other."""
        batch, row = self._by_slot[slot]
        return [array[mx.array([row])] for array in batch.arrays]

    def free(self, slot: Slot) -> None:
        """Drop the state of ``slot``. Its arrays go with the last slot of their batch."""
        self._by_slot.pop(slot, None)
