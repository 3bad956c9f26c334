"""Recurrent state of the rows of a batch, as a model's layers see it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import mlx.core as mx
from mlx_lm.models.cache import ArraysCache

if TYPE_CHECKING:
    from engine.batch.ragged import RaggedBatch


class ArraysCacheView(ArraysCache):  # type: ignore[misc]  # some models ask whether it is one
    """Stands in the place of mlx-lm's cache: arrays of (batch, ...) by their number.

    A row that begins at position 0 finds nothing, as in a new cache, whatever its slot held
    before; it has to be alone. Padding would change the state: all rows are of one width.
    """

    lengths = None
    left_padding = None

    def __init__(self, batch: RaggedBatch, numbers: tuple[int | None, ...]) -> None:
        self._batch = batch
        self._numbers = numbers

    def __getitem__(self, index: int) -> mx.array | None:
        number = self._numbers[index]
        return None if number is None else self._batch.state(number)

    def __setitem__(self, index: int, state: mx.array) -> None:
        number = self._numbers[index]
        if number is None:
            raise TypeError(f"this model keeps array {index} only now")
        layout = self._batch.layout.states[number]
        if (state.shape[1:], state.dtype) != (layout.shape, layout.dtype):
            raise TypeError(f"this model keeps {state.shape[1:]} {state.dtype} only now")
        self._batch.new_states[number] = state

    def make_mask(self, N: int) -> None:
        """No token is padding."""

    def advance(self, N: int) -> None:
        """Nothing: rows count their positions themselves."""
