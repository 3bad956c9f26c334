"""Embeddings of pictures for the tokens of a pass."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import NamedTuple

import mlx.core as mx
import numpy as np

from engine.batch.axes import Axes


class Given(NamedTuple):
    """Embeddings that replace those of tokens, for a pass with one row, or with several if its
    batch `packs_rows`."""

    places: list[int]  # indices of the tokens
    embeddings: mx.array  # (places, hidden), before any scaling by the model
    axes: Axes | None = None  # of all tokens, if positions have three axes
    deep: tuple[
        mx.array, ...
    ] = ()  # (places, hidden), to be added to the output of each of the first layers
    spans: tuple[tuple[int, int], ...] = ()
    """Positions (first, end) of tokens of the only row that attend to all others of their span."""

    @classmethod
    def joined(cls, parts: Sequence[Given], widths: Sequence[int]) -> Given:
        """Return the embeddings of rows with so many tokens, one behind the other. None of the rows
        has `spans`."""
        if len(parts) == 1:
            return parts[0]
        firsts = accumulate(widths[:-1], initial=0)
        places = [
            first + at for first, part in zip(firsts, parts, strict=True) for at in part.places
        ]
        axes = [part.axes for part in parts if part.axes is not None]
        assert len(axes) in (0, len(parts)), "positions of all pictures have the same axes"
        whole = None
        if axes:
            positions = np.concatenate([each.positions for each in axes], axis=-1)
            whole = Axes(positions, axes[0].of_pairs)
        deep = zip(*(part.deep for part in parts), strict=True)
        return cls(
            places,
            mx.concatenate([part.embeddings for part in parts]),
            whole,
            tuple(mx.concatenate(each) for each in deep),
        )
