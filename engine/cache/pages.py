"""Storage of keys and values: the interface of its forms on a GPU and on a CPU."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import NamedTuple

import mlx.core as mx

from engine.cache.layout import Layout
from engine.plan import Payload, Slot


class StoredKV(NamedTuple):
    """Keys or values of a row, as pages store them."""

    array: mx.array  # (1, kv_heads, length, dim), as attention reads them
    scales: mx.array | None
    """(scales of a group, 1, kv_heads, length, groups), None if nothing is quantized."""


class Pages(ABC):
    """All pages of one model: `page_tokens` positions each, numbered from 0.

    A page's bytes have the same form on every device: for each of `Layout.groups` its parts
    (`StorageGroup.parts`)."""

    unpacks = False
    """Whether values of running sequences may be kept outside of pages too (`Unpack`)."""

    def __init__(self, layout: Layout, page_tokens: int) -> None:
        self.layout = layout
        self.page_tokens = page_tokens
        self.num_pages = 0

    @abstractmethod
    def resize(self, num_pages: int) -> None:
        """Change the number of pages. Those that remain keep their content."""

    @abstractmethod
    def copy(self, source: int, target: int, positions: int) -> None:
        """Copy the first ``positions`` of page ``source`` to page ``target``."""

    @abstractmethod
    def insert(self, page: int, payload: Payload) -> None:
        """Write a page from its bytes. Raises ValueError if their sizes are wrong."""

    @abstractmethod
    def exporter(self, page: int, positions: int | None = None) -> Callable[[], Payload]:
        """Return a function that returns the bytes that ``page`` has now, even after it is
        overwritten: of its first ``positions``, then zeros. None: all."""

    @abstractmethod
    def read(self, number: int, pages: Sequence[int], length: int) -> StoredKV:
        """Return the first ``length`` positions of array ``number`` of the layout (keys of layer 0,
        values of layer 0, and so on) of a row with these ``pages``. For proofs."""

    @property
    @abstractmethod
    def contents(self) -> list[mx.array]:
        """The arrays that graphs of a step write, to be evaluated: one for each layer, none on the
        host."""

    def take_exporting(self) -> list[mx.array]:
        """Return the arrays that the exporters made since the last call read. They are dispatched
        before pages are written again."""
        return []

    @property
    @abstractmethod
    def nbytes(self) -> int:
        """Bytes of all pages, and of unpacked values."""

    def unpack(self, slot: Slot, tokens: int) -> None:  # noqa: B027  # most forms have no use for it
        """Keep values of ``slot`` outside of pages too, as `Unpack` says."""

    def drop(self, slot: Slot) -> None:  # noqa: B027
        """Forget ``slot``."""
