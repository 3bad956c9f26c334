"""A batch of rows of uneven length, and the caches that a model's layers see.

mlx-lm's models call ``cache.update_and_fetch(keys, values)`` and pass the result to
`mlx_lm.models.base.scaled_dot_product_attention`. Here the result is a handle, not an
array: our attention recognises it and attends directly to the pages. Subclasses implement
it for a device (`engine.batch.graph`, `engine.cpu.attention.host_batch`). Rows in a batch are
ordered by slot.
"""

from __future__ import annotations

import sys
from abc import ABC, abstractmethod
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import mlx.core as mx
import numpy as np
from mlx_lm.models import base as mlx_lm_base
from mlx_lm.models.cache import ArraysCache

from engine.adapters.layers import applied
from engine.adapters.places import AdapterStore
from engine.backend.patching import patch
from engine.batch.axes import Axes
from engine.batch.given import Given, GivenEmbedding
from engine.batch.layered import LayeredPass
from engine.cache.layout import AttentionLayout, KVNode, Layout, Node, StateNode
from engine.cache.pages import Pages
from engine.cache.slots import Slots
from engine.plan import Slot

_stock_attention = mlx_lm_base.scaled_dot_product_attention


class Row(NamedTuple):
    """New tokens of the sequence in ``slot``: positions ``start`` to ``end``, exclusive."""

    slot: Slot
    start: int
    end: int
    shift: int = 0  # added to positions where a model rotates by them
    adapter: int = 0  # place of its adapter; 0: none

    @property
    def width(self) -> int:
        """Number of new tokens."""
        return self.end - self.start


