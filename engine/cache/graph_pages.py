"""Pages in MLX's memory, written and read by its graph."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import mlx.core as mx
import numpy as np

from engine.backend.device_errors import compute
from engine.cache.layout import ArrayLayout, Layout
from engine.cache.page_format import Bytes, PageFormat, pages_of_heads
from engine.cache.pages import Pages, StoredKV
from engine.plan import Payload


class GraphPages(Pages):
    """One array of words for each layer, page by page and head by head (`PageFormat`).

    It is written in place, which MLX does only while nothing else refers to its buffer. Therefore
    each layer has an array of its own, and slices are used in graphs that are dispatched before the
    next write, and never kept (`engine.executor.line`)."""

    def __init__(self, layout: Layout, page_tokens: int, num_pages: int = 0) -> None:
        super().__init__(layout, page_tokens)
        pairs = zip(layout.arrays[::2], layout.arrays[1::2], strict=True)
        known: dict[tuple[ArrayLayout, ArrayLayout], PageFormat] = {}
        self.formats = [known.setdefault(pair, PageFormat(*pair, page_tokens)) for pair in pairs]
        """Of each layer. Layers of one kind have the same object."""
        self.arrays = [mx.zeros((0,), mx.uint32) for _ in self.formats]
        self._exporting: list[mx.array] = []
        if num_pages:
            self.resize(num_pages)

    @property
    def contents(self) -> list[mx.array]:
        return [*self.arrays]

    @property
    def nbytes(self) -> int:
        return sum(array.nbytes for array in self.arrays)

    def resize(self, num_pages: int) -> None:
        """Copy one array after the other, so that only one takes additional memory."""
        for number, form in enumerate(self.formats):
            array, size = self.arrays[number], num_pages * form.page_words
            if size > array.size:
                array = mx.pad(array, (0, size - array.size))
            elif size < array.size:
                array = mx.contiguous(array[:size])
            compute(array)  # a GPU holds the old array until then
            self.arrays[number] = array
            del array
        self.num_pages = num_pages

    # -- whole pages -------------------------------------------------------------------

    def copy(self, source: int, target: int, positions: int) -> None:
        """Copy the whole page: what it holds behind ``positions`` is never read."""
        taken = [self._take(number, source) for number in range(len(self.formats))]
        compute(taken)  # arrays that are still being read would be copied when they are written
        for number, page in enumerate(taken):
            self._put(number, target, page)

    def insert(self, page: int, payload: Payload) -> None:
        if [len(part) for part in payload] != [*self.layout.page_buffers(self.page_tokens)]:
            raise ValueError("the bytes do not have the size of a page")
        parts = self._parts(payload)
        for number, form in enumerate(self.formats):
            words = np.zeros((form.heads, form.head_words), np.uint32)
            for half in (0, 1):
                for own, other in _pairs(form, words, parts, number, half):
                    own[...] = other
            self._put(number, page, mx.array(words.reshape(-1)))

    def exporter(self, page: int, positions: int | None = None) -> Callable[[], Payload]:
        taken = [self._take(number, page) for number in range(len(self.formats))]
        self._exporting += taken
        return partial(self._payload, taken, positions)

    def take_exporting(self) -> list[mx.array]:
        found, self._exporting = self._exporting, []
        return found

    def _take(self, number: int, page: int) -> mx.array:
        """Return a copy of a page of a layer."""
        size = self.formats[number].page_words
        return mx.take(self.arrays[number].reshape(-1, size), mx.array([page]), axis=0)

    def _put(self, number: int, page: int, words: mx.array) -> None:
        size = self.formats[number].page_words
        self.arrays[number][page * size : (page + 1) * size] = words.reshape(-1)

    def _payload(self, taken: Sequence[mx.array], positions: int | None) -> Payload:
        buffers = [bytearray(size) for size in self.layout.page_buffers(self.page_tokens)]
        parts = self._parts(buffers)
        for number, (form, array) in enumerate(zip(self.formats, taken, strict=True)):
            words = np.asarray(array).reshape(form.heads, form.head_words)
            for half in (0, 1):
                for own, other in _pairs(form, words, parts, number, half):
                    other[..., :positions, :] = own[..., :positions, :]
        return tuple(memoryview(buffer) for buffer in buffers)

    def _parts(self, payload: Sequence[Any]) -> dict[int, list[Bytes]]:
        """Return views of each array's bytes in ``payload``, as `PageFormat.bytes_of` does."""
        found: dict[int, list[Bytes]] = {}
        buffers = iter(payload)
        for group in self.layout.groups:
            views: list[Bytes] = []
            for shape, dtype in group.parts(self.page_tokens):
                row = shape[-1] * int(dtype.size)
                views.append(np.frombuffer(next(buffers), np.uint8).reshape(*shape[:-1], row))
            for place, number in enumerate(group.arrays):
                found[number] = [views[0][place], *(view[:, place] for view in views[1:])]
        return found

    def read(self, number: int, pages: Sequence[int], length: int) -> StoredKV:
        layer, half = divmod(number, 2)
        form = self.formats[layer]
        table = mx.array([pages[: -(-length // self.page_tokens)]], mx.uint32)
        where = pages_of_heads(table, form.heads)
        found = self.gather_half(layer, half, where)[:, :, :length]
        if (form.keys, form.values)[half].quantization is None:
            return StoredKV(found, None)
        marks = form.scales_of(half, form.taken(self.arrays[layer], where, 2))
        marks = marks.flatten(2, 3)[:, :, :length]  # (1, kv_heads, length, scales, groups)
        return StoredKV(found, mx.moveaxis(marks, 3, 0))

    # -- what passes do ----------------------------------------------------------------

    def write(self, layer: int, index: mx.array, words: mx.array) -> None:
        """Write the ``words`` of new positions (`PageFormat.words_of`) at ``index``
        (`PageFormat.index`)."""
        self.arrays[layer][index] = words

    def gather(
        self, layer: int, where: mx.array, exists: mx.array | None = None
    ) -> tuple[mx.array, mx.array]:
        """Return keys and values of rows, see `PageFormat.gather`."""
        return self.formats[layer].gather(self.arrays[layer], where, exists)

    def gather_half(
        self, layer: int, half: int, where: mx.array, exists: mx.array | None = None
    ) -> mx.array:
        """Return the keys alone (``half`` 0) or the values."""
        return self.formats[layer].gather_half(self.arrays[layer], half, where, exists)


def _pairs(
    form: PageFormat,
    words: np.ndarray[Any, np.dtype[np.uint32]],
    parts: dict[int, list[Bytes]],
    layer: int,
    half: int,
) -> list[tuple[Bytes, Bytes]]:
    """Return the same bytes of keys or values in the ``words`` of a page and outside of MLX."""
    number = 2 * layer + half
    return [*zip(form.bytes_of(half, words), parts[number], strict=True)] if number in parts else []
