"""What a model keeps of a sequence: KV of each token, and recurrent state."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from math import prod
from typing import Any, NamedTuple

import mlx.core as mx
from mlx_lm.models.cache import (
    ArraysCache,
    CacheList,
    ChunkedKVCache,
    KVCache,
    RotatingKVCache,
    make_prompt_cache,
)

from engine.cache.quantization import UNQUANTIZED, Precision, Quantization

PROBE_TOKENS = (1, 6)
"""How many tokens are run, one piece after the other, to see what a model keeps."""


class UnsupportedLayout(Exception):
    """Slots cannot hold this model's state; the message says which layer and why."""


@dataclass(frozen=True)
class AttentionLayout:
    """One attention layer: keys are (kv_heads, length, key_dim), values likewise.

    ``window`` is the number of most recent positions a token sees, None for all.
    """

    kv_heads: int
    key_dim: int
    value_dim: int
    dtype: mx.Dtype
    window: int | None


@dataclass(frozen=True)
class ArrayLayout:
    """The keys or the values of a layer: (kv_heads, length, dim), computed in ``dtype``.

    Of what is quantized blocks hold codes and scales, and so do slots; or, where it is
    ``dequantized``, slots hold the values that these stand for and the scales, from which
    codes can be had back (`engine.cache.quantization`).
    """

    kv_heads: int
    dim: int
    dtype: mx.Dtype
    quantization: Quantization | None = None
    dequantized: bool = False

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
    """One array (rows, *shape) of recurrent state, which is as large at any length."""

    shape: tuple[int, ...]
    dtype: mx.Dtype

    @property
    def state_bytes(self) -> int:
        return prod(self.shape) * int(self.dtype.size)


class KVNode(NamedTuple):
    """The place of a layer with keys and values: ``Layout.layers[layer]``."""

    layer: int


class StateNode(NamedTuple):
    """The place of a layer with recurrent state: for each of its arrays the number in
    ``Layout.states``, or None for one that the model never sets."""

    numbers: tuple[int | None, ...]


Node = KVNode | StateNode | tuple["Node", ...]
"""One entry of the list of caches that a model is called with; a tuple is mlx-lm's `CacheList`."""


