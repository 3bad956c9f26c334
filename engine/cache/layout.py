"""The layout of a model's cached data per sequence: KV of each token, and recurrent state."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from math import prod
from typing import Any, NamedTuple

import mlx.core as mx
from mlx_lm.models import cache as stock

from engine.cache.quantization import UNQUANTIZED, Precision, Quantization
from engine.scheduler.config import Ring

PROBE_TOKENS = (1, 6)
"""Lengths of the chunks that are run in order to find a model's layout."""


class UnsupportedLayout(Exception):
    """Slots cannot hold this model's state. The message names the layer and the reason."""


@dataclass(frozen=True)
class AttentionLayout:
    """One attention layer: keys are (kv_heads, length, key_dim), values likewise."""

    kv_heads: int
    key_dim: int
    value_dim: int
    dtype: mx.Dtype
    window: int | None  # the number of most recent positions that a token sees, None for all
    ring_tokens: int | None = None
    """Number of positions that a slot keeps; position p has index ``p % ring_tokens``. None for
    all."""


@dataclass(frozen=True)
class ArrayLayout:
    """The keys or the values of a layer: (kv_heads, length, dim)."""

    kv_heads: int
    dim: int
    dtype: mx.Dtype  # the type that they are computed in
    quantization: Quantization | None = None  # if set, blocks hold codes and scales
    dequantized: bool = False
    """Whether slots hold dequantized values and scales, from which the codes can be recovered
    (`engine.cache.quantization`). Otherwise slots hold the same as blocks."""

    @property
    def block_token_bytes(self) -> int:
        scheme = self.quantization
        return self._plain_bytes if scheme is None else self.kv_heads * scheme.token_bytes(self.dim)

    @property
    def slot_token_bytes(self) -> int:
        scheme = self.quantization
        if scheme is None or not self.dequantized:
            return self.block_token_bytes
        return self._plain_bytes + self.kv_heads * scheme.scale_bytes(self.dim)

    @property
    def _plain_bytes(self) -> int:
        return self.kv_heads * self.dim * int(self.dtype.size)


@dataclass(frozen=True)
class StateLayout:
    """One array (rows, *shape) of recurrent state. Its size does not depend on the length."""

    shape: tuple[int, ...]
    dtype: mx.Dtype

    @property
    def state_bytes(self) -> int:
        return prod(self.shape) * int(self.dtype.size)


class KVNode(NamedTuple):
    """The position of a layer with keys and values."""

    layer: int  # index in ``Layout.layers``


class StateNode(NamedTuple):
    """The position of a layer with recurrent state."""

    numbers: tuple[int | None, ...]
    """Index in ``Layout.states`` of each of its arrays, None for one that is never set."""


Node = KVNode | StateNode | tuple["Node", ...]
"""One entry of the cache list that a model is called with. A tuple is mlx-lm's `CacheList`."""


