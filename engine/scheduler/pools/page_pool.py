"""Pages: which are free, which are cached, and which hold the prefix with some hash."""

from __future__ import annotations

import heapq
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import NamedTuple

from engine.plan import BlockName, Export


class NetChanges:
    """Which hashes can be found, and which no longer, since the last `take`."""

    def __init__(self) -> None:
        self._found: dict[bytes, bool] = {}

    def record(self, block_hash: bytes, *, added: bool) -> None:
        """Opposite changes cancel out."""
        if self._found.get(block_hash, added) != added:
            del self._found[block_hash]
        else:
            self._found[block_hash] = added

    def take(self) -> tuple[list[bytes], list[bytes]]:
        """Return the hashes that were added and removed."""
        added = [block_hash for block_hash, exists in self._found.items() if exists]
        removed = [block_hash for block_hash, exists in self._found.items() if not exists]
        self._found.clear()
        return added, removed


@dataclass(eq=False, slots=True)
class Storable:
    """Something that the kvstore may keep: the content of a page, or a snapshot."""

    id: int  # never used again
    hash: bytes  # of the last block
    stored: bool = False  # whether the kvstore has it

    @property
    def is_snapshot(self) -> bool:
        return False

    @property
    def name(self) -> BlockName:
        return BlockName(self.id, self.hash, self.is_snapshot)

    @property
    def export(self) -> Export:
        return Export(self.id)


@dataclass(eq=False, slots=True)
class Page:
    """A page in use, or with the KV of a known prefix."""

    number: int  # may change while a plan is built
    refs: int = 1  # tables that contain it, and operations of the plan being built
    passes: int = 0  # open passes that know its number
    names: dict[int, bytes] = field(default_factory=dict)
    """The hashes of the prefixes whose last positions it holds, by the position in the page where
    they end. Nothing may be written before the last of these positions."""
    content: PageContent | None = None
    """What the kvstore may keep of it: all, once it is full; before, what it had when a sequence
    left it."""
    last_used: int = 0  # time of its last use, by the pools' clock

    @property
    def named_end(self) -> int:
        return max(self.names, default=0)


@dataclass(eq=False, slots=True, kw_only=True)
class PageContent(Storable):
    """The content of a page up to ``end``."""

    page: Page
    end: int

    @property
    def export(self) -> Export:
        return Export(self.id, self.page.number, self.end)


class CachedPrefix(NamedTuple):
    """The cached pages of a prefix."""

    pages: list[Page]  # full ones
    part: Page | None  # the one after them, of which a part is equal
    blocks: int  # in all of them


