"""The layout of a model's cached data per sequence: KV of each token, and recurrent state."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from math import prod
from typing import Any, NamedTuple

import mlx.core as mx
from mlx_lm.models import cache as stock

from engine.cache.quantization import UNQUANTIZED, Precision, Quantization

PROBE_TOKENS = (1, 6)
"""Lengths of the chunks that are run in order to find a model's layout."""


class UnsupportedLayout(Exception):
    """Pages cannot hold this model's state. The message names the layer and the reason."""


@dataclass(frozen=True)
class AttentionLayout:
    """One attention layer: keys are (kv_heads, length, key_dim), values likewise."""

    kv_heads: int
    key_dim: int
    value_dim: int
    dtype: mx.Dtype
    window: int | None  # the number of most recent positions that a token sees, None for all


@dataclass(frozen=True)
class ArrayLayout:
    """The keys or the values of a layer: (kv_heads, length, dim)."""

    kv_heads: int
    dim: int
    dtype: mx.Dtype  # the type that they are computed in
    quantization: Quantization | None = None  # if set, pages hold codes and scales

    @property
    def token_bytes(self) -> int:
        """Bytes of one position in a page."""
        scheme = self.quantization
        if scheme is None:
            return self.value_bytes
        return self.kv_heads * (scheme.code_bytes(self.dim) + scheme.scale_bytes(self.dim))

    @property
    def value_bytes(self) -> int:
        """Bytes of one position as attention reads it."""
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
    """All arrays with the same layout. The bytes of a page have them together."""

    kind: ArrayLayout
    arrays: tuple[int, ...]  # indices into ``Layout.arrays``

    def parts(self, tokens: int) -> tuple[tuple[tuple[int, ...], mx.Dtype], ...]:
        """Return shapes and types of this group's arrays in a page of ``tokens`` tokens.

        They are one array (arrays, kv_heads, tokens, dim), or codes (.., bytes) and scales
        (scales of a group, arrays, kv_heads, tokens, groups)."""
        kind, scheme = self.kind, self.kind.quantization
        rows = (len(self.arrays), kind.kv_heads, tokens)
        if scheme is None:
            return (((*rows, kind.dim), kind.dtype),)
        codes = (*rows, scheme.code_bytes(kind.dim)), mx.int8 if scheme.is_symmetric else mx.uint8
        return codes, ((scheme.scales, *rows, kind.dim // scheme.group_size), mx.float16)


@dataclass(frozen=True)
class Layout:
    """All layers of a model, and how pages store them."""

    layers: tuple[AttentionLayout, ...]
    states: tuple[StateLayout, ...]
    tree: tuple[Node, ...]  # has the shape of the cache list that mlx-lm makes for the model
    precision: Precision = UNQUANTIZED
    arrays: tuple[ArrayLayout, ...] = field(init=False)
    """Keys of layer 0, values of layer 0, keys of layer 1, and so on."""
    groups: tuple[StorageGroup, ...] = field(init=False)

    def __post_init__(self) -> None:
        arrays = []
        for layer in self.layers:
            for dim in (layer.key_dim, layer.value_dim):
                scheme = self.precision.for_dim(dim)
                arrays.append(ArrayLayout(layer.kv_heads, dim, layer.dtype, scheme))
        grouped: dict[ArrayLayout, list[int]] = {}
        for index, array in enumerate(arrays):
            if array.dim:  # some layers have keys only
                grouped.setdefault(array, []).append(index)
        groups = (StorageGroup(kind, tuple(members)) for kind, members in grouped.items())
        object.__setattr__(self, "arrays", tuple(arrays))
        object.__setattr__(self, "groups", tuple(groups))

    def with_precision(self, precision: Precision) -> Layout:
        """Return the layout of the same model with keys and values kept in ``precision``."""
        return replace(self, precision=precision)

    def with_layer(self, layer: AttentionLayout) -> Layout:
        """Return the layout of the same model with one more layer, the last in the cache list."""
        node = KVNode(len(self.layers))
        return replace(self, layers=(*self.layers, layer), tree=(*self.tree, node))

    def is_of(self, probed: Layout) -> bool:
        """Return whether this is ``probed``, except for precision."""
        return (self.layers, self.states, self.tree) == (probed.layers, probed.states, probed.tree)

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
    def token_bytes(self) -> int:
        """Bytes of one position in pages, in all layers."""
        return sum(array.token_bytes for array in self.arrays)

    @property
    def value_bytes(self) -> int:
        """Bytes of one position as attention reads it, in all layers."""
        return sum(array.value_bytes for array in self.arrays)

    @property
    def layer_value_bytes(self) -> int:
        """The same in the largest layer."""
        pairs = zip(self.arrays[::2], self.arrays[1::2], strict=True)
        return max((keys.value_bytes + values.value_bytes for keys, values in pairs), default=0)

    def page_buffers(self, tokens: int) -> tuple[int, ...]:
        """Return the bytes of each buffer of a stored page of ``tokens`` tokens."""
        parts = (part for group in self.groups for part in group.parts(tokens))
        return tuple(prod(shape) * int(dtype.size) for shape, dtype in parts)

    @property
    def state_bytes(self) -> int:
        """Bytes of the recurrent state of one sequence."""
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
