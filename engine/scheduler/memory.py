"""Memory: one ledger in bytes for pages, slots and snapshots, and evictions to make room."""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Iterator
from itertools import count
from typing import NamedTuple

from engine.plan import BlockName, CopyPage, Export, Slot, Table, Unpack
from engine.scheduler.config import SchedulerConfig
from engine.scheduler.pools.ledger import Ledger
from engine.scheduler.pools.page_pool import Page, PagePool, Storable
from engine.scheduler.pools.snapshot_pool import Snapshot, SnapshotPool
from engine.scheduler.sequences.sequence import Sequence
from engine.scheduler.store_backlog import StoreBacklog

FIRST_TOKENS = 4096
"""Positions of the first pages that are allocated."""
GROWTH = 1 / 2
"""Pages added when there are too few, as a fraction of them: a GPU copies all of them each time. If
a prompt needs more, as many as it needs."""
RESERVED_TOKENS = 512
"""Positions that are kept for the answer of each running sequence when another one is admitted."""
INSERTS_AHEAD = 4
"""Max pages that take the memory of fetched ones before these are inserted, in plans' inserts. So
much is in memory twice for a moment; otherwise each plan would change the number of pages."""
UNPACKED_SHARE = 1 / 4
"""Max fraction of the memory for unpacked rows."""
UNPACKED_TOKENS = 512
"""Least room of an unpacked row. It grows by half, so that few plans change it."""


class MemoryChanges(NamedTuple):
    """The operations of a plan that memory decides."""

    exports_first: tuple[Export, ...]
    evictions: tuple[int, ...]
    moved_pages: tuple[CopyPage, ...]
    num_pages: int
    tables: tuple[Table, ...]
    copies: tuple[CopyPage, ...]
    unpacked: tuple[Unpack, ...]
    names: tuple[BlockName, ...]  # of ``exports_first``