class PagePool:
    """Pages by number, and by the hashes of their blocks.

    A page is free (it has no number that anybody knows), cached (nobody refers to it, but hashes
    lead to it) or used. Pages that are cached are evicted in the order of their last use. Free
    numbers are taken from the lowest on, so that the number of pages can be reduced. Every
    operation is O(1) per page or block.

    Source: nano-vllm's block manager, with names for parts of pages.
    """

    def __init__(self, page_tokens: int, block_size: int, clock: count[int]) -> None:
        """``clock`` is shared with other pools: last uses can be compared, and ids are unique."""
        self.page_tokens, self._block_size = page_tokens, block_size
        self._clock = clock
        self.num_pages = 0
        self._free: list[int] = []  # a heap; numbers from `num_pages` on are free too
        self._high = 0  # all free numbers are below
        self._pages: dict[int, Page] = {}
        self._new: set[Page] = set()  # taken for the plan being built
        self.fixed: set[Page] = set()  # pages that open passes know by number
        self._cached: OrderedDict[Page, None] = OrderedDict()
        self._index: dict[bytes, list[Page]] = {}
        self._changes = NetChanges()

    def __len__(self) -> int:
        return len(self._pages)

    def __iter__(self) -> Iterator[Page]:
        return iter(self._pages.values())

    def __contains__(self, block_hash: object) -> bool:
        return block_hash in self._index

    @property
    def hashes(self) -> list[bytes]:
        """The hashes of all blocks that can be found."""
        return list(self._index)

    @property
    def num_free(self) -> int:
        return self.num_pages - len(self._pages)

    @property
    def num_cached(self) -> int:
        return len(self._cached)

    @property
    def num_removable(self) -> int:
        """Number of pages by which `resize` could reduce the pool after evictions."""
        fixed = max((page.number for page in self.fixed), default=-1)
        return min(self.num_free + self.num_cached, self.num_pages - 1 - fixed)

    def resize(self, num_pages: int) -> None:
        """Change the number of pages. Not below `num_free` and `num_removable` less than now."""
        self.num_pages = num_pages
        for number in range(self._high, num_pages):
            heapq.heappush(self._free, number)
        self._high = max(self._high, num_pages)

    def compact(self) -> list[tuple[Page, int]]:
        """Give all pages numbers below `num_pages`. Return those whose content has to be moved,
        with their previous numbers. Called once for each plan, before its numbers are read."""
        moved = []
        if self._high > self.num_pages:
            for number in sorted(n for n in self._pages if n >= self.num_pages):
                page = self._pages.pop(number)
                if page not in self._new:
                    moved.append((page, number))
                page.number = heapq.heappop(self._free)
                self._pages[page.number] = page
            self._free = [number for number in self._free if number < self.num_pages]
            heapq.heapify(self._free)
            self._high = self.num_pages
        self._new.clear()
        return moved

    # -- life of a page ------------------------------------------------------------

    def take(self) -> Page:
        """Take a free page. Raises: RuntimeError if there is none."""
        if self.num_free <= 0:
            raise RuntimeError("no page is free")
        page = Page(heapq.heappop(self._free))
        self._pages[page.number] = page
        self._new.add(page)
        return page

    def acquire(self, page: Page) -> None:
        """Add a reference to a cached or used page."""
        page.refs += 1
        self._cached.pop(page, None)

    def release(self, page: Page) -> None:
        """Undo one `take` or `acquire`. Without references, a page with names is cached."""
        page.refs -= 1
        if page.refs:
            return
        if page.names:
            self._cached[page] = None
            page.last_used = next(self._clock)
        else:
            self._free_page(page)

    @property
    def oldest_use(self) -> float:
        """When the page that `pop_oldest` would return was last used; infinity if there is
        none."""
        return next(iter(self._cached)).last_used if self._cached else float("inf")

    def pop_oldest(self) -> Page:
        """Free the least recently used cached page. Raises: KeyError if there is none."""
        page, _ = self._cached.popitem(last=False)
        for block_hash in page.names.values():
            self._forget(block_hash, page)
        self._free_page(page)
        return page

    def clear(self) -> None:
        """Forget all pages."""
        for block_hash in self._index:
            self._changes.record(block_hash, added=False)
        self._index.clear()
        for kept in (self._pages, self._new, self.fixed, self._cached, self._free):
            kept.clear()
        self.num_pages = self._high = 0

    # -- names ---------------------------------------------------------------------

    def name(self, page: Page, end: int, block_hash: bytes, *, stored: bool = False) -> bool:
        """Record that ``page``, up to ``end``, holds the end of the prefix with this hash. Return
        whether no other page did."""
        if page.names.get(end) == block_hash:
            return False
        page.names[end] = block_hash
        known = self._index.setdefault(block_hash, [])
        known.append(page)
        if end == self.page_tokens and self.content(block_hash) is None:
            page.content = self._content_of(page, end, stored=stored)
        if len(known) == 1:
            self._changes.record(block_hash, added=True)
        return len(known) == 1

    def name_part(self, page: Page, *, stored: bool = False) -> PageContent | None:
        """Let the kvstore keep what ``page`` has, although it is not full. Return the content, None
        if there is none, or another page has the same."""
        end = page.named_end
        if end in (0, self.page_tokens) or self.content(page.names[end]) is not None:
            return None
        page.content = self._content_of(page, end, stored=stored)
        return page.content

    def _content_of(self, page: Page, end: int, *, stored: bool) -> PageContent:
        return PageContent(next(self._clock), page.names[end], stored, page=page, end=end)

    def withdraw(self, block_hash: bytes) -> list[PageContent]:
        """Forget what holds the prefix with this hash, because the content is wrong. Return the
        contents that do not exist."""
        lost = []
        for page in list(self._index.get(block_hash, ())):
            end = next(end for end, name in page.names.items() if name == block_hash)
            del page.names[end]
            self._forget(block_hash, page)
            if page.content is not None and page.content.hash == block_hash:
                lost.append(page.content)
                page.content = None
            if not page.refs and not page.names:
                del self._cached[page]
                self._free_page(page)
        return lost

    def content(self, block_hash: bytes) -> PageContent | None:
        """Return the content that ends with the block with this hash."""
        found = (page.content for page in self._index.get(block_hash, ()))
        return next((one for one in found if one is not None and one.hash == block_hash), None)

    def full_page(self, block_hash: bytes) -> Page | None:
        """Return a page that is full and whose last block has this hash."""
        pages = [p for p in self._index.get(block_hash, ()) if p.named_end == self.page_tokens]
        return max(pages, key=lambda page: page.refs > 0, default=None)

    def part_of_page(self, block_hash: bytes, end: int) -> Page | None:
        """Return a page that holds, up to ``end``, the end of the prefix with this hash. If
        possible, one that nobody refers to and that has no name behind it."""
        pages = self._index.get(block_hash, ())
        return max(pages, key=lambda page: not page.refs and page.named_end == end, default=None)

    def match(self, hashes: Sequence[bytes], first: int = 0) -> CachedPrefix:
        """Return the pages with the blocks of a prefix whose pages before number ``first`` are
        known: full pages without a gap, and a part of the one after them."""
        size = self.page_tokens // self._block_size
        pages: list[Page] = []
        start = first * size
        while start + size <= len(hashes):
            page = self.full_page(hashes[start + size - 1])
            if page is None:
                break
            pages.append(page)
            start += size
        for number in range(min(start + size, len(hashes)) - 1, start - 1, -1):
            end = (number + 1 - start) * self._block_size
            if end < self.page_tokens and (part := self.part_of_page(hashes[number], end)):
                return CachedPrefix(pages, part, number + 1)
        return CachedPrefix(pages, None, start)

    def touch(self, match: CachedPrefix) -> None:
        """Mark pages as the most recently used, the first of them last of all, because a chain is
        useless without its head."""
        for page in reversed([*match.pages, *filter(None, [match.part])]):
            if page in self._cached:
                self._cached.move_to_end(page)
                page.last_used = next(self._clock)

    def take_changes(self) -> tuple[list[bytes], list[bytes]]:
        """Return the hashes that were added and removed since the last call, net."""
        return self._changes.take()

    def faults(self) -> Iterator[str]:
        """Yield inconsistencies of the pool, for `check_integrity`."""
        if self._pages.keys() & set(self._free):
            yield f"pages {sorted(self._pages.keys() & set(self._free))} are free and in use"
        if sorted((*self._pages, *self._free)) != list(range(self._high)):
            yield f"of {self._high} pages, some are neither free nor in use"
        for number, page in self._pages.items():
            if page.number != number or number >= self.num_pages:
                yield f"page {page.number} of {self.num_pages} is kept as {number}"
            if (page in self._cached) != (not page.refs) or (not page.refs and not page.names):
                yield f"page {number} with {page.refs} references is in the wrong list"
            if any(page not in self._index.get(name, ()) for name in page.names.values()):
                yield f"page {number} cannot be found by its names"
        if not self._cached.keys() <= set(self._pages.values()):
            yield "a cached page does not exist"
        for block_hash, pages in self._index.items():
            if not pages or any(block_hash not in page.names.values() for page in pages):
                yield f"block {block_hash.hex()} leads to pages without it"
            if not {*pages} <= set(self._pages.values()):
                yield f"block {block_hash.hex()} leads to a page that is free"

    def _free_page(self, page: Page) -> None:
        del self._pages[page.number]
        self._new.discard(page)
        heapq.heappush(self._free, page.number)

    def _forget(self, block_hash: bytes, page: Page) -> None:
        pages = self._index[block_hash]
        pages.remove(page)
        if not pages:
            del self._index[block_hash]
            self._changes.record(block_hash, added=False)
