"""A batch of rows of uneven length, as a model's layers see it.

mlx-lm's models call ``cache.update_and_fetch(keys, values)`` and hand what comes back
to `mlx_lm.models.base.scaled_dot_product_attention`. Here that is a handle, not an
array: our attention recognises it and attends straight in the slabs. How is the
backend's business (`engine.batch.graph`, `engine.batch.cpu.host`). Rows in a batch are
ordered by slab and row.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import Any, NamedTuple

import mlx.core as mx
from mlx_lm.models import base as mlx_lm_base

from engine.backend.patching import patch
from engine.batch.states import ArraysCacheView
from engine.cache.layout import AttentionLayout, KVNode, Layout, Node, StateNode
from engine.cache.slabs import Slab, Slabs
from engine.plan import Slot

_stock_attention = mlx_lm_base.scaled_dot_product_attention


class Row(NamedTuple):
    """New tokens of the sequence in ``slot``: positions ``start`` to ``end``, exclusive."""

    slot: Slot
    start: int
    end: int

    @property
    def width(self) -> int:
        return self.end - self.start


class RaggedBatch(ABC):
    """The rows of one forward pass; `views` is the cache list to call the model with.

    All rows have one token (decode), or any numbers up to the width of the input
    (prefill), whose padding on the right is neither stored nor attended to.
    """

    batching = "ragged"
    """What models get of this kind of batch, in a word."""

    pads_rows = True
    """Whether rows of uneven width may share a pass."""

    one_row_per_pass = False
    """Whether every row has to have a pass of its own."""

    writes_in_place = False
    """Whether slabs are written where they lie in the host's memory, past MLX's graph."""

    def __init__(self, layout: Layout, slabs: Slabs, rows: Sequence[Row]) -> None:
        self.slabs = slabs
        self.rows = rows
        self.decoding = all(row.width == 1 for row in rows)
        starts = [row.start for row in rows]
        self.offset: int | mx.array = starts[0] if len(rows) == 1 else mx.array(starts)
        self.layout = layout
        self.new_states: dict[int, mx.array] = {}

    @property
    def views(self) -> list[Any]:
        """The cache list to call the model with. It holds the batch and not the other way
        round: in a cycle freed slabs would live on until the garbage collector runs."""
        return [self._view(node) for node in self.layout.tree]

    def _view(self, node: Node) -> Any:
        if isinstance(node, KVNode):
            return self.kv_view(node.layer, self.layout.layers[node.layer])
        if isinstance(node, StateNode):
            return ArraysCacheView(self, node.numbers)
        return tuple(self._view(part) for part in node)

    def kv_view(self, number: int, layer: AttentionLayout) -> Any:
        """What stands in the place of mlx-lm's cache for layer ``number``."""
        return KVCacheView(self, number, layer)

    def by_slab(self) -> Iterator[tuple[Slab, int, Sequence[Row]]]:
        """The rows of each slab, and the number in the batch of the first of them."""
        first = 0
        for number, members in groupby(self.rows, key=lambda row: row.slot.slab_id):
            stretch = list(members)
            yield self.slabs[number], first, stretch
            first += len(stretch)

    def logits(self, model: Any, inputs: mx.array, *, kv_only: bool = False) -> mx.array:
        """Runs ``model`` on ``inputs`` (batch, width): (batch, width, vocab). With ``kv_only``
        nobody reads them, and all that counts is what is stored."""
        found: mx.array = model(inputs, cache=self.views)
        return found

    def state(self, number: int) -> mx.array | None:
        """Recurrent state ``number`` of all rows, (batch, ...); None in a row that begins."""
        if number in self.new_states:
            return self.new_states[number]
        if self.rows[0].start > 0:
            return self.slabs.states.get(number, [row.slot for row in self.rows])
        if len(self.rows) > 1:
            raise ValueError("a row that begins is not alone")
        return None

    def commit_states(self) -> list[mx.array]:
        """Makes the state that this pass has computed that of its slots; returns what to
        evaluate. Where the pass raised, what was there before stays."""
        if not self.layout.states:
            return []
        states = [self.state(number) for number in range(len(self.layout.states))]
        kept = [state for state in states if state is not None]
        if len(kept) < len(states):
            raise TypeError("this model leaves recurrent state unset")
        return self.slabs.states.put([row.slot for row in self.rows], kept)

    @abstractmethod
    def write(self, layer: int, keys: mx.array, values: mx.array) -> None:
        """Stores (batch, kv_heads, width, dim) at each row's position."""

    @abstractmethod
    def attend(
        self,
        layer: int,
        queries: mx.array,
        scale: float,
        window: int | None,
        sinks: mx.array | None,
    ) -> mx.array:
        """Attention of (batch, heads, width, dim) over what each row has stored, up to and
        with each token itself, and within the last ``window`` positions."""


def effective_window(asked: int | None, kept: int | None) -> int | None:
    """The window of a mask that a model asks for, from a cache that would have ``kept`` so
    many positions. Raises TypeError where it asks for more: what it sees then depends on
    where its prompt was cut into pieces."""
    if asked and kept and asked > kept:
        raise TypeError(f"this model masks {asked} positions and keeps {kept}")
    return asked or kept


class WindowMask(NamedTuple):
    """Stands for an attention mask: each row's own causal one, within ``size``."""

    size: int | None


class KVCacheView:
    """One layer's cache, as mlx-lm's models use it; and the handle for its keys and values."""

    def __init__(self, batch: RaggedBatch, number: int, layer: AttentionLayout) -> None:
        self.batch = batch
        self.layer = number
        self.window = layer.window
        self.dtype = layer.dtype
        self.heads_and_dim = (layer.kv_heads, layer.key_dim)

    @property
    def offset(self) -> int | mx.array:
        """Position of each row's first new token; an array (batch,) for more than one."""
        return self.batch.offset

    def make_mask(
        self, N: int, window_size: int | None = None, return_array: bool = False
    ) -> WindowMask:
        return WindowMask(effective_window(window_size, self.window))

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[KVCacheView, KVCacheView]:
        self.batch.write(self.layer, keys, values)
        return self, self

    def keys_and_values(self) -> tuple[KVCacheView, KVCacheView]:
        """For layers that attend to what another one has stored."""
        return self, self

    @property
    def shape(self) -> tuple[int, int, int | mx.array, int]:
        """As that of the keys, but that each row has its own length, counted with padding."""
        heads, dim = self.heads_and_dim
        width = max(row.width for row in self.batch.rows)
        return len(self.batch.rows), heads, self.batch.offset + width, dim

    def astype(self, dtype: mx.Dtype) -> KVCacheView:
        if dtype != self.dtype:
            raise TypeError(f"this model attends in {dtype} to what is stored as {self.dtype}")
        return self


def attention(
    queries: mx.array,
    keys: Any,
    values: Any,
    cache: Any,
    scale: float,
    mask: Any,
    sinks: mx.array | None = None,
) -> mx.array:
    """In the place of mlx-lm's function: the same for arrays, ragged for our handles."""
    if not isinstance(keys, KVCacheView):
        return _stock_attention(queries, keys, values, cache, scale, mask, sinks)
    if mask is None:
        mask = WindowMask(keys.window)
    if keys is not values or not isinstance(mask, WindowMask):
        raise TypeError("this model changes keys, values or masks between cache and attention")
    return keys.batch.attend(keys.layer, queries, scale, mask.size, sinks)


def install() -> None:
    """Puts `attention` in place."""
    patch(mlx_lm_base, "scaled_dot_product_attention", attention)
