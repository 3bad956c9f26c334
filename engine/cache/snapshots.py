"""Snapshots: immutable copies of recurrent state, from which other sequences start."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import mlx.core as mx

from engine.cache.layout import Layout
from engine.cache.packing import Packing
from engine.cache.states import StateStore
from engine.plan import Payload, Slot


class SnapshotStore:
    """The content of the snapshots by their ids: arrays of (1, ...) in the layout's order, in one
    buffer."""

    def __init__(self, layout: Layout, states: StateStore) -> None:
        self._layout = layout
        self._states = states
        self._packing = Packing([((1, *state.shape), state.dtype) for state in layout.states])
        self._snapshots: dict[int, mx.array] = {}

    def __contains__(self, snapshot: int) -> bool:
        return snapshot in self._snapshots

    def save(self, slot: Slot, snapshot: int) -> list[mx.array]:
        """Copy the state of ``slot``. Return the arrays to evaluate.

        The copy keeps no other array alive."""
        packed = self._packing.pack(self._states.copy_of(slot))
        self._snapshots[snapshot] = packed
        return [packed]

    def restore(self, slot: Slot, snapshot: int) -> list[mx.array]:
        """Set the state of ``slot`` to ``snapshot``. Return the arrays to evaluate."""
        return self._states.put([slot], self._packing.unpack(self._snapshots[snapshot]))

    def reset(self, slot: Slot) -> list[mx.array]:
        """Set ``slot`` to a meaningless state. Return the arrays to evaluate."""
        arrays = [mx.zeros((1, *state.shape), state.dtype) for state in self._layout.states]
        return self._states.put([slot], arrays)

    def insert(self, snapshot: int, payload: Payload) -> None:
        """Create ``snapshot`` from bytes, evaluated.

        Raises ValueError if the size of the bytes is wrong."""
        self._snapshots[snapshot] = self._packing.from_payload(payload)

    def exporter(self, snapshot: int) -> Callable[[], Payload]:
        """Return a function that returns the bytes of ``snapshot``, even after it is evicted.

        The bytes are not copied and keep its memory alive. The call waits for the snapshot."""
        return partial(self._packing.payload, self._snapshots[snapshot])

    def evict(self, snapshot: int) -> None:
        self._snapshots.pop(snapshot, None)