class RaggedBatch(ABC):
    """The rows of one forward pass.

    In a decode every row has one token. In a prefill a row has any number of tokens up to the
    width of the input; padding on the right is neither stored nor attended to.
    """

    batching = "ragged"
    """The name of this kind of batch for logs and tables: one word."""

    pads_rows = True
    """Whether rows of uneven width may share a pass."""

    packs_rows = False
    """Whether the tokens of all rows are computed one behind the other, without padding."""

    one_row_per_pass = False
    """Whether every row needs a pass of its own."""

    runs_model = True
    """Whether a pass calls the model's own code, which needs its weights."""

    attends = True
    """Whether attention is computed here, not by the model's own code."""

    attends_by = ""
    """How attention reads pages on a GPU, for logs and reports."""

    pages_class: type[Pages]
    """The storage that rows are in."""

    gathered_layers = 3
    """Layers whose values are gathered at once: MLX dispatches operations ahead, and frees a
    layer's when its command buffer is done."""

    deterministic = False
    """Whether a row's logits have the same bits whatever rows and chunks are computed with it."""

    division: LayeredPass | None = None
    """Controls this pass while it is computed in several parts."""

    def __init__(self, layout: Layout, slots: Slots, rows: Sequence[Row]) -> None:
        self.slots = slots
        self.rows = rows
        self.tables = [slots.tables.get(row.slot, ()) for row in rows]
        """The pages of each row, as they are now: later plans may change the slots' tables. Empty
        for models without KV."""
        self.width = max([row.end - row.start for row in rows])
        """The largest number of new tokens of any row."""
        self.decoding = self.width == 1
        starts = [row.start for row in rows]
        self.offset: int | mx.array = starts[0] if len(rows) == 1 else mx.array(starts)
        self.turned_by: int | mx.array | Axes = self.offset
        """The offset by which a model rotates the first of each row's new tokens."""
        self.given: Given | None = None
        self.sampled: list[int] | None = None
        """Which of the packed tokens `packed_logits` returns the logits of; None: all."""
        if any(row.shift for row in rows):
            shifted = [row.start + row.shift for row in rows]
            self.turned_by = shifted[0] if len(rows) == 1 else mx.array(shifted)
        self.layout = layout
        self.new_states: dict[int, mx.array] = {}
        self.also_written: list[mx.array] = []
        """Further results of the pass, to be evaluated with pages and states."""

    @property
    def views(self) -> list[Any]:
        """The cache list to call the model with.

        The views refer to the batch, and the batch does not refer to them: a reference cycle
        would keep its arrays alive until the garbage collector runs."""
        return [self._view(node) for node in self.layout.tree]

    def _view(self, node: Node) -> Any:
        if isinstance(node, KVNode):
            return self.kv_view(node.layer, self.layout.layers[node.layer])
        if isinstance(node, StateNode):
            return ArraysCacheView(self, node.numbers)
        return tuple(self._view(part) for part in node)

    def kv_view(self, number: int, layer: AttentionLayout) -> Any:
        """Return the replacement of mlx-lm's cache for layer ``number``."""
        return KVCacheView(self, number, layer)

    @classmethod
    def gathered_rows(cls) -> int:
        """Return of how many rows values exist at once. Attention gathers a row, or a few short
        ones, for each call. A model's own gets all of them."""
        return 1 if cls.attends or cls.one_row_per_pass else sys.maxsize

    @classmethod
    def attends_both_ways(cls) -> bool:
        """Return whether tokens of a picture can attend to later ones: attention must be computed
        here."""
        return cls.attends

    @classmethod
    def make_deterministic(cls) -> bool:
        """From now on, give a row's logits the same bits whatever rows and chunks are computed
        with it. Return whether that is possible."""
        return False

    @classmethod
    def adapter_store(cls, store: AdapterStore) -> AdapterStore:
        """Return the storage of adapters' factors. ``store`` belongs to the model's own layers,
        and is used if its own code runs."""
        return store

    @classmethod
    def release_weights(cls, files: Sequence[Path] = ()) -> None:
        """Drop weights that passes do not use, or that can be looked up in the checkpoint's
        ``files``. Called after the proof."""
        return

    def logits(
        self, model: Any, inputs: mx.array, *, kv_only: bool = False, given: Given | None = None
    ) -> mx.array:
        """Run ``model`` on ``inputs`` (batch, width) and return logits (batch, width, vocab).

        With ``kv_only`` the logits are not read, and only the stored KV and state count."""
        with applied([row.adapter for row in self.rows]):
            return self._computed(model, inputs, given)

    def _computed(self, model: Any, inputs: mx.array, given: Given | None) -> mx.array:
        found: mx.array
        if given is None:
            found = model(inputs, cache=self.views)
        else:
            self.turned_by, self.given = given.axes or self.turned_by, given
            places, embedding = mx.array(given.places), embedding_of(model)
            # Models may look up more by token than the embedding: for pictures, that is the padding
            # token's.
            inputs[0, places] = 0
            if isinstance(embedding, GivenEmbedding):
                embedding.give(places, given.embeddings)
                found = model(inputs, cache=self.views)
                return found
            embedded = embedding(inputs)
            embedded[0, places] = given.embeddings.astype(embedded.dtype)
            found = model(inputs, cache=self.views, input_embeddings=embedded)
        return found

    def pause(self) -> None:
        """Drop references that would prevent writing pages in place. Called when a pass is
        suspended."""
        return

    def resume(self) -> None:
        """Prepare to resume a suspended pass. The number of pages may have changed."""
        return

    def packed_logits(self, model: Any, inputs: mx.array) -> mx.array:
        """Run ``model`` like `logits`, and return (tokens, vocab) of the ``sampled`` tokens: all
        rows one after the other, without padding."""
        found = self.logits(model, inputs)
        if self.decoding:
            return found[:, -1]
        found = found.reshape(-1, found.shape[-1])
        if len(found) > sum(row.width for row in self.rows):
            firsts = range(0, len(found), self.width)
            rows = zip(firsts, self.rows, strict=True)
            found = found[mx.array([first + i for first, row in rows for i in range(row.width)])]
        return found if self.sampled is None else found[mx.array(self.sampled)]

    def state(self, number: int) -> mx.array | None:
        """Return recurrent state ``number`` of all rows, (batch, ...).

        None for a row at position 0. Raises ValueError if such a row is not alone."""
        if number in self.new_states:
            return self.new_states[number]
        if self.rows[0].start > 0:
            return self.slots.states.get(number, [row.slot for row in self.rows])
        if len(self.rows) > 1:
            raise ValueError("a row at position 0 shares its pass with other rows")
        return None

    def commit_states(self) -> list[mx.array]:
        """Store the state that this pass computed in its slots. Return the arrays to evaluate.

        Not called if the pass raised: the previous state stays. Raises TypeError if the model
        left a state unset."""
        if not self.layout.states:
            return self.also_written
        states = [self.state(number) for number in range(len(self.layout.states))]
        kept = [state for state in states if state is not None]
        if len(kept) < len(states):
            raise TypeError("this model leaves recurrent state unset")
        return self.also_written + self.slots.states.put([row.slot for row in self.rows], kept)

    @abstractmethod
    def write(self, layer: int, keys: mx.array, values: mx.array) -> None:
        """Store (batch, kv_heads, width, dim) at each row's position."""

    @abstractmethod
    def attend(
        self, layer: int, query: mx.array, scale: float, window: int | None, sinks: mx.array | None
    ) -> mx.array:
        """Return the attention of ``query`` (batch, heads, width, dim) over each row's KV.

        A token attends to itself and the positions before it, within the last ``window``."""


def embedding_of(model: Any) -> Any:
    """Return the layer of ``model`` that embeds tokens."""
    inner = getattr(model, "language_model", model)
    return inner.model.embed_tokens


