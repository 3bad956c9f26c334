"""Pages in MLX's memory, written and read by its graph."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import mlx.core as mx
import numpy as np

from engine.backend.settling import compute
from engine.cache.layout import ArrayLayout, Layout
from engine.cache.pages import Pages, StoredKV
from engine.cache.quantization import MIDDLE, pack, quantize, unpack
from engine.plan import Payload

WORD_BYTES = 4


class PageFormat:
    """Where the words of a layer's tokens are in a page of one head of keys.

    A page has the codes of all its keys, then those of its values, then the scales of each token:
    those of the key, then of the value. Without quantization the codes are the values themselves.
    """

    def __init__(self, keys: ArrayLayout, values: ArrayLayout, page_tokens: int) -> None:
        self.kinds = keys, values
        self.heads, self.page_tokens = keys.kv_heads, page_tokens
        self.code_bytes = tuple(_code_bytes(kind) for kind in self.kinds)
        self.scales = tuple(_num_scales(kind) for kind in self.kinds)
        parts = [*self.code_bytes, sum(self.scales) * int(mx.float16.size)]
        self.words = [-(-size // WORD_BYTES) for size in parts]
        self.token_words = sum(self.words)
        self.page_words = page_tokens * self.token_words

    def places(self, pages: mx.array, indices: mx.array) -> mx.array:
        """Return the numbers, in an array of pages, of all words of the tokens at ``indices`` of
        ``pages``, both (tokens,): (tokens, heads, words)."""
        inner, first = [], 0
        for words in self.words:
            inner.append(first + indices[:, None] * words + mx.arange(words))
            first += self.page_tokens * words
        base = (pages[:, None] * self.heads + mx.arange(self.heads)) * self.page_words
        return base[:, :, None] + mx.concatenate(inner, axis=1)[:, None]

    def words_of(self, keys: mx.array, values: mx.array) -> mx.array:
        """Round ``keys`` and ``values`` (..., dim), and return their words (..., words)."""
        codes, scales = [], []
        for kind, new in zip(self.kinds, (keys, values), strict=True):
            if not kind.dim:
                continue
            scheme = kind.quantization
            if scheme is None:
                codes.append(_as_words(new.astype(kind.dtype)))
                continue
            found = quantize(new, scheme)
            if scheme.is_symmetric:  # signed, so that no bias is needed
                codes.append(_as_words((found.codes - MIDDLE).view(mx.int8)))
                scales.append(found.scales[0])
            else:
                codes.append(_as_words(pack(found.codes, scheme.bits)))
                scales += [found.scales[0], found.scales[1]]
        if scales:
            codes.append(_as_words(mx.concatenate(scales, axis=-1)))
        return mx.concatenate(codes, axis=-1) if len(codes) > 1 else codes[0]

    def values_of(self, words: mx.array, half: int) -> StoredKV:
        """Return keys (``half`` 0) or values of pages, whose ``words`` are (..., page words):
        (..., page_tokens, dim), and scales (scales of a group, ..., page_tokens, groups)."""
        kind, size = self.kinds[half], self.page_tokens
        if not kind.dim:
            return StoredKV(mx.zeros((*words.shape[:-1], size, 0), kind.dtype), None)
        first = half * size * self.words[0]
        codes = self._part(words, first, self.words[half])
        if kind.quantization is None:
            return StoredKV(_from_words(codes, kind.dtype, kind.dim), None)
        scheme = kind.quantization
        marks = self._part(words, size * sum(self.words[:2]), self.words[2])
        marks = _from_words(marks, mx.float16, sum(self.scales))
        start = self.scales[0] if half else 0
        marks = marks[..., start : start + self.scales[half]]
        scales = mx.stack(mx.split(marks, scheme.scales, axis=-1))
        groups = kind.dim // scheme.group_size
        wide = scales.astype(mx.float32)[..., None]
        if scheme.is_symmetric:
            found = _from_words(codes, mx.int8, kind.dim).astype(mx.float32)
            found = found.reshape(*found.shape[:-1], groups, -1) * wide[0]
        else:
            packed = _from_words(codes, mx.uint8, self.code_bytes[half])
            found = unpack(packed, scheme.bits).astype(mx.float32)
            found = found.reshape(*found.shape[:-1], groups, -1) * wide[0] + wide[1]
        return StoredKV(found.flatten(-2).astype(kind.dtype), scales)

    def _part(self, words: mx.array, first: int, each: int) -> mx.array:
        part = words[..., first : first + self.page_tokens * each]
        return part.reshape(*part.shape[:-1], self.page_tokens, each)


def _code_bytes(kind: ArrayLayout) -> int:
    if kind.quantization is None:
        return kind.dim * int(kind.dtype.size)
    return kind.quantization.code_bytes(kind.dim)


def _num_scales(kind: ArrayLayout) -> int:
    if kind.quantization is None or not kind.dim:
        return 0
    return kind.quantization.scales * (kind.dim // kind.quantization.group_size)


def _as_words(array: mx.array) -> mx.array:
    """Return ``array`` (..., elements) as words, the last one padded with zeros."""
    missing = -array.shape[-1] % (WORD_BYTES // array.dtype.size or 1)
    if missing:
        array = mx.pad(array, [(0, 0)] * (array.ndim - 1) + [(0, missing)])
    return mx.contiguous(array).view(mx.uint32)


def _from_words(words: mx.array, dtype: mx.Dtype, elements: int) -> mx.array:
    return mx.contiguous(words).view(dtype)[..., :elements]


class GraphPages(Pages):
    """One array of words for each layer: (pages * kv_heads * words of a page,).

    They are written in place, which MLX does only while nothing else refers to their buffers. So
    take slices, use them in a graph that is dispatched before the next write, and never keep
    them."""

    def __init__(self, layout: Layout, page_tokens: int) -> None:
        super().__init__(layout, page_tokens)
        pairs = zip(layout.arrays[::2], layout.arrays[1::2], strict=True)
        known: dict[tuple[ArrayLayout, ArrayLayout], PageFormat] = {}
        self.formats = [known.setdefault(pair, PageFormat(*pair, page_tokens)) for pair in pairs]
        """Of each layer. Layers of one kind have the same object."""
        self.arrays = [mx.zeros((0,), mx.uint32) for _ in self.formats]
        self._exporting: list[mx.array] = []

    @property
    def contents(self) -> list[mx.array]:
        return self.arrays

    @property
    def nbytes(self) -> int:
        return sum(array.nbytes for array in self.arrays)

    def resize(self, num_pages: int) -> None:
        """One array is copied after the other, so that only one takes additional memory."""
        for number, form in enumerate(self.formats):
            size, array = num_pages * form.heads * form.page_words, self.arrays[number]
            if size > array.size:
                array = mx.concatenate([array, mx.zeros((size - array.size,), mx.uint32)])
            else:  # a slice would keep the whole array alive
                array = mx.take(array, mx.arange(size))
            self.arrays[number] = array
            compute(array)  # a GPU holds the old array until then, and the next one is copied now
            del array
        self.num_pages = num_pages

    def copy(self, source: int, target: int, positions: int) -> None:
        indices = mx.arange(positions)
        for form, numbers in self._layers_by_format():
            from_, to = (
                form.places(mx.full(positions, page, mx.int32), indices)
                for page in (source, target)
            )
            for number in numbers:
                self.arrays[number][to] = self.arrays[number][from_]

    def insert(self, page: int, payload: Payload) -> None:
        sizes = list(self.layout.page_buffers(self.page_tokens))
        if [len(part) for part in payload] != sizes:
            raise ValueError("the bytes do not have the size of a page")
        parts = self._parts(payload)
        for number, form in enumerate(self.formats):
            words = np.zeros((form.heads, form.page_words), np.uint32)
            self._move_parts(form, number, words, parts, to_words=True)
            start, size = page * words.size, words.size
            self.arrays[number][start : start + size] = mx.array(words.reshape(-1))

    def exporter(self, page: int) -> Callable[[], Payload]:
        taken = []
        for number, form in enumerate(self.formats):
            size = form.heads * form.page_words
            taken.append(mx.contiguous(self.arrays[number][page * size : (page + 1) * size]))
        self._exporting += taken
        return partial(self._payload, taken)

    def take_exporting(self) -> list[mx.array]:
        found, self._exporting = self._exporting, []
        return found

    def _payload(self, taken: Sequence[mx.array]) -> Payload:
        buffers = [np.empty(size, np.uint8) for size in self.layout.page_buffers(self.page_tokens)]
        parts = self._parts([buffer.data for buffer in buffers])
        for number, (form, array) in enumerate(zip(self.formats, taken, strict=True)):
            words = np.array(array).reshape(form.heads, form.page_words)
            self._move_parts(form, number, words, parts, to_words=False)
        return tuple(buffer.data for buffer in buffers)

    def _parts(self, payload: Sequence[bytes | memoryview]) -> dict[int, list[np.ndarray]]:
        """Return views of the bytes of each array in a page's ``payload``: of its codes or values
        (kv_heads, tokens, bytes), and of its scales (scales of a group, kv_heads, tokens, bytes).
        """
        found: dict[int, list[np.ndarray]] = {}
        buffers = iter(payload)
        for group in self.layout.groups:
            views = []
            for shape, dtype in group.parts(self.page_tokens):
                whole = np.frombuffer(next(buffers), np.uint8)
                views.append(whole.reshape(*shape[:-1], shape[-1] * int(dtype.size)))
            for place, number in enumerate(group.arrays):
                found[number] = [views[0][place], *(view[:, place] for view in views[1:])]
        return found

    def _move_parts(
        self,
        form: PageFormat,
        layer: int,
        words: np.ndarray,
        parts: dict[int, list[np.ndarray]],
        *,
        to_words: bool,
    ) -> None:
        """Copy the bytes of a layer from ``parts`` to the ``words`` (heads, page words) of a page,
        or back."""
        size, first = self.page_tokens, 0
        own = words.view(np.uint8)
        marks_at = size * sum(form.words[:2]) * WORD_BYTES
        marks = own[:, marks_at:].reshape(form.heads, size, -1)
        start = 0
        for half in (0, 1):
            length = size * form.words[half] * WORD_BYTES
            codes = own[:, first : first + length].reshape(form.heads, size, -1)
            first += length
            if 2 * layer + half not in parts:
                continue
            their, *scales = parts[2 * layer + half]
            pairs = [(codes[..., : their.shape[-1]], their)]
            for scale in (one for whole in scales for one in whole):
                pairs.append((marks[..., start : start + scale.shape[-1]], scale))
                start += scale.shape[-1]
            for mine, other in pairs:
                if to_words:
                    mine[...] = other
                else:
                    other[...] = mine

    def read(self, number: int, pages: Sequence[int], length: int) -> StoredKV:
        layer, half = divmod(number, 2)
        table = mx.array([pages[: -(-length // self.page_tokens)]])
        found = self.gather(layer, table, half)
        scales = found.scales
        if scales is not None:
            scales = scales[:, :, :, :length]
        return StoredKV(found.array[:, :, :length], scales)

    def write(self, layer: int, places: mx.array, keys: mx.array, values: mx.array) -> None:
        """Store ``keys`` and ``values`` (tokens, kv_heads, dim) at ``places``
        (`PageFormat.places`)."""
        self.arrays[layer][places] = self.formats[layer].words_of(keys, values)

    def gather(self, layer: int, tables: mx.array, half: int) -> StoredKV:
        """Return keys (``half`` 0) or values of the pages in ``tables`` (rows, pages): (rows,
        kv_heads, positions, dim), with their scales."""
        form = self.formats[layer]
        words = self.arrays[layer].reshape(-1, form.heads, form.page_words)[tables]
        found = form.values_of(words.swapaxes(1, 2), half)
        scales = found.scales
        return StoredKV(found.array.flatten(2, 3), None if scales is None else scales.flatten(3, 4))

    def _layers_by_format(self) -> list[tuple[PageFormat, list[int]]]:
        found: dict[PageFormat, list[int]] = {}
        for number, form in enumerate(self.formats):
            found.setdefault(form, []).append(number)
        return list(found.items())
