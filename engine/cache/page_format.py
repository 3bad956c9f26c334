"""The bytes of a page on MLX's side: one head of keys of one layer.

It has three blocks: the codes of the keys, one position after the other, those of the values, and
the scales of all positions. Without quantization, values in the model's type take the place of
codes, and there are no scales. Everything is counted in words of 4 bytes, so that new positions of
a layer are written by one scatter, whatever they consist of.

Codes of 8 bits are signed and have no bias: a value is the code times the scale."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from typing import Any, NamedTuple, TypeAlias

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

from engine.cache.layout import ArrayLayout
from engine.cache.quantization import (
    Quantization,
    clipped,
    pack,
    quantize,
    symmetric_scale,
    unpack,
)

WORD_BYTES = 4

Bytes: TypeAlias = NDArray[np.uint8]


class Block(NamedTuple):
    """Keys, values or scales in a page."""

    first: int  # its first word
    row: int  # words of a position


@dataclass(frozen=True)
class PageFormat:
    """The format of pages of a layer."""

    keys: ArrayLayout
    values: ArrayLayout
    page_tokens: int

    @property
    def heads(self) -> int:
        return self.keys.kv_heads

    @cached_property
    def blocks(self) -> tuple[Block, Block, Block]:
        """Of keys, values and scales."""
        found, first = [], 0
        for row in (_row_words(self.keys), _row_words(self.values), self._scale_words):
            found.append(Block(first, row))
            first += self.page_tokens * row
        return found[0], found[1], found[2]

    @cached_property
    def token_words(self) -> int:
        """Words of a position."""
        return sum(block.row for block in self.blocks)

    @property
    def head_words(self) -> int:
        """Words of a page of one head."""
        return self.page_tokens * self.token_words

    @property
    def page_words(self) -> int:
        """Words of a page of all heads."""
        return self.heads * self.head_words

    @property
    def groups(self) -> tuple[int, int]:
        """Groups with a scale of their own in a key and in a value."""
        return _groups(self.keys), _groups(self.values)

    @property
    def scales(self) -> int:
        """Numbers of a group."""
        return max(_scales(self.keys), _scales(self.values))

    @property
    def _scale_words(self) -> int:
        return -(-self.scales * sum(self.groups) // 2)

    # -- new positions -----------------------------------------------------------------

    def index(self, pages: mx.array, places: mx.array) -> mx.array:
        """Return the index of each word of new positions in the array of a layer, (..., kv_heads,
        width, token_words). They are at ``places`` in ``pages``, both (..., 1, width, 1)."""
        firsts, rows = self._words
        heads = mx.arange(self.heads, dtype=mx.uint32)[:, None, None] * self.head_words
        return (pages * self.page_words + heads) + (places * rows + firsts)

    @cached_property
    def _words(self) -> tuple[mx.array, mx.array]:
        """The index of each word of a position at place 0, and what each further place adds."""
        firsts = [block.first + i for block in self.blocks for i in range(block.row)]
        rows = [block.row for block in self.blocks for _ in range(block.row)]
        return mx.array(firsts, mx.uint32), mx.array(rows, mx.uint32)

    def words_of(self, keys: mx.array, values: mx.array) -> mx.array:
        """Return what is stored of ``keys`` and ``values`` (..., dim), rounded: (..., token_words)
        in the order of `index`."""
        scheme = self.keys.quantization
        if scheme == self.values.quantization and self.values.dim and scheme is not None:
            codes, scales = _rounded(mx.concatenate([keys, values], axis=-1), scheme)
            parts, marks = [codes], list(scales)
        else:
            parts, each = [], []
            for new, kind in ((keys, self.keys), (values, self.values)):
                if kind.quantization is not None:
                    codes, scales = _rounded(new, kind.quantization)
                    parts.append(codes)
                    each.append(scales)
                elif kind.dim:
                    parts.append(_as_words(new.astype(kind.dtype)))
            marks = [scales[i] for i in range(self.scales) for scales in each]
        if marks:
            parts.append(_as_words(marks[0] if len(marks) == 1 else mx.concatenate(marks, axis=-1)))
        return parts[0] if len(parts) == 1 else mx.concatenate(parts, axis=-1)

    # -- reading -----------------------------------------------------------------------

    def gather(
        self, array: mx.array, where: mx.array, exists: mx.array | None = None
    ) -> tuple[mx.array, mx.array]:
        """Return keys and values (rows, kv_heads, positions, dim) of the pages ``where``
        (`pages_of_heads`) of a layer's ``array``, and zeros where no position ``exists``
        (rows, 1, positions)."""
        words = self.taken(array, where)
        blocks = [
            words[..., block.first : block.first + self.page_tokens * block.row]
            for block in self.blocks
        ]
        keys, values = (self.values_of(half, blocks[half], blocks[2], exists) for half in (0, 1))
        return keys, values

    def gather_half(
        self, array: mx.array, half: int, where: mx.array, exists: mx.array | None = None
    ) -> mx.array:
        """Return the keys alone (``half`` 0) or the values."""
        words, marks = (self.taken(array, where, block) for block in (half, 2))
        return self.values_of(half, words, marks, exists)

    def taken(self, array: mx.array, where: mx.array, block: int | None = None) -> mx.array:
        """Return the words of pages (rows, kv_heads, pages, words), of one block or all."""
        heads = array.reshape(-1, self.head_words)
        if block is not None:
            its = self.blocks[block]
            heads = heads[:, its.first : its.first + self.page_tokens * its.row]
        return heads[where]

    def values_of(self, half: int, codes: mx.array, marks: mx.array, exists: Any) -> mx.array:
        """Return keys (``half`` 0) or values (1) of pages: (rows, kv_heads, positions, dim).

        ``codes`` and ``marks`` are words of their block and of that of the scales (rows, kv_heads,
        pages, words). Positions that do not exist are zero, whatever pages hold there: ``exists``
        is (rows, 1, positions), or None if all do."""
        kind = (self.keys, self.values)[half]
        rows, heads, count = codes.shape[:3]
        positions = count * self.page_tokens
        if not kind.dim:
            return mx.zeros((rows, heads, positions, 0), kind.dtype)
        scheme = kind.quantization
        by_token = (rows, heads, count, self.page_tokens)
        if exists is not None:
            exists = exists.reshape(rows, 1, count, self.page_tokens, 1)
        if scheme is None:
            found = codes.view(kind.dtype).reshape(*by_token, -1)[..., : kind.dim]
            if exists is not None:
                found = mx.where(exists, found, mx.zeros((), kind.dtype))
            return found.reshape(rows, heads, positions, kind.dim)
        of_code = mx.int8 if scheme.is_symmetric else mx.uint8
        packed = unpack(codes.view(of_code).reshape(*by_token, -1), scheme.bits)
        grouped = packed.reshape(*by_token, -1, scheme.group_size)
        read = compiled(_dequantizer(kind.dtype, exists is not None))
        scales = self.scales_of(half, marks)
        columns = [scales[..., i, :, None] for i in range(scheme.scales)]
        given = () if exists is None else (exists[..., None],)
        return read(grouped, *columns, *given).reshape(rows, heads, positions, kind.dim)

    def scales_of(self, half: int, marks: mx.array) -> mx.array:
        """Return the scales of keys or values, (rows, kv_heads, pages, page_tokens, scales of a
        group, groups)."""
        of_keys, of_values = self.groups
        found = marks.view(mx.float16).reshape(*marks.shape[:3], self.page_tokens, -1)
        found = found[..., : self.scales * (of_keys + of_values)]
        found = found.reshape(*found.shape[:-1], self.scales, of_keys + of_values)
        return found[..., of_keys:] if half else found[..., :of_keys]

    # -- bytes -------------------------------------------------------------------------

    def bytes_of(self, half: int, words: NDArray[np.uint32]) -> list[Bytes]:
        """Return views of keys or values in ``words`` (kv_heads, head_words), as stored outside of
        MLX: bytes of codes or values (kv_heads, page_tokens, bytes), and of scales (scales of a
        group, kv_heads, page_tokens, bytes)."""
        kind = (self.keys, self.values)[half]
        codes = self._block(self.blocks[half], words)
        scheme = kind.quantization
        if scheme is None:
            return [codes[..., : kind.dim * int(kind.dtype.size)]]
        size, of_keys = int(mx.float16.size), self.groups[0]
        marks = self._block(self.blocks[2], words)[..., : size * self.scales * sum(self.groups)]
        marks = marks.reshape(*marks.shape[:2], self.scales, -1, copy=False)
        its = marks[..., size * of_keys :] if half else marks[..., : size * of_keys]
        return [codes, np.moveaxis(its, 2, 0)]

    def _block(self, block: Block, words: NDArray[np.uint32]) -> Bytes:
        """Return a view of the bytes of a block, (kv_heads, page_tokens, bytes)."""
        its = words[:, block.first : block.first + self.page_tokens * block.row].view(np.uint8)
        return its.reshape(len(words), self.page_tokens, -1, copy=False)


def _scales(kind: ArrayLayout) -> int:
    return 0 if kind.quantization is None else kind.quantization.scales


def _groups(kind: ArrayLayout) -> int:
    return 0 if kind.quantization is None else kind.dim // kind.quantization.group_size


def _row_words(kind: ArrayLayout) -> int:
    scheme = kind.quantization
    size = kind.dim * int(kind.dtype.size) if scheme is None else scheme.code_bytes(kind.dim)
    return -(-size // WORD_BYTES)


def _as_words(x: mx.array) -> mx.array:
    """Return ``x`` (..., dim) as words, padded with zeros."""
    missing = -x.shape[-1] % (WORD_BYTES // x.dtype.size)
    if missing:
        x = mx.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, missing)])
    return x.view(mx.uint32)


def _rounded(x: mx.array, scheme: Quantization) -> tuple[mx.array, Sequence[mx.array]]:
    """Return the words of the codes of ``x``, and its scales (scales of a group, ..., groups).
    Values are those of `engine.cache.quantization.quantize`."""
    if not scheme.is_symmetric:
        codes, scales = quantize(x, scheme)
        return pack(codes, scheme.bits).view(mx.uint32), scales
    groups = x.reshape(*x.shape[:-1], -1, scheme.group_size)
    scale = compiled(symmetric_scale)(mx.abs(groups).max(axis=-1))
    codes = compiled(_signed_codes)(groups, scale[..., None])
    return codes.reshape(x.shape).view(mx.uint32), (scale,)


def _signed_codes(groups: mx.array, scale: mx.array) -> mx.array:
    return mx.round(clipped(groups) / scale.astype(mx.float32)).astype(mx.int8)


def pages_of_heads(table: mx.array, heads: int) -> mx.array:
    """Return the pages in ``table`` (rows, pages) of each head: (rows, kv_heads, pages)."""
    return table[:, None] * heads + mx.arange(heads, dtype=mx.uint32)[:, None]


@cache
def _dequantizer(dtype: mx.Dtype, cuts: bool) -> Callable[..., mx.array]:
    """Return a function that reads codes (..., group size) with their scales and biases (..., 1).
    If it ``cuts``, its last argument says which exist."""

    def read(codes: mx.array, scale: mx.array, *rest: mx.array) -> mx.array:
        bias = rest[0] if len(rest) > cuts else None
        if cuts:  # a scale that was never written may be NaN
            zero = mx.zeros((), mx.float16)
            scale = mx.where(rest[-1], scale, zero)
            bias = None if bias is None else mx.where(rest[-1], bias, zero)
        found = codes.astype(mx.float32) * scale.astype(mx.float32)
        return (found if bias is None else found + bias).astype(dtype)

    return read


def compiled(function: Callable[..., mx.array]) -> Callable[..., mx.array]:
    """Return an elementwise ``function`` as one kernel on a GPU. On a CPU that would require a
    compiler on the server."""
    return as_kernel(function) if mx.default_device() == mx.gpu else function


@cache
def as_kernel(function: Callable[..., mx.array]) -> Callable[..., mx.array]:
    fused: Callable[..., mx.array] = mx.compile(function, shapeless=True)
    return fused