class Memory:
    """Pages, slots and snapshots under one ledger, and their changes for the plan being built."""

    def __init__(self, config: SchedulerConfig) -> None:
        self._config = config
        self._evicting_exports = config.uses_store and config.store_policy == "evict_only"
        self.ledger = Ledger(config.limit_bytes + config.beside_bytes)
        self.ledger.reserve(config.beside_bytes)
        self._clock = count()
        self.pages = PagePool(config.page_tokens, config.block_size, self._clock)
        self.snapshots = SnapshotPool(config.max_snapshots, self._clock)
        self._free_slots = list(range(config.completion_batch_size))
        self.used_slots: set[Slot] = set()
        self.holders: dict[Sequence, None] = {}
        """The sequences with pages, including finished ones in an open pass."""
        self.fetch_reservations: dict[Sequence, int] = {}
        """Bytes that are fetched from the kvstore, or fetched and not inserted yet, by sequence."""
        self.unpacked_bytes: dict[Sequence, int] = {}  # of their unpacked rows
        self._ahead: tuple[Sequence, int] | None = None
        """A sequence with such pages, and how many. One at a time."""
        self.gather_bytes = 0  # temporary arrays while passes gather pages
        self.pass_bytes = 0  # activations of passes in progress
        self._largest_pass_bytes = 0
        self.withdrawn_bytes = 0  # between `withdraw` and `release_withdrawn`
        self.backlog = StoreBacklog(config)
        self._tried: dict[Sequence, int] = {}
        """The positions for which there was, or was not, room for an unpacked row."""
        self._sent_bytes: dict[Sequence, int] = {}  # `unpacked_bytes` after the last plan
        self._sent_pages = 0  # number of pages in the last plan that had one
        self.unfixed: list[Page] = []  # of passes that have ended since the last plan
        self._held: list[Page] = []  # referred to by operations of the plan being built
        self._exports_first: list[Export] = []
        self._exported_names: list[BlockName] = []
        self._evictions: list[int] = []
        self._changed: dict[Sequence, int] = {}  # the first entry of their tables that changed
        self._copies: list[tuple[Page, Page, int]] = []

    @property
    def capacity(self) -> int:
        """The length in tokens of a sequence that has all memory to itself."""
        return self._config.capacity_within(self.ledger.limit_bytes - self._config.beside_bytes)

    def used_bytes(self, *, of_background: bool) -> int:
        """Return the bytes held by running sequences: their pages, without those that only
        background sequences have unless ``of_background``; what is in flight; and drafts. Cached
        pages, free ones and unpacked rows are available to others."""
        used = {
            page
            for seq in self.holders
            if of_background or not seq.is_background
            for page in (() if seq.is_finished else seq.pages)
        }
        pinned = len(self.snapshots) - self.snapshots.num_evictable
        pinned_bytes = pinned * self._config.state_bytes + self.withdrawn_bytes
        used_bytes = len(used) * self._config.page_bytes + self.pass_bytes
        return used_bytes + pinned_bytes + self._config.draft_bytes

    # -- slots and pages of sequences ----------------------------------------------

    def take_slot(self) -> Slot | None:
        """Take a slot, with room for its state. Return None if there is none."""
        if not self._free_slots or not self._make_room(self._config.state_bytes):
            return None
        self.ledger.reserve(self._config.state_bytes)
        slot = heapq.heappop(self._free_slots)
        self.used_slots.add(slot)
        return slot

    def release_slot(self, slot: Slot) -> None:
        """Free ``slot``. Raises: KeyError if it is free."""
        self.used_slots.remove(slot)
        heapq.heappush(self._free_slots, slot)
        self.ledger.release(self._config.state_bytes)

    def pages_for(self, tokens: int) -> int:
        return -(-tokens // self._config.page_tokens) if self._config.keeps_kv else 0

    def available_bytes(self) -> int:
        """Return the bytes that nobody holds, including those of everything that is cached."""
        pages = self.pages.num_free + self.pages.num_cached
        spare = pages * self._config.page_bytes - self.ledger.shortfall(0)
        spare += self.snapshots.num_evictable * self._config.state_bytes
        return spare + sum(self.unpacked_bytes.values()) + sum(self.fetch_reservations.values())

    def needed_bytes(self, seq: Sequence, pages: int) -> int:
        """Return how many bytes ``seq``, which is new, takes, of whose pages it lacks ``pages``."""
        gathers = max(0, self._gathers(seq, len(seq.token_ids)) - self.gather_bytes)
        return pages * self._config.page_bytes + gathers + self._config.state_bytes

    def begin(self, seq: Sequence) -> None:
        """Let ``seq``, which has a slot now, have pages."""
        self.holders[seq] = None
        seq.capacity = 0 if self._config.keeps_kv else self._config.context_length

    def reserved_bytes(self) -> int:
        """Return the bytes for the prompts of running sequences and the next tokens of their
        answers, beyond what they have."""
        pages = 0
        lengths = []  # in pages
        for seq in self.holders:
            if not seq.is_finished:
                tokens = min(seq.max_positions, len(seq.token_ids) + RESERVED_TOKENS)
                pages += max(0, self.pages_for(tokens) - len(seq.pages))
                lengths.append(self.pages_for(tokens))
        gathers = max(0, self._config.gather_bytes(lengths) - self.gather_bytes)
        return pages * self._config.page_bytes + gathers

    def grow(self, seq: Sequence, tokens: int, *, evicts: bool = True) -> bool:
        """Give ``seq`` pages for so many positions. Return False, with nothing changed, if there is
        no room, or none without evictions."""
        missing = self.pages_for(tokens) - len(seq.pages)
        if missing > 0:
            ahead = self.pages_for(len(seq.token_ids)) - len(seq.pages)
            gathers = self._gathers(seq, tokens)
            if not self._make_pages(missing, gathers, ahead=ahead, evicts=evicts):
                return False
            self.replace(seq, len(seq.pages), [self.pages.take() for _ in range(missing)])
        return True

    def replace(self, seq: Sequence, first: int, pages: list[Page]) -> None:
        """Release the pages of ``seq`` from number ``first`` on, and append ``pages``, of which it
        has a reference each."""
        for page in reversed(seq.pages[first:]):
            self.pages.release(page)
        seq.pages[first:] = pages
        seq.capacity = len(seq.pages) * self._config.page_tokens
        self._changed[seq] = min(first, self._changed.get(seq, first))

    def copy_of(self, page: Page, end: int) -> Page | None:
        """Return a new page with the positions of ``page`` up to ``end`` and their names, None if
        there is no room for it."""
        self.pages.acquire(page)
        if not self._make_pages(1):
            self.pages.release(page)
            return None
        target = self.pages.take()
        for named, block_hash in page.names.items():
            if named <= end:
                self.pages.name(target, named, block_hash)
        self._copies.append((page, target, end))
        self.hold(target)
        self.release_later(page)
        return target

    def hold(self, page: Page) -> None:
        """Keep ``page`` as it is until the plan is built, because it has an operation with it."""
        self.pages.acquire(page)
        self.release_later(page)

    def release_later(self, page: Page) -> None:
        """Undo one `PagePool.take` or `PagePool.acquire` once the plan is built."""
        self._held.append(page)

    @property
    def has_pages_after_plan(self) -> bool:
        """Whether pages are kept only until the plan is built, such as those of a sequence that was
        preempted in the plan that inserts them."""
        return any(page.refs == held for page, held in Counter(self._held).items())

    def fix(self, seq: Sequence) -> None:
        """Keep the numbers of its pages, because ``seq`` is in a pass that knows them."""
        for page in seq.pages:
            page.passes += 1
        self.pages.fixed.update(seq.pages)

    def unfix(self, seq: Sequence) -> None:
        """Undo `fix`, after the plan that is being built: it may complete the pass."""
        self.unfixed += seq.pages

    def release(self, seq: Sequence) -> None:
        """Release the pages of ``seq``, and its unpacked row. Its head was used last of all."""
        if self._config.stores_parts and len(seq.pages) > 1:
            self._keep_part(seq.pages[-1])
        for page in reversed(seq.pages):
            self.pages.release(page)
        seq.pages.clear()
        seq.capacity = 0
        self.holders.pop(seq, None)
        self._changed.pop(seq, None)
        self._sent_bytes.pop(seq, None)
        self._tried.pop(seq, None)
        self.ledger.release(self.unpacked_bytes.pop(seq, 0))

    def _keep_part(self, page: Page) -> None:
        """Let the kvstore have ``page``, the last one of a sequence that leaves it."""
        before = page.content
        content = None if page.refs > 1 else self.pages.name_part(page)
        if content is not None:
            if before is not None:
                self.backlog.discard(before)
            if self._config.writes_through:
                self.backlog.add([content])

    def reserve_gathers(self, seq: Sequence, tokens: int) -> bool:
        """Reserve memory for gathers once ``seq`` has so many positions. Return False if there is
        no room."""
        return self._reserve_gathers(self._gathers(seq, tokens))

    def _reserve_gathers(self, gathers: int, *, keep: int = 0) -> bool:
        """Have ``gathers`` bytes reserved, and leave ``keep`` pages free or cached."""
        more = gathers - self.gather_bytes
        if more > 0:
            if not self._make_room(more, keep=keep):
                return False
            self.ledger.reserve(more)
            self.gather_bytes += more
        return True

    def update_gathers(self) -> None:
        """Release what gathers of sequences that have ended took."""
        gathers = self._config.gather_bytes([len(seq.pages) for seq in self.holders])
        self.ledger.release(self.gather_bytes - gathers)
        self.gather_bytes = gathers

    # -- unpacked rows -------------------------------------------------------------

    def unpack(self, seq: Sequence, tokens: int) -> None:
        """Keep the values of ``seq`` outside of its pages too, for ``tokens`` positions, if that
        leaves room for the running sequences. Otherwise drop them, until it has more positions."""
        token_bytes = self._config.unpacked_token_bytes
        had = self.unpacked_bytes.get(seq, 0)
        if tokens * token_bytes <= had or self._tried.get(seq) == tokens:
            return
        self._tried[seq] = tokens
        limit = int(self.ledger.limit_bytes * UNPACKED_SHARE)
        limit -= sum(self.unpacked_bytes.values()) - had
        available = self.available_bytes() - sum(self.unpacked_bytes.values()) + had
        limit = min(limit, available - self.reserved_bytes())
        generous = min(seq.max_positions, max(UNPACKED_TOKENS, tokens + tokens // 2))
        for room in (generous, tokens):
            size = room * token_bytes
            if size <= limit and self._make_room(size - had, drops=False):
                self.ledger.reserve(size - had)
                self.unpacked_bytes[seq] = size
                return
        self.ledger.release(self.unpacked_bytes.pop(seq, 0))

    # -- passes and fetches --------------------------------------------------------

    def reserve_pass(self, size_bytes: int) -> bool:
        """Reserve memory for the activations of a pass. Return False if there is no room."""
        if not size_bytes:
            return True
        if not self._make_room(size_bytes):
            return False
        self.ledger.reserve(size_bytes)
        self.pass_bytes += size_bytes
        self._largest_pass_bytes = max(self._largest_pass_bytes, self.pass_bytes)
        return True

    def release_pass(self, size_bytes: int) -> None:
        """Release what `reserve_pass` reserved."""
        self.pass_bytes -= size_bytes
        self.ledger.release(size_bytes)

    def reserve_fetch(self, seq: Sequence, pages: int) -> int | None:
        """Reserve memory for up to ``pages`` pages of ``seq`` that will be fetched from the
        kvstore, and for a state if the model has one.

        Returns the number of pages, None if nothing can be fetched. The memory stays reserved
        until `insert_page` and `add_fetched_snapshot` use it or `release_fetch` is called. If
        memory runs out, it is taken away, and ``seq`` computes the positions.
        """
        config = self._config
        free = self.pages.num_removable * config.page_bytes - self.ledger.shortfall(0)
        free += self.snapshots.num_evictable * config.state_bytes
        room = (free - config.state_bytes) // config.page_bytes
        if room < (0 if config.state_bytes else 1):
            return None
        pages = min(pages, room)
        size = pages * config.page_bytes + config.state_bytes
        if not self._make_room(size):
            return None
        self.ledger.reserve(size)
        self.fetch_reservations[seq] = size
        return pages

    def release_fetch(self, seq: Sequence, keep: int = 0) -> int:
        """Release what `reserve_fetch` reserved for ``seq``, except ``keep`` bytes. Returns how
        many bytes are still reserved."""
        had = self.fetch_reservations.pop(seq, 0)
        left = min(had, max(keep, 0))
        self.ledger.release(had - left)
        if left:
            self.fetch_reservations[seq] = left
        return left

    def spend_fetch(self, seq: Sequence, size_bytes: int) -> None:
        """Release up to ``size_bytes`` of what `reserve_fetch` reserved for ``seq``."""
        self.release_fetch(seq, keep=self.fetch_reservations.get(seq, 0) - size_bytes)

    def pages_ahead(self, seq: Sequence) -> int:
        """Return how many pages have the memory of what was fetched for ``seq`` already."""
        return self._ahead[1] if self._ahead is not None and self._ahead[0] is seq else 0

    def spend_page(self, seq: Sequence) -> None:
        """Release the memory of a page that was fetched for ``seq``."""
        if ahead := self.pages_ahead(seq):
            self._ahead = (seq, ahead - 1) if ahead > 1 else None
        else:
            self.spend_fetch(seq, self._config.page_bytes)

    def drop_fetch(self, seq: Sequence) -> None:
        """Drop what was fetched for ``seq``, and release its memory."""
        if self.pages_ahead(seq):
            self._ahead = None
        seq.fetch.drop()
        self.release_fetch(seq)

    def page_for_fetched(self, seq: Sequence, number: int) -> Page | None:
        """Return a page for page ``number`` of the prompt of ``seq``, which was fetched for it, in
        the memory reserved for it.

        Each page spends its own memory. While that is too little for the others too, cached pages
        are evicted instead: otherwise the number of pages would change in every plan. The prefix of
        ``seq``, which was used last, may be among those that are cached. Where there are none, the
        pages of the next plans are made at once."""
        config = self._config
        self.spend_page(seq)
        ahead = self.pages_for(len(seq.token_ids)) - number
        while self.pages.num_cached > number and self._lacks_pages(ahead):
            self._evict_oldest()
        more = min(len(seq.fetch.payloads), INSERTS_AHEAD * config.max_inserts)
        if more and self._ahead is None and self._lacks_pages(ahead):
            self.spend_fetch(seq, more * config.page_bytes)
            self._ahead = seq, more
        return self.pages.take() if self._make_pages(1, ahead=ahead) else None

    def _lacks_pages(self, number: int) -> bool:
        """Return whether no page is free, nor memory for so many."""
        short_bytes = self.ledger.shortfall(number * self._config.page_bytes)
        return not self.pages.num_free and short_bytes > 0

    # -- snapshots -----------------------------------------------------------------

    def add_fetched_snapshot(self, block_hash: bytes, seq: Sequence) -> Snapshot | None:
        """Like `add_snapshot`, for one fetched for ``seq``, in the memory reserved for it."""
        self.spend_fetch(seq, self._config.state_bytes)
        return self.add_snapshot(block_hash, stored=True)

    def add_snapshot(self, block_hash: bytes | None, *, stored: bool = False) -> Snapshot | None:
        """Add a pinned snapshot, a private one without a hash. Return None if there is no room."""
        if self.withdrawn_bytes:  # some of them may be snapshots that still exist
            return None
        if self.snapshots.full:
            if not self.snapshots.num_evictable:
                return None
            self._evict_snapshot()
        if not self._make_room(self._config.state_bytes):
            return None
        self.ledger.reserve(self._config.state_bytes)
        if block_hash is None:
            return self.snapshots.add_private()
        return self.snapshots.add(block_hash, stored=stored)

    def drop_snapshot(self, snapshot: Snapshot) -> None:
        """Evict ``snapshot``, even if it is only about to be saved."""
        self.snapshots.remove(snapshot)
        self.backlog.discard(snapshot)
        self.ledger.release(self._config.state_bytes)
        self._evictions.append(snapshot.id)

    def withdraw(self, snapshot: Snapshot) -> bool:
        """Remove ``snapshot`` from its pool, and leave its bytes to `release_withdrawn`. Return
        False if it is already gone."""
        if not self.snapshots.holds(snapshot):
            return False
        self.snapshots.remove(snapshot)
        self.forget_stored(snapshot)
        self.withdrawn_bytes += self._config.state_bytes
        return True

    def release_withdrawn(self, snapshot: Snapshot) -> None:
        """Release a withdrawn snapshot once its step is done. Executors may have saved it, or only
        those of other ranks, or none."""
        self.withdrawn_bytes -= self._config.state_bytes
        self.ledger.release(self._config.state_bytes)
        self._evictions.append(snapshot.id)

    # -- the kvstore ---------------------------------------------------------------

    def next_id(self) -> int:
        """Return an id for a block that is inserted."""
        return next(self._clock)

    def withdraw_name(self, block_hash: bytes) -> None:
        """Forget the pages with the end of the prefix with this hash: their content is wrong."""
        for content in self.pages.withdraw(block_hash):
            self.forget_stored(content)

    def forget_stored(self, storable: Storable) -> None:
        """Do not send ``storable`` to the kvstore, also if it is on its way here."""
        self.backlog.discard(storable)
        self.backlog.ignore_export(storable.id)

    def on_not_stored(self, block_hash: bytes, *, is_snapshot: bool) -> None:
        """Record that a page or a snapshot sent to the kvstore was not stored."""
        known: Storable | None = self.snapshots.get(block_hash)
        if not is_snapshot:
            known = self.pages.content(block_hash)
        if known is not None:
            known.stored = False
            if self._config.writes_through:
                self.backlog.add([known])

    def evict_all(self) -> None:
        """Evict everything possible, permanently: nothing is sent to the kvstore."""
        while self.pages.num_cached:
            page = self.pages.pop_oldest()
            if page.content is not None:
                self.backlog.discard(page.content)
        while self.snapshots.num_evictable:
            snapshot = self.snapshots.pop_oldest()
            self.backlog.discard(snapshot)
            self._evictions.append(snapshot.id)
            self.ledger.release(self._config.state_bytes)
        self.backlog.ignore_exports()

    def findable_hashes(self) -> list[bytes]:
        """Return the hashes of the prefixes from which sequences may start, for the router. If
        state is needed, these are the snapshots' hashes, because pages are useless without one."""
        if self._config.reuses_states:
            return self.snapshots.published_hashes()
        return self.pages.hashes

    def take_changes(self) -> tuple[list[bytes], list[bytes]]:
        """Return what was added to `findable_hashes` and removed since the last call."""
        pages, states = self.pages.take_changes(), self.snapshots.take_changes()
        return states if self._config.reuses_states else pages

    # -- plans ---------------------------------------------------------------------

    def take_plan(self) -> MemoryChanges:
        """Return the operations for the plan that is built now. The numbers of pages do not change
        after that until the next plan."""
        for page in self._held:
            self.pages.release(page)
        for page in self.unfixed:
            page.passes -= 1
        self.pages.fixed -= {page for page in self.unfixed if not page.passes}
        moved = self.pages.compact()
        pages = {page for page, _ in moved}
        for seq in self.holders if pages else ():
            first = next((n for n, page in enumerate(seq.pages) if page in pages), None)
            if first is not None:
                self._changed[seq] = min(first, self._changed.get(seq, first))
        resized = self.pages.num_pages if self.pages.num_pages != self._sent_pages else 0
        self._sent_pages = self.pages.num_pages
        size = self._config.page_tokens
        changes = MemoryChanges(
            exports_first=tuple(self._exports_first),
            evictions=tuple(self._evictions),
            moved_pages=tuple(CopyPage(number, page.number, size) for page, number in moved),
            num_pages=resized,
            tables=tuple(
                Table(seq.slot, first, tuple(page.number for page in seq.pages[first:]))
                for seq, first in self._changed.items()
                if seq.slot is not None
            ),
            copies=tuple(
                CopyPage(source.number, target.number, end) for source, target, end in self._copies
            ),
            unpacked=tuple(self._take_unpacked()),
            names=tuple(self._exported_names),
        )
        self._forget_plan()
        return changes

    def _take_unpacked(self) -> Iterator[Unpack]:
        """Yield the changes of unpacked rows since the last plan."""
        now, before = self.unpacked_bytes, self._sent_bytes
        for seq in before | now:
            if now.get(seq) != before.get(seq) and seq.slot is not None:
                yield Unpack(seq.slot, now.get(seq, 0) // self._config.unpacked_token_bytes)
        self._sent_bytes = dict(now)

    def clear(self) -> None:
        """Forget everything, because the executor has lost it too."""
        for seq in self.holders:
            seq.pages.clear()
            seq.capacity = 0
        for seq in self.fetch_reservations:
            seq.fetch.drop()
        for kept in (self.pages, self.snapshots, self.backlog):
            kept.clear()
        for held in (self.holders, self.fetch_reservations, self.unpacked_bytes, self.used_slots):
            held.clear()
        self._sent_bytes.clear()
        self._tried.clear()
        self._free_slots = list(range(self._config.completion_batch_size))
        self._ahead = None
        self.withdrawn_bytes = self.gather_bytes = self._sent_pages = 0
        self._largest_pass_bytes = 0
        self.ledger.used_bytes = self._config.beside_bytes
        self._forget_plan()

    def ran_out(self) -> None:
        """Use less memory, but at least what a sequence of one page needs."""
        config = self._config
        least = config.page_bytes + config.page_tokens * config.gather_token_bytes
        least += config.states_bytes + config.beside_bytes
        self.ledger.ran_out(least, config.beside_bytes)

    def _forget_plan(self) -> None:
        self.unfixed.clear()
        self._held.clear()
        self._exports_first.clear()
        self._exported_names.clear()
        self._evictions.clear()
        self._changed.clear()
        self._copies.clear()

    # -- making room ---------------------------------------------------------------

    def _make_pages(
        self, number: int, gathers: int = 0, *, ahead: int = 0, evicts: bool = True
    ) -> bool:
        """Have ``number`` free pages, and ``gathers`` bytes reserved for gathers. If pages are
        added for that, there are ``ahead`` free ones, where memory allows. Return False, with
        nothing changed, if that is impossible."""
        more = max(0, gathers - self.gather_bytes)
        size = self._config.page_bytes
        lacking = number - self.pages.num_free
        shortfall = more + lacking * size + self.ledger.shortfall(0)
        if not evicts and more + max(0, lacking) * size + self.ledger.shortfall(0) > 0:
            return False
        if shortfall > self._cached_bytes() + self._droppable_bytes():
            return False
        if not self._reserve_gathers(gathers, keep=number):
            return False
        while (lacking := number - self.pages.num_free) > 0:
            kept_bytes = max(0, self._largest_pass_bytes - self.pass_bytes)
            if self._add_pages(lacking, kept_bytes if evicts else 0, ahead):
                continue
            if self._evict_oldest():
                continue
            if not self._add_pages(lacking, 0) and not self._drop_one():
                return False
        return True

    def _add_pages(self, lacking: int, kept_bytes: int, ahead: int = 0) -> bool:
        """Add ``lacking`` pages or more, so that ``ahead`` are free, or as many as there is room
        for, which leaves ``kept_bytes``: activations of passes need them again."""
        had, size = self.pages.num_pages, self._config.page_bytes
        first = FIRST_TOKENS // self._config.page_tokens
        wanted = max(lacking, ahead - self.pages.num_free, first - had, int(had * GROWTH))
        added = min(wanted, (-self.ledger.shortfall(0) - kept_bytes) // size)
        if added <= 0:
            return False
        self.ledger.reserve(added * size)
        self.pages.resize(had + added)
        return True

    def _make_room(self, size_bytes: int, *, keep: int = 0, drops: bool = True) -> bool:
        """Make room for ``size_bytes`` that are not pages, and leave ``keep`` pages free or cached;
        False, with nothing changed, if that is impossible.

        Free pages go first, then the least recently used cached pages and snapshots, then unpacked
        rows, then what is being fetched for the last sequences.
        """
        size = self._config.page_bytes
        removable = max(0, self.pages.num_removable - keep)
        reclaimable = removable * size + self.snapshots.num_evictable * self._config.state_bytes
        if drops:
            reclaimable += self._droppable_bytes()
        if self.ledger.shortfall(size_bytes) > reclaimable:
            return False
        while (shortfall := self.ledger.shortfall(size_bytes)) > 0:
            removable = max(0, self.pages.num_removable - keep)
            fewer = min(-(-shortfall // size), self.pages.num_free, removable)
            if fewer > 0:
                self.pages.resize(self.pages.num_pages - fewer)
                self.ledger.release(fewer * size)
            elif not self._evict_oldest(pages=removable > 0):
                self._drop_one()
        return True

    def _evict_oldest(self, *, pages: bool = True) -> bool:
        """Evict the least recently used page or snapshot. Return False if there is none."""
        oldest = self.pages.oldest_use if pages else float("inf")
        if oldest == self.snapshots.oldest_use:  # there is neither
            return False
        if oldest > self.snapshots.oldest_use:
            self._evict_snapshot()
            return True
        page = self.pages.pop_oldest()
        if page.content is not None and self._is_exported(page.content, named=True):
            self._exports_first.append(page.content.export)
        return True

    def _evict_snapshot(self) -> None:
        snapshot = self.snapshots.pop_oldest()
        if self._is_exported(snapshot, named=self.snapshots.is_published(snapshot)):
            self._exports_first.append(snapshot.export)
        self._evictions.append(snapshot.id)
        self.ledger.release(self._config.state_bytes)

    def _is_exported(self, storable: Storable, *, named: bool) -> bool:
        """Return whether ``storable``, which is evicted, is sent to the kvstore."""
        waited = self.backlog.discard(storable)
        wanted = waited or (self._evicting_exports and not storable.stored and named)
        if not wanted or not self.backlog.has_room_for_evicted(storable):
            return False
        self.backlog.begin_exports([storable])
        self._exported_names.append(storable.name)
        return True

    def _drop_one(self) -> bool:
        """Drop an unpacked row, or else a fetch. Return False if there is neither."""
        if rows := self._droppable_rows():
            last = max(rows, key=lambda seq: seq.order)
            self.ledger.release(self.unpacked_bytes.pop(last))
        elif self.fetch_reservations:
            self.drop_fetch(max(self.fetch_reservations, key=lambda seq: seq.order))
        else:
            return False
        return True

    def _cached_bytes(self) -> int:
        pages_bytes = self.pages.num_cached * self._config.page_bytes
        return pages_bytes + self.snapshots.num_evictable * self._config.state_bytes

    def _droppable_bytes(self) -> int:
        rows = sum(self.unpacked_bytes[seq] for seq in self._droppable_rows())
        return rows + sum(self.fetch_reservations.values())

    def _droppable_rows(self) -> list[Sequence]:
        """Return the sequences whose unpacked rows no open pass uses."""
        return [seq for seq in self.unpacked_bytes if not any(page.passes for page in seq.pages)]

    def _gathers(self, seq: Sequence, tokens: int) -> int:
        """Return what gathers take once ``seq`` has so many positions."""
        lengths = [len(other.pages) for other in self.holders if other is not seq]
        return self._config.gather_bytes([*lengths, self.pages_for(tokens)])