def embedding_scale(model: Any) -> np.float32:
    """Return the factor that embeddings are multiplied by."""
    size = model.args.hidden_size**0.5
    match type(model).__module__.rpartition(".")[2]:
        case "gemma2":
            return np.float32(size)
        case "gemma3_text":
            return np.float32(mx.array(size, mx.bfloat16).item())
    return np.float32(getattr(model.model, "embedding_multiplier", 1))


def effective_window(asked: int | None, kept: int | None) -> int | None:
    """Return the window of a mask, given the requested window ``asked`` and the positions
    ``kept``.

    ``kept`` is the length of mlx-lm's own cache. Raises TypeError if the model requests more:
    the result would depend on how its prompt was cut into chunks."""
    if asked and kept and asked > kept:
        raise TypeError(f"this model masks {asked} positions and keeps {kept}")
    return asked or kept


class WindowMask(NamedTuple):
    """Represents an attention mask: causal in each row, within a window."""

    size: int | None  # positions of the window, None for all


class KVCacheView:
    """One layer's cache, as mlx-lm's models use it, and the handle for its keys and values."""

    def __init__(self, batch: RaggedBatch, number: int, layer: AttentionLayout) -> None:
        # Created for each layer in each step, and its offset is read twice, so little is computed.
        self.batch = batch
        self.layer = number
        self.window = layer.window
        self.layout = layer
        self.offset = batch.turned_by
        """Position of each row's first new token. An array (batch,) for several rows."""

    def make_mask(
        self, N: int, window_size: int | None = None, return_array: bool = False
    ) -> WindowMask:
        return WindowMask(effective_window(window_size, self.window))

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[KVCacheView, KVCacheView]:
        if self.batch.division is not None:
            self.batch.division.enter_layer(self.layer, keys, values)
        self.batch.write(self.layer, keys, values)
        return self, self

    def keys_and_values(self) -> tuple[KVCacheView, KVCacheView]:
        """Return the handles, for layers that attend to another layer's keys and values."""
        return self, self

    @property
    def shape(self) -> tuple[int, int, int | mx.array, int]:
        """Shape of the keys, but with a length for each row, padding included."""
        heads, dim = self.layout.kv_heads, self.layout.key_dim
        return len(self.batch.rows), heads, self.batch.offset + self.batch.width, dim

    @property
    def dtype(self) -> mx.Dtype:
        return self.layout.dtype

    def astype(self, dtype: mx.Dtype) -> KVCacheView:
        if dtype != self.dtype:
            raise TypeError(f"this model attends in {dtype} to what is stored as {self.dtype}")
        return self


class ArraysCacheView(ArraysCache):  # type: ignore[misc]  # some models ask whether it is one
    """One layer's recurrent state in place of mlx-lm's cache: arrays of (batch, ...) by number.

    A row that starts at position 0 finds nothing, as in a new cache, whatever its slot held
    before. It has to be alone. All rows have one width, because padding would change the state."""

    lengths = None
    left_padding = None

    def __init__(self, batch: RaggedBatch, numbers: tuple[int | None, ...]) -> None:
        self._batch = batch
        self._numbers = numbers

    def __getitem__(self, index: int) -> mx.array | None:
        number = self._numbers[index]
        if number is None:
            return None
        if self._batch.division is not None:
            self._batch.division.enter_state(number)
        return self._batch.state(number)

    def __setitem__(self, index: int, state: mx.array) -> None:
        number = self._numbers[index]
        if number is None:
            raise TypeError(f"this model first sets state array {index} after a few tokens")
        layout = self._batch.layout.states[number]
        if (state.shape[1:], state.dtype) != (layout.shape, layout.dtype):
            raise TypeError(f"this model changes its state to {state.shape[1:]} {state.dtype}")
        self._batch.new_states[number] = state

    def make_mask(self, N: int) -> None:
        """Return None: no token is padding."""

    def advance(self, N: int) -> None:
        """Do nothing: rows count their positions themselves."""


def attention(
    queries: mx.array,
    keys: Any,
    values: Any,
    cache: Any,
    scale: float,
    mask: Any,
    sinks: mx.array | None = None,
) -> mx.array:
    """Replace mlx-lm's function: attend to the pages for our handles, and to arrays as before.

    Raises TypeError if the model changed a handle or the mask."""
    if not isinstance(keys, KVCacheView):
        return _stock_attention(queries, keys, values, cache, scale, mask, sinks)
    if mask is None:
        mask = WindowMask(keys.window)
    if keys is not values or not isinstance(mask, WindowMask):
        raise TypeError("this model changes keys, values or masks between cache and attention")
    found = keys.batch.attend(keys.layer, queries, scale, mask.size, sinks)
    if keys.batch.division is not None:
        keys.batch.division.attended = found
    return found


def install() -> None:
    """Replace mlx-lm's attention by `attention`."""
    patch(mlx_lm_base, "scaled_dot_product_attention", attention)
