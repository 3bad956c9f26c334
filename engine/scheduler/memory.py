"""Memory: one ledger in bytes, and evictions to make room."""

from __future__ import annotations

from itertools import count, starmap

from engine.plan import BlockName, Evict, ResizeSlab, SlabSpec, Slot
from engine.scheduler.config import SchedulerConfig
from engine.scheduler.pools.block_pool import Block, BlockPool
from engine.scheduler.pools.ledger import Ledger
from engine.scheduler.pools.slot_table import SlotTable
from engine.scheduler.pools.snapshot_pool import SnapshotPool
from engine.scheduler.sequences.sequence import Sequence
from engine.scheduler.store_backlog import StoreBacklog

SLAB_TOKENS = 4096
"""Approximate number of tokens of all rows of a new slab, if it can grow."""
MAX_SLAB_SHARE = 1 / 8
"""Max fraction of the memory for adding more than one row at once."""
GROWTH = 1 / 2
"""Rows added to a slab, as a fraction of its rows, which are copied each time it grows."""


class Memory:
    """Slots, blocks and snapshots under one ledger, and the evictions and slabs for the plan being
    built."""

    def __init__(self, config: SchedulerConfig) -> None:
        self._config = config
        self._classes = config.capacity_classes()
        self._evicting_exports = config.uses_store and config.store_policy == "evict_only"
        self.ledger = Ledger(config.limit_bytes + config.beside_bytes)
        self.ledger.reserve(config.beside_bytes)
        clock = count()
        self.blocks = BlockPool(clock)
        self.snapshots = SnapshotPool(config.max_snapshots, clock)
        self.slots = SlotTable()
        self.fetch_reservations: dict[Sequence, int] = {}
        """Blocks being fetched from the kvstore, or fetched and not inserted yet, by sequence. A
        state counts as the number of blocks of its size."""
        self.withdrawn_bytes = 0  # between `withdraw` and `settle`
        self.pass_bytes = 0  # activations of passes in progress
        self.evictions: list[Evict] = []
        self.exported_names: list[BlockName] = []  # of those evictions that export
        self.backlog = StoreBacklog(config)
        self.freed_slabs: list[int] = []
        self.new_slabs: list[SlabSpec] = []
        self._resized: dict[int, tuple[int, SlabSpec]] = {}  # rows before this plan, and now

    @property
    def resized_slabs(self) -> list[ResizeSlab]:
        """The slabs whose number of rows this plan changes, shrinking ones first.

        In this order, none of the decisions needs more memory than the ledger has."""
        changed = [(before, now) for before, now in self._resized.values() if before != now.rows]
        changed.sort(key=lambda change: change[1].rows > change[0])
        return [ResizeSlab(now.slab_id, now.rows) for _, now in changed]

    @property
    def smallest_capacity(self) -> int:
        return self._classes[0]

    @property
    def largest_capacity(self) -> int:
        return self._classes[-1]

    @property
    def unevictable_bytes(self) -> int:
        """The bytes held by running sequences: rows in use, and blocks in flight. The free rows of
        their slabs are available to others, and so are activations: with less memory, passes are
        shorter."""
        rows = sum(starmap(self._config.slab_bytes, self.slots.used()))
        blocks = len(self.blocks) - self.blocks.num_evictable
        states = len(self.snapshots) - self.snapshots.num_evictable
        pinned_bytes = blocks * self._config.block_bytes + states * self._config.state_bytes
        return rows + pinned_bytes + self.withdrawn_bytes + self._config.draft_bytes

    def allocate_slot(self, tokens: int) -> tuple[Slot, int] | None:
        """Return a slot for at least ``tokens`` tokens and its capacity, None if there is no room
        now. A slot of a larger class is taken only if it is free and none fits better."""
        fitting = [capacity for capacity in self._classes if capacity >= tokens]
        slot = self.slots.take(fitting[0])
        if slot is None and self._add_rows(fitting[0]):
            slot = self.slots.take(fitting[0])
        if slot is not None:
            return slot, fitting[0]
        for capacity in fitting[1:]:
            slot = self.slots.take(capacity)
            if slot is not None:
                return slot, capacity
        return None

    def reserve_pass(self, size_bytes: int) -> bool:
        """Reserve memory for the activations of a pass. Return False if there is no room."""
        if not size_bytes:
            return True
        if not self._make_room(size_bytes):
            return False
        self.ledger.reserve(size_bytes)
        self.pass_bytes += size_bytes
        return True

    def release_pass(self, size_bytes: int) -> None:
        """Release what `reserve_pass` reserved."""
        self.pass_bytes -= size_bytes
        self.ledger.release(size_bytes)

    def reserve_fetch(self, seq: Sequence, blocks: int) -> int | None:
        """Reserve memory for up to ``blocks`` blocks of ``seq`` that will be fetched from the
        kvstore, and for a state if the model has one.

        Returns the number of blocks, None if nothing can be fetched. The memory stays reserved
        until `add_fetched_block` and `add_fetched_snapshot` use it or `release_fetch` is called. If
        memory runs out, it is taken away, and ``seq`` computes the blocks.
        """
        free = self._empty_bytes() + self._cached_bytes() - self.ledger.shortfall(0)
        room = free // self._config.block_bytes - self._config.state_blocks
        if room < (0 if self._config.state_bytes else 1):
            return None
        blocks = min(blocks, room)
        total = blocks + self._config.state_blocks
        self._make_room(total * self._config.block_bytes)
        self.ledger.reserve(total * self._config.block_bytes)
        self.fetch_reservations[seq] = total
        return blocks

    def release_fetch(self, seq: Sequence, keep: int = 0) -> int:
        """Release what `reserve_fetch` reserved for ``seq``, except ``keep`` blocks. Returns for
        how many blocks memory is still reserved."""
        had = self.fetch_reservations.pop(seq, 0)
        left = min(had, keep)
        self.ledger.release((had - left) * self._config.block_bytes)
        if left:
            self.fetch_reservations[seq] = left
        return left

    def drop_fetched(self, seq: Sequence, number: int) -> None:
        """Drop block ``number`` of what was fetched for ``seq``, if it is there, and release its
        memory."""
        if seq.fetch.payloads.pop(number, None) is not None:
            self.release_fetch(seq, keep=self.fetch_reservations[seq] - 1)

    def drop_fetch(self, seq: Sequence) -> None:
        """Drop what was fetched for ``seq``, and release its memory."""
        seq.fetch.drop()
        self.release_fetch(seq)

    def add_fetched_block(self, block_hash: bytes, seq: Sequence) -> Block | None:
        """Like `add_block`, for a block fetched for ``seq``, in the memory reserved for it."""
        self.release_fetch(seq, keep=self.fetch_reservations.get(seq, 0) - 1)
        return self.add_block(block_hash, stored=True)

    def add_fetched_snapshot(self, block_hash: bytes, seq: Sequence) -> Block | None:
        """Like `add_snapshot`, for one fetched for ``seq``, in the memory reserved for it."""
        had = self.fetch_reservations.get(seq, 0)
        self.release_fetch(seq, keep=max(0, had - self._config.state_blocks))
        return self.add_snapshot(block_hash, stored=True)

    def add_block(self, block_hash: bytes, *, stored: bool = False) -> Block | None:
        """Add a pinned block. Return None if there is no room for it."""
        if not self._make_room(self._config.block_bytes):
            return None
        self.ledger.reserve(self._config.block_bytes)
        return self.blocks.add(block_hash, stored=stored)

    def add_snapshot(self, block_hash: bytes | None, *, stored: bool = False) -> Block | None:
        """Add a pinned snapshot, a private one without a hash. Return None if there is no room."""
        if self.withdrawn_bytes:  # some of them may be snapshots that still exist
            return None
        if self.snapshots.full:
            if not self.snapshots.num_evictable:
                return None
            self.evict_oldest(self.snapshots)
        if not self._make_room(self._config.state_bytes):
            return None
        self.ledger.reserve(self._config.state_bytes)
        if block_hash is None:
            return self.snapshots.add_private()
        return self.snapshots.add(block_hash, stored=stored)

    def on_not_stored(self, block_hash: bytes, *, is_snapshot: bool) -> None:
        """Record that a block or a snapshot sent to the kvstore was not stored."""
        block = (self.snapshots if is_snapshot else self.blocks).get(block_hash)
        if block is not None:
            block.stored = False
            if self._config.writes_through:
                self.backlog.add([block])

    def evict_oldest(self, pool: BlockPool) -> None:
        """Evict the least recently used block of ``pool``, which must have an evictable one."""
        block = pool.pop_oldest()
        named = not block.is_snapshot or self.snapshots.is_published(block)
        waited = self.backlog.discard(block)
        export = waited or (self._evicting_exports and not block.stored and named)
        export = export and self.backlog.has_room_for_evicted(block)
        if export:
            self.backlog.exporting([block])
            self.exported_names.append(block.name)
        self.evictions.append(Evict(block.id, export))
        self.ledger.release(self.bytes_of(block))

    def evict_all(self) -> None:
        """Evict everything possible, permanently: nothing is sent to the kvstore."""
        for pool in (self.blocks, self.snapshots):
            while pool.num_evictable:
                block = pool.pop_oldest()
                self.backlog.discard(block)
                self.evictions.append(Evict(block.id))
                self.ledger.release(self.bytes_of(block))
        self.backlog.lose_exported()

    def drop_snapshot(self, snapshot: Block) -> None:
        """Evict ``snapshot``, even if it is only about to be saved."""
        self.snapshots.remove(snapshot)
        self.backlog.discard(snapshot)
        self.ledger.release(self._config.state_bytes)
        self.evictions.append(Evict(snapshot.id))

    def unpin(self, block: Block) -> None:
        self._pool_of(block).unpin(block)

    def bytes_of(self, block: Block) -> int:
        return self._config.state_bytes if block.is_snapshot else self._config.block_bytes

    def withdraw(self, block: Block) -> bool:
        """Remove ``block`` from its pool, and leave its bytes to `settle`. Return False if it is
        already gone."""
        pool = self._pool_of(block)
        if pool.get(block.hash) is not block:
            return False
        pool.remove(block)
        self.backlog.discard(block)
        self.backlog.lost(block.id)
        self.withdrawn_bytes += self.bytes_of(block)
        return True

    def settle(self, block: Block) -> None:
        """Release a withdrawn block once its step is done. Executors may have saved it, or only
        those of other ranks, or none."""
        self.withdrawn_bytes -= self.bytes_of(block)
        self.ledger.release(self.bytes_of(block))
        self.evictions.append(Evict(block.id))

    def clear(self) -> None:
        """Forget everything, because the executor has lost it too."""
        self.blocks.clear()
        self.snapshots.clear()
        self.slots.clear()
        self.backlog.clear()
        for seq in self.fetch_reservations:
            seq.fetch.drop()
        self.fetch_reservations.clear()
        self.withdrawn_bytes = 0
        self.ledger.used_bytes = self._config.beside_bytes
        self.forget_changes()

    def ran_out(self) -> None:
        """Use less memory, but never less than a single sequence may need."""
        alone_bytes = self._config.slab_bytes(1, self.largest_capacity) + self._config.beside_bytes
        self.ledger.ran_out(alone_bytes)

    def findable_hashes(self) -> list[bytes]:
        """Return the hashes of the prefixes from which sequences may start, for the router. If
        state is needed, these are the snapshots' hashes, because blocks are useless without one."""
        if self._config.reuses_states:
            return self.snapshots.published_hashes()
        return [block.hash for block in self.blocks]

    def take_changes(self) -> tuple[list[bytes], list[bytes]]:
        """Return what was added to `findable_hashes` and removed since the last call."""
        blocks, states = self.blocks.take_changes(), self.snapshots.take_changes()
        return states if self._config.reuses_states else blocks

    def forget_changes(self) -> None:
        """Forget evictions and slabs, because the plan with them has been built."""
        self.evictions.clear()
        self.exported_names.clear()
        self.freed_slabs.clear()
        self.new_slabs.clear()
        self._resized.clear()

    def _add_rows(self, capacity: int) -> bool:
        """Add a slab of ``capacity``, or rows to the existing one if slots share it."""
        shared = self.slots.slab_of(capacity) if self._config.shares_slabs else None
        had = 0 if shared is None else shared.rows
        row_bytes = self._config.slab_bytes(1, capacity)
        rows = min(
            int(max(SLAB_TOKENS, had * capacity * GROWTH)) // capacity,
            int(self.ledger.limit_bytes * MAX_SLAB_SHARE) // row_bytes,
            self._config.completion_batch_size - had,
        )
        rows = max(1, rows)
        while rows > 1 and not self._affordable(self._config.slab_bytes(rows, capacity)):
            rows //= 2
        size_bytes = self._config.slab_bytes(rows, capacity)
        if not self._make_room(size_bytes):
            return False
        self.ledger.reserve(size_bytes)
        if shared is None:
            self.new_slabs.append(self.slots.add(rows, capacity))
        else:
            self._resize(shared, had + rows)
        return True

    def _resize(self, slab: SlabSpec, rows: int) -> None:
        resized = self.slots.resize(slab, rows)
        if slab in self.new_slabs:
            self.new_slabs[self.new_slabs.index(slab)] = resized
        else:
            before, _ = self._resized.get(slab.slab_id, (slab.rows, slab))
            self._resized[slab.slab_id] = before, resized

    def _shrink(self, size_bytes: int, *, worth_it: bool) -> None:
        """Free the last unused rows of slabs until ``size_bytes`` fit. With ``worth_it``, only if
        that halves a slab, and never the first rows: the rest is copied."""
        for slab in list(self.slots.slabs()) if self._config.shares_slabs else ():
            if self.ledger.shortfall(size_bytes) <= 0:
                return
            rows = max(1, self.slots.rows_to_keep(slab))
            if worth_it:
                rows = max(rows, SLAB_TOKENS // slab.capacity)
            if rows >= slab.rows or (worth_it and rows > slab.rows // 2):
                continue
            self._resize(slab, rows)
            self.ledger.release(self._config.slab_bytes(slab.rows - rows, slab.capacity))

    def _affordable(self, size_bytes: int) -> bool:
        """Return whether ``size_bytes`` cost at most half of the cache: rows that are not needed
        yet do not justify losing all of it."""
        return self.ledger.shortfall(size_bytes) <= self._empty_bytes() + self._cached_bytes() // 2

    def _make_room(self, size_bytes: int) -> bool:
        """Make room for ``size_bytes``; False, with nothing changed, if that is impossible.

        Empty slabs are freed first, then large numbers of unused rows at the end of slabs, then the
        least recently used blocks and snapshots, then all unused rows at the end of slabs, then
        reservations for fetches of the last sequences.
        """
        fetch_bytes = sum(self.fetch_reservations.values()) * self._config.block_bytes
        reclaimable_bytes = self._free_rows_bytes() + self._cached_bytes() + fetch_bytes
        if self.ledger.shortfall(size_bytes) > reclaimable_bytes:
            return False
        while self.ledger.shortfall(size_bytes) > 0 and any(True for _ in self.slots.empty_slabs()):
            slab = self.slots.pop_empty_slab()
            self.ledger.release(self._config.slab_bytes(slab.rows, slab.capacity))
            self.freed_slabs.append(slab.slab_id)
            self._resized.pop(slab.slab_id, None)
        self._shrink(size_bytes, worth_it=True)
        while self.ledger.shortfall(size_bytes) > 0 and self._cached_bytes():
            blocks_first = self.blocks.oldest_use < self.snapshots.oldest_use
            self.evict_oldest(self.blocks if blocks_first else self.snapshots)
        self._shrink(size_bytes, worth_it=False)
        while self.ledger.shortfall(size_bytes) > 0:
            self.drop_fetch(max(self.fetch_reservations, key=lambda seq: seq.order))
        return True

    def _pool_of(self, block: Block) -> BlockPool:
        return self.snapshots if block.is_snapshot else self.blocks

    def _cached_bytes(self) -> int:
        blocks_bytes = self.blocks.num_evictable * self._config.block_bytes
        return blocks_bytes + self.snapshots.num_evictable * self._config.state_bytes

    def _free_rows_bytes(self) -> int:
        """Bytes of the slabs, or of their last rows, that can be freed."""
        if not self._config.shares_slabs:
            return self._empty_bytes()
        return sum(
            self._config.slab_bytes(slab.rows - self.slots.rows_to_keep(slab), slab.capacity)
            for slab in self.slots.slabs()
        )

    def _empty_bytes(self) -> int:
        empty = self.slots.empty_slabs()
        return sum(self._config.slab_bytes(slab.rows, slab.capacity) for slab in empty)
