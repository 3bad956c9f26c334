"""Snapshots: immutable copies of recurrent state, which other sequences start from."""

from __future__ import annotations

from collections.abc import Sequence

import mlx.core as mx
import numpy as np

from engine.cache.blocks import array_from_bytes
from engine.cache.layout import Layout
from engine.cache.states import StateStore
from engine.plan import Payload, Slot


class SnapshotStore:
    """The content of the snapshots by their ids: arrays of (1, ...) in the layout's order."""

    def __init__(self, layout: Layout, states: StateStore) -> None:
        self._layout = layout
        self._states = states
        self._snapshots: dict[int, tuple[mx.array, ...]] = {}

    def __contains__(self, snapshot: int) -> bool:
        return snapshot in self._snapshots

    def save(self, slot: Slot, snapshot: int) -> list[mx.array]:
        """Copy the state of ``slot``. Return the arrays to evaluate.

        A copy keeps no other array alive."""
        arrays = self._states.copy_of(slot)
        self._snapshots[snapshot] = tuple(arrays)
        return arrays

    def restore(self, slot: Slot, snapshot: int) -> list[mx.array]:
        """Make ``snapshot`` the state of ``slot``. Return the arrays to evaluate.

        Nothing is copied, since state is replaced and never changed."""
        return self._states.put([slot], self._snapshots[snapshot])

    def reset(self, slot: Slot) -> list[mx.array]:
        """Give ``slot`` a meaningless state. Return the arrays to evaluate."""
        arrays = [mx.zeros((1, *state.shape), state.dtype) for state in self._layout.states]
        return self._states.put([slot], arrays)

    def insert(self, snapshot: int, payload: Payload) -> Sequence[mx.array]:
        """Make ``snapshot`` from bytes. Return the arrays to evaluate.

        Raises ValueError when the bytes are not of the snapshot's size."""
        parts = zip(self._layout.states, payload, strict=True)
        arrays = [array_from_bytes((1, *state.shape), state.dtype, data) for state, data in parts]
        self._snapshots[snapshot] = tuple(arrays)
        return arrays

    def export(self, snapshot: int) -> Payload:
        """Return the bytes of ``snapshot`` without a copy. They keep its memory alive."""
        arrays = self._snapshots[snapshot]
        mx.eval(arrays)
        return tuple(np.asarray(array.reshape(-1).view(mx.uint8)).data for array in arrays)

    def evict(self, snapshot: int) -> None:
        self._snapshots.pop(snapshot, None)
