"""The hidden states from which a multi-token prediction head continues."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import groupby
from typing import NamedTuple

import mlx.core as mx

from engine.backend.device_errors import compute
from engine.batch.ragged import Row
from engine.plan import Slot

KEPT_TOKENS = 32
"""Longer passes are chunks, which are never rewound: only their last state is kept."""


class _Kept(NamedTuple):
    states: mx.array  # (batch, positions, dim)
    row: int  # of the batch
    first: int  # position of the first state
    end: int  # the positions of this row end before it


class _Place(NamedTuple):
    """The place of one state."""

    states: mx.array
    row: int
    column: int


class HiddenStates:
    """The model's hidden states of each slot's sequence in its last pass, and the state before
    them.

    A sequence with a restored prefix has none yet, because pages do not contain hidden states.
    Unknown states are zeros."""

    def __init__(self, dim: int, dtype: mx.Dtype) -> None:
        """``dim`` and ``dtype`` are those of a state."""
        self._unknown = mx.zeros((1, 1, dim), dtype)
        compute(self._unknown)  # it outlives steps that fail
        self._kept: dict[Slot, _Kept] = {}

    def clear(self) -> None:
        self._kept.clear()

    def free_slots(self, slots: Iterable[Slot]) -> None:
        """Drop the states of ``slots``."""
        for slot in slots:
            self._kept.pop(slot, None)

    def before(self, rows: Sequence[Row]) -> mx.array:
        """Return the state of the position before each of ``rows``: (batch, 1, dim)."""
        parts: list[mx.array] = []
        places = [self._place(row) for row in rows]
        for _, group in groupby(places, key=lambda place: id(place.states)):
            members = list(group)
            numbers = mx.array([place.row for place in members])
            parts.append(members[0].states[numbers, mx.array([place.column for place in members])])
        found = parts[0] if len(parts) == 1 else mx.concatenate(parts)
        return found[:, None]

    def put(self, rows: Sequence[Row], states: mx.array) -> list[mx.array]:
        """Keep ``states`` (batch, 1 + width, dim): of the position before each of ``rows``, and of
        its own. Return the arrays to evaluate."""
        firsts = [row.start - 1 for row in rows]
        if states.shape[1] > KEPT_TOKENS:
            last = mx.array([row.width for row in rows])
            states, firsts = states[mx.arange(len(rows)), last][:, None], [r.end - 1 for r in rows]
        for number, (row, first) in enumerate(zip(rows, firsts, strict=True)):
            self._kept[row.slot] = _Kept(states, number, first, row.end)
        return [states]

    def _place(self, row: Row) -> _Place:
        kept = self._kept.get(row.slot)
        if kept is None or row.start == 0 or not kept.first < row.start <= kept.end:
            return _Place(self._unknown, 0, 0)
        return _Place(kept.states, kept.row, row.start - 1 - kept.first)