@dataclass(frozen=True)
class StorageGroup:
    """All arrays of a slot that are kept in the same way: they are stored together.

    ``arrays`` are indices into a slab's flat list (keys of layer 0, values of layer 0,
    keys of layer 1, ...).
    """

    kind: ArrayLayout
    arrays: tuple[int, ...]

    def parts(self, tokens: int) -> tuple[tuple[tuple[int, ...], mx.Dtype], ...]:
        """Shapes and types of what a block of so many tokens has of it: one array, or codes
        (packed, in bytes) and scales."""
        kind, scheme = self.kind, self.kind.quantization
        rows = (len(self.arrays), kind.kv_heads, tokens)
        if scheme is None:
            return (((*rows, kind.dim), kind.dtype),)
        return (
            ((*rows, scheme.code_bytes(kind.dim)), mx.uint8),
            ((2, *rows, kind.dim // scheme.group_size), mx.float16),
        )


@dataclass(frozen=True)
class Layout:
    """``tree`` has the shape of the list of caches that mlx-lm makes for the model;
    ``arrays`` are those of a slot, in the order of a slab's."""

    layers: tuple[AttentionLayout, ...]
    states: tuple[StateLayout, ...]
    tree: tuple[Node, ...]
    precision: Precision = UNQUANTIZED
    dequantized: bool = False
    arrays: tuple[ArrayLayout, ...] = field(init=False)
    groups: tuple[StorageGroup, ...] = field(init=False)

    def __post_init__(self) -> None:
        arrays = []
        for layer in self.layers:
            for dim in (layer.key_dim, layer.value_dim):
                scheme = self.precision.for_dim(dim)
                # Less than fp32 would not give codes back.
                dequantized = self.dequantized and scheme is not None and layer.dtype == mx.float32
                arrays.append(ArrayLayout(layer.kv_heads, dim, layer.dtype, scheme, dequantized))
        grouped: dict[ArrayLayout, list[int]] = {}
        for index, array in enumerate(arrays):
            if array.dim:  # some keep keys only
                grouped.setdefault(array, []).append(index)
        groups = (StorageGroup(kind, tuple(members)) for kind, members in grouped.items())
        object.__setattr__(self, "arrays", tuple(arrays))
        object.__setattr__(self, "groups", tuple(groups))

    def with_precision(self, precision: Precision, *, dequantized: bool) -> Layout:
        """The same model, its keys and values kept with ``precision``; slots have them
        ``dequantized`` where they are in fp32."""
        return replace(self, precision=precision, dequantized=dequantized)

    @property
    def unquantized_layers(self) -> tuple[int, ...]:
        """The layers that are not quantized, or not both keys and values of them."""
        whole = {i // 2 for i, a in enumerate(self.arrays) if a.dim and a.quantization is None}
        return tuple(sorted(whole))

    @property
    def kv_bits(self) -> int:
        """Bits of what is quantized, 16 where nothing is."""
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
    def state_bytes(self) -> int:
        """Bytes of a slot's recurrent state, whatever its capacity."""
        return sum(state.state_bytes for state in self.states)


def probe_layout(model: Any) -> Layout:
    """The layout of ``model``, found by running a few tokens through mlx-lm's own caches.

    Raises `UnsupportedLayout` where a layer keeps something else than keys and values,
    or state of a constant size.
    """
    caches = make_prompt_cache(model)
    shapes = []
    for count in PROBE_TOKENS:
        mx.eval(model(mx.array([[0] * count]), cache=caches))
        shapes.append([_state_shapes(cache) for cache in caches])
    builder = _LayoutBuilder()
    tree = tuple(builder.node(cache, f"layer {i}") for i, cache in enumerate(caches))
    for index, (before, after) in enumerate(zip(*shapes, strict=True)):
        if before != after:
            raise UnsupportedLayout(f"layer {index} keeps state that grows")
    return Layout(tuple(builder.layers), tuple(builder.states), tree)


class _LayoutBuilder:
    def __init__(self) -> None:
        self.layers: list[AttentionLayout] = []
        self.states: list[StateLayout] = []

    def node(self, cache: Any, where: str) -> Node:
        kind = type(cache)
        if kind is CacheList:
            return tuple(self.node(part, where) for part in cache.caches)
        if kind is ArraysCache:
            return StateNode(tuple(self._state(array, where) for array in cache.cache))
        if kind in (KVCache, ChunkedKVCache) or (kind is RotatingKVCache and cache.keep == 0):
            return self._kv(cache, where)
        raise UnsupportedLayout(f"{where} keeps a {kind.__name__}")

    def _state(self, array: mx.array | None, where: str) -> int | None:
        if array is None:
            return None
        if array.shape[0] != 1:
            raise UnsupportedLayout(f"{where} keeps state that is not one row of a batch")
        self.states.append(StateLayout(array.shape[1:], array.dtype))
        return len(self.states) - 1

    def _kv(self, cache: Any, where: str) -> KVNode:
        keys, values = cache.keys, cache.values
        if keys is None or values is None:
            raise UnsupportedLayout(f"{where} stores no keys")
        if keys.shape[1] != values.shape[1] or keys.dtype != values.dtype:
            raise UnsupportedLayout(f"{where} has keys and values of different kinds")
        self.layers.append(
            AttentionLayout(
                kv_heads=keys.shape[1],
                key_dim=keys.shape[3],
                value_dim=values.shape[3],
                dtype=keys.dtype,
                window=cache.max_size if type(cache) is RotatingKVCache else None,
            )
        )
        return KVNode(len(self.layers) - 1)


def _state_shapes(cache: Any) -> list[Any]:
    """Shapes and types of all recurrent state in ``cache``."""
    if isinstance(cache, CacheList):
        return [_state_shapes(part) for part in cache.caches]
    if isinstance(cache, ArraysCache):
        return [None if array is None else (array.shape, array.dtype) for array in cache.cache]
    return []