@dataclass(frozen=True)
class StorageGroup:
    """All arrays of a slot with the same layout. Blocks store them together."""

    kind: ArrayLayout
    arrays: tuple[int, ...]  # indices into ``Slab.arrays``

    def parts(self, tokens: int) -> tuple[tuple[tuple[int, ...], mx.Dtype], ...]:
        """Return shapes and types of this group's arrays in a block of ``tokens`` tokens.

        They are one array, or codes (packed, in bytes) and scales."""
        kind, scheme = self.kind, self.kind.quantization
        rows = (len(self.arrays), kind.kv_heads, tokens)
        if scheme is None:
            return (((*rows, kind.dim), kind.dtype),)
        codes = (*rows, scheme.code_bytes(kind.dim)), mx.uint8
        return codes, ((2, *rows, kind.dim // scheme.group_size), mx.float16)


class ArrayPlace(NamedTuple):
    """Where a slab keeps the keys or the values of a layer.

    Slots with dequantized values keep both in one array, which is written by one operation. For
    other slots that would take more operations than two arrays."""

    array: int  # number in ``Slab.arrays``
    half: int | None  # 0 or 1: keys or values, which share the array. None if it is not shared


class ScalesPlace(NamedTuple):
    """A slab keeps the scales of all arrays of one layout and ring in one array."""

    array: int  # number in ``Slab.scales``
    at: int  # index along its first axis


@dataclass(frozen=True)
class Layout:
    """All layers of a model, and how slots and blocks store them."""

    layers: tuple[AttentionLayout, ...]
    states: tuple[StateLayout, ...]
    tree: tuple[Node, ...]  # has the shape of the cache list that mlx-lm makes for the model
    precision: Precision = UNQUANTIZED
    dequantized: bool = False  # whether slots hold dequantized values
    longest_pass: int | None = None  # max tokens of a row in a pass, None if there are no rings
    arrays: tuple[ArrayLayout, ...] = field(init=False)
    """Keys of layer 0, values of layer 0, keys of layer 1, and so on."""
    places: tuple[ArrayPlace, ...] = field(init=False)
    """Where a slab keeps each of them."""
    groups: tuple[StorageGroup, ...] = field(init=False)
    kinds: tuple[int, ...] = field(init=False)
    """For each array the index of the first one that is equal."""
    scales: tuple[ScalesPlace | None, ...] = field(init=False)
    """Where a slab keeps the scales of each array, None if it is not quantized."""

    def __post_init__(self) -> None:
        arrays = []
        for layer in self.layers:
            for dim in (layer.key_dim, layer.value_dim):
                scheme = self.precision.for_dim(dim)
                dequantized = self.dequantized and scheme is not None
                arrays.append(ArrayLayout(layer.kv_heads, dim, layer.dtype, scheme, dequantized))
        grouped: dict[ArrayLayout, list[int]] = {}
        for index, array in enumerate(arrays):
            if array.dim:  # some layers have keys only
                grouped.setdefault(array, []).append(index)
        groups = (StorageGroup(kind, tuple(members)) for kind, members in grouped.items())
        object.__setattr__(self, "arrays", tuple(arrays))
        object.__setattr__(self, "groups", tuple(groups))
        first: dict[ArrayLayout, int] = {}
        kinds = tuple(first.setdefault(array, index) for index, array in enumerate(arrays))
        object.__setattr__(self, "kinds", kinds)
        object.__setattr__(self, "places", tuple(self._placed()))
        counts: dict[tuple[int, int | None], int] = {}
        places: list[ScalesPlace | None] = []
        for number, array in enumerate(arrays):
            if array.quantization is None:
                places.append(None)
                continue
            key = kinds[number], self.ring_tokens(number)
            counts[key] = counts.get(key, 0) + 1
            places.append(ScalesPlace(list(counts).index(key), counts[key] - 1))
        object.__setattr__(self, "scales", tuple(places))

    def _placed(self) -> Iterator[ArrayPlace]:
        array = 0
        for keys, values in zip(self.arrays[::2], self.arrays[1::2], strict=True):
            if shared := keys == values and keys.dequantized:
                yield from (ArrayPlace(array, 0), ArrayPlace(array, 1))
            else:
                yield from (ArrayPlace(array, None), ArrayPlace(array + 1, None))
            array += 1 if shared else 2

    def with_precision(self, precision: Precision, *, dequantized: bool) -> Layout:
        """Return the layout of the same model with keys and values kept in ``precision``."""
        return replace(self, precision=precision, dequantized=dequantized)

    def with_rings(self, longest_pass: int, block_size: int) -> Layout:
        """Return the layout of the same model with rings: layers with a window keep only the
        window, plus room for a pass of up to ``longest_pass`` tokens, rounded up to a block.

        Without such layers nothing changes, and passes may be longer."""
        if not any(layer.window for layer in self.layers):
            return self
        layers = []
        for layer in self.layers:
            tokens = None
            if layer.window is not None:
                tokens = -(-(layer.window + longest_pass) // block_size) * block_size
            layers.append(replace(layer, ring_tokens=tokens))
        return replace(self, layers=tuple(layers), longest_pass=longest_pass)

    def with_layer(self, layer: AttentionLayout) -> Layout:
        """Return the layout of the same model with one more layer, the last in the cache list."""
        node = KVNode(len(self.layers))
        return replace(self, layers=(*self.layers, layer), tree=(*self.tree, node))

    def is_of(self, probed: Layout) -> bool:
        """Return whether this is ``probed``, except for precision and rings."""
        layers = tuple(replace(layer, ring_tokens=None) for layer in self.layers)
        return (layers, self.states, self.tree) == (probed.layers, probed.states, probed.tree)

    def ring_tokens(self, number: int) -> int | None:
        """Return `AttentionLayout.ring_tokens` of array ``number`` of a slot."""
        return self.layers[number // 2].ring_tokens

    @property
    def rings(self) -> tuple[Ring, ...]:
        """The windows of layers that slots keep as rings, shortest first."""
        found: dict[int, int] = {}
        for number, array in enumerate(self.arrays):
            tokens = self.ring_tokens(number)
            if tokens is not None:
                found[tokens] = found.get(tokens, 0) + array.slot_token_bytes
        return tuple(
            Ring(tokens, tokens - (self.longest_pass or 0), size_bytes)
            for tokens, size_bytes in sorted(found.items())
        )

    @property
    def unquantized_layers(self) -> tuple[int, ...]:
        """Indices of the layers whose keys or values are not quantized."""
        whole = {i // 2 for i, a in enumerate(self.arrays) if a.dim and a.quantization is None}
        return tuple(sorted(whole))

    @property
    def kv_bits(self) -> int:
        """Bits of quantized elements, 16 if nothing is quantized."""
        return min((a.quantization.bits for a in self.arrays if a.quantization), default=16)

    @property
    def block_token_bytes(self) -> int:
        """Bytes of one position of a block, in all layers."""
        return sum(array.block_token_bytes for array in self.arrays)

    @property
    def slot_token_bytes(self) -> int:
        """Bytes of one position of a slot, in all layers."""
        return sum(array.slot_token_bytes for array in self.arrays)

    @property
    def array_bytes(self) -> int:
        """Bytes of one position in the largest array of a slot, which may be an array of scales."""
        scales: dict[int, int] = {}
        values: dict[int, int] = {}
        for number, (array, place) in enumerate(zip(self.arrays, self.scales, strict=True)):
            at = self.places[number].array
            values[at] = values.get(at, 0) + array.slot_token_bytes
            if place is not None and array.quantization is not None:
                own = array.kv_heads * array.quantization.scale_bytes(array.dim)
                scales[place.array] = scales.get(place.array, 0) + own
        return max((*values.values(), *scales.values()), default=0)

    def block_buffers(self, tokens: int) -> tuple[int, ...]:
        """Return the bytes of each buffer of a stored block of ``tokens`` tokens."""
        parts = (part for group in self.groups for part in group.parts(tokens))
        return tuple(prod(shape) * int(dtype.size) for shape, dtype in parts)

    @property
    def state_bytes(self) -> int:
        """Bytes of a slot's recurrent state, whatever its capacity."""
        return sum(state.state_bytes for state in self.states)


def probe_layout(model: Any, *, compute: bool = True) -> Layout:
    """Return the layout of ``model``, found by running a few tokens through mlx-lm's own caches.

    Without ``compute``, nothing is evaluated, so the model's weights need not be loaded. Raises
    `UnsupportedLayout` if a layer keeps anything other than keys and values, or state of constant
    size.
    """
    caches = stock.make_prompt_cache(model)
    shapes = []
    for count in PROBE_TOKENS:
        logits = model(mx.array([[0] * count]), cache=caches)
        if compute:
            mx.eval(logits)
        shapes.append([_state_shapes(cache) for cache in caches])
    builder = _LayoutBuilder()
    tree = tuple(builder.node(cache, f"layer {i}") for i, cache in enumerate(caches))
    for index, (before, after) in enumerate(zip(*shapes, strict=True)):
        if before != after:
            raise UnsupportedLayout(f"layer {index} keeps growing state")
    return Layout(tuple(builder.layers), tuple(builder.states), tree)


class _LayoutBuilder:
    def __init__(self) -> None:
        self.layers: list[AttentionLayout] = []
        self.states: list[StateLayout] = []

    def node(self, cache: Any, where: str) -> Node:
        kind = type(cache)
        if kind is stock.CacheList:
            return tuple(self.node(part, where) for part in cache.caches)
        if kind is stock.ArraysCache:
            return StateNode(tuple(self._state(array, where) for array in cache.cache))
        is_plain = kind in (stock.KVCache, stock.ChunkedKVCache)
        if is_plain or (kind is stock.RotatingKVCache and cache.keep == 0):
            return self._kv(cache, where)
        raise UnsupportedLayout(f"{where} keeps a {kind.__name__}")

    def _state(self, array: mx.array | None, where: str) -> int | None:
        if array is None:
            return None
        if array.shape[0] != 1:
            raise UnsupportedLayout(f"{where} keeps state that is not a row of a batch")
        self.states.append(StateLayout(array.shape[1:], array.dtype))
        return len(self.states) - 1

    def _kv(self, cache: Any, where: str) -> KVNode:
        self.layers.append(layout_of(cache, where))
        return KVNode(len(self.layers) - 1)


def layout_of(cache: Any, where: str) -> AttentionLayout:
    """Return what one of mlx-lm's caches of keys and values, which is not empty, keeps in the layer
    ``where``. Raises `UnsupportedLayout`."""
    keys, values = cache.keys, cache.values
    if keys is None or values is None:
        raise UnsupportedLayout(f"{where} stores no keys")
    if keys.shape[1] != values.shape[1] or keys.dtype != values.dtype:
        raise UnsupportedLayout(f"{where} has keys and values of different kinds")
    return AttentionLayout(
        kv_heads=keys.shape[1],
        key_dim=keys.shape[3],
        value_dim=values.shape[3],
        dtype=keys.dtype,
        window=cache.max_size if type(cache) is stock.RotatingKVCache else None,
    )


def _state_shapes(cache: Any) -> list[Any]:
    """Return shapes and types of all recurrent state in ``cache``."""
    if isinstance(cache, stock.CacheList):
        return [_state_shapes(part) for part in cache.caches]
    if isinstance(cache, stock.ArraysCache):
        return [None if array is None else (array.shape, array.dtype) for array in cache.cache]
    return []
