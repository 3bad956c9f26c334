"""Memory: one ledger in bytes, and what is given up when something new must fit."""

from __future__ import annotations

from itertools import count

from engine.plan import Evict, SlabSpec, Slot
from engine.scheduler.block_pool import Block, BlockPool
from engine.scheduler.config import SchedulerConfig
from engine.scheduler.sequence import Sequence
from engine.scheduler.slot_table import SlotTable
from engine.scheduler.snapshot_pool import SnapshotPool

SLAB_TOKENS = 4096
"""About how many tokens all rows of a slab hold together."""
MAX_SLAB_SHARE = 1 / 8
"""As much of the memory they hold at most, where there is more than one."""


class Ledger:
    """Bytes that are spoken for. They never exceed the limit: reserve before use."""

    def __init__(self, limit_bytes: int) -> None:
        self.limit_bytes = limit_bytes
        self.used_bytes = 0

    def shortfall(self, size_bytes: int) -> int:
        """How many bytes are missing for ``size_bytes`` more; none if not positive."""
        return self.used_bytes + size_bytes - self.limit_bytes

    def reserve(self, size_bytes: int) -> None:
        if self.shortfall(size_bytes) > 0:
            raise RuntimeError(f"{size_bytes} bytes reserved over the limit")
        self.used_bytes += size_bytes

    def release(self, size_bytes: int) -> None:
        self.used_bytes -= size_bytes


class Memory:
    """Slots, blocks and snapshots under one ledger, and the evictions, freed and new slabs that the
    plan in the making must carry for it. ``fetch_reservations`` says for how many blocks there is
    room that come from the kvstore, or have come, for sequences that hold no slot yet."""

    def __init__(self, config: SchedulerConfig) -> None:
        self._config = config
        self._classes = config.capacity_classes()
        self._evicting_exports = config.uses_store and config.store_policy == "evict_only"
        self.ledger = Ledger(config.limit_bytes)
        clock = count()
        self.blocks = BlockPool(clock)
        self.snapshots = SnapshotPool(config.max_snapshots, clock)
        self.slots = SlotTable()
        self.fetch_reservations: dict[Sequence, int] = {}
        self.withdrawn_bytes = 0
        self.evictions: list[Evict] = []
        self.exported: dict[int, bytes] = {}
        self.freed_slabs: list[int] = []
        self.new_slabs: list[SlabSpec] = []

    @property
    def smallest_capacity(self) -> int:
        return self._classes[0]

    @property
    def largest_capacity(self) -> int:
        return self._classes[-1]

    @property
    def unevictable_bytes(self) -> int:
        """What running sequences hold: rows in use, and blocks in flight. The free rows of their
        slabs are room for others."""
        rows = sum(
            self._config.slab_bytes(count, capacity) for count, capacity in self.slots.used()
        )
        blocks = len(self.blocks) - self.blocks.num_evictable
        states = len(self.snapshots) - self.snapshots.num_evictable
        pinned_bytes = blocks * self._config.block_bytes + states * self._config.state_bytes
        return rows + pinned_bytes + self.withdrawn_bytes

    def allocate_slot(self, tokens: int) -> tuple[Slot, int] | None:
        """A slot for at least ``tokens`` tokens and its capacity; None when there is no
        room now. A larger one than needed is taken only where it is free and a fitting
        one is not to be had."""
        fitting = [capacity for capacity in self._classes if capacity >= tokens]
        slot = self.slots.take(fitting[0])
        if slot is None and self._add_slab(fitting[0]):
            slot = self.slots.take(fitting[0])
        if slot is not None:
            return slot, fitting[0]
        for capacity in fitting[1:]:
            slot = self.slots.take(capacity)
            if slot is not None:
                return slot, capacity
        return None

    def reserve_fetch(self, seq: Sequence, blocks: int) -> int:
        """Takes memory for up to so many blocks of ``seq`` that are to come from the kvstore, and
        returns for how many. It stays reserved until `add_fetched_block` has used it or
        `release_fetch` was called; but whoever finds no room otherwise may have it, and ``seq``
        computes them."""
        free = self._empty_bytes() + self._cached_bytes() - self.ledger.shortfall(0)
        blocks = max(0, min(blocks, free // self._config.block_bytes))
        if blocks:
            self._make_room(blocks * self._config.block_bytes)
            self.ledger.reserve(blocks * self._config.block_bytes)
            self.fetch_reservations[seq] = blocks
        return blocks

    def release_fetch(self, seq: Sequence, keep: int = 0) -> int:
        """Ends what `reserve_fetch` took for ``seq``, ``keep`` so many blocks; how many it has
        left."""
        had = self.fetch_reservations.pop(seq, 0)
        left = min(had, keep)
        self.ledger.release((had - left) * self._config.block_bytes)
        if left:
            self.fetch_reservations[seq] = left
        return left

    def add_fetched_block(self, block_hash: bytes, seq: Sequence) -> Block | None:
        """The same as `add_block` for one that came for ``seq``, in the room set aside for it."""
        self.release_fetch(seq, keep=self.fetch_reservations.get(seq, 0) - 1)
        return self.add_block(block_hash, stored=True)

    def add_block(self, block_hash: bytes, *, stored: bool = False) -> Block | None:
        """A new pinned block, or None when there is no room for it."""
        if not self._make_room(self._config.block_bytes):
            return None
        self.ledger.reserve(self._config.block_bytes)
        return self.blocks.add(block_hash, stored=stored)

    def add_snapshot(self, block_hash: bytes | None) -> Block | None:
        """A new pinned snapshot, or None when there is no room for it. Without a hash it is
        private."""
        if self.withdrawn_bytes:  # some of them may be snapshots that are there as yet
            return None
        if self.snapshots.full:
            if not self.snapshots.num_evictable:
                return None
            self._evict_oldest(self.snapshots)
        if not self._make_room(self._config.state_bytes):
            return None
        self.ledger.reserve(self._config.state_bytes)
        if block_hash is None:
            return self.snapshots.add_private()
        return self.snapshots.add(block_hash)

    def drop_snapshot(self, snapshot: Block) -> None:
        """Forgets ``snapshot``, also where it is only about to be saved."""
        self.snapshots.remove(snapshot)
        self.ledger.release(self._config.state_bytes)
        self.evictions.append(Evict(snapshot.id))

    def unpin(self, block: Block) -> None:
        self._pool_of(block).unpin(block)

    def bytes_of(self, block: Block) -> int:
        return self._config.state_bytes if block.is_snapshot else self._config.block_bytes

    def withdraw(self, block: Block) -> bool:
        """Nobody may find ``block`` any more; its bytes are settled later. False where it
        has gone already."""
        pool = self._pool_of(block)
        if pool.get(block.hash) is not block:
            return False
        pool.remove(block)
        self.withdrawn_bytes += self.bytes_of(block)
        return True

    def settle(self, block: Block, *, exists: bool) -> None:
        """Ends what `withdraw` began, once it is known whether the block came to be."""
        self.withdrawn_bytes -= self.bytes_of(block)
        self.ledger.release(self.bytes_of(block))
        if exists:
            self.evictions.append(Evict(block.id))

    def clear(self) -> None:
        """Everything that was held is gone, in the executor too."""
        self.blocks.clear()
        self.snapshots.clear()
        self.slots.clear()
        for seq in self.fetch_reservations:
            seq.fetched_payloads.clear()
        self.fetch_reservations.clear()
        self.withdrawn_bytes = 0
        self.ledger.used_bytes = 0
        self.forget_changes()

    def lower_limit(self, limit_bytes: float) -> None:
        """Lets new things be taken only within ``limit_bytes``; a sequence that is alone
        always has enough."""
        alone_bytes = self._config.slab_bytes(1, self.largest_capacity)
        lowered = min(self.ledger.limit_bytes, int(limit_bytes))
        self.ledger.limit_bytes = max(alone_bytes, lowered)

    def findable_hashes(self) -> list[bytes]:
        """The hashes of the prefixes that others may start from, as far as a router needs to
        know: where state is needed, blocks are of no use without it."""
        if self._config.reuses_states:
            return self.snapshots.published_hashes()
        return [block.hash for block in self.blocks]

    def take_changes(self) -> tuple[list[bytes], list[bytes]]:
        """What came to `findable_hashes` since the last call, and what went."""
        blocks, states = self.blocks.take_changes(), self.snapshots.take_changes()
        return states if self._config.reuses_states else blocks

    def forget_changes(self) -> None:
        """The plan that carries them has been made."""
        self.evictions.clear()
        self.exported.clear()
        self.freed_slabs.clear()
        self.new_slabs.clear()

    def _add_slab(self, capacity: int) -> bool:
        memory_tokens = self._config.max_sequence_blocks * self._config.block_size
        tokens = min(SLAB_TOKENS, int(memory_tokens * MAX_SLAB_SHARE))
        rows = min(max(1, tokens // capacity), self._config.completion_batch_size)
        while rows > 1 and not self._affordable(self._config.slab_bytes(rows, capacity)):
            rows //= 2
        size_bytes = self._config.slab_bytes(rows, capacity)
        if not self._make_room(size_bytes):
            return False
        self.ledger.reserve(size_bytes)
        self.new_slabs.append(self.slots.add(rows, capacity))
        return True

    def _affordable(self, size_bytes: int) -> bool:
        """Whether that much can be had for at most half of what is cached: rows that
        are not needed yet are not worth all of the cache."""
        return self.ledger.shortfall(size_bytes) <= self._empty_bytes() + self._cached_bytes() // 2

    def _make_room(self, size_bytes: int) -> bool:
        """Frees empty slabs, then the blocks and snapshots used longest ago, then what was
        fetched for sequences that wait, until ``size_bytes`` fit. Gives up nothing when that
        would not be enough."""
        if self.ledger.shortfall(size_bytes) > self._reclaimable_bytes():
            return False
        while self.ledger.shortfall(size_bytes) > 0 and any(True for _ in self.slots.empty_slabs()):
            slab = self.slots.pop_empty_slab()
            self.ledger.release(self._config.slab_bytes(slab.rows, slab.capacity))
            self.freed_slabs.append(slab.slab_id)
        while self.ledger.shortfall(size_bytes) > 0 and self._cached_bytes():
            blocks_first = self.blocks.oldest_use < self.snapshots.oldest_use
            self._evict_oldest(self.blocks if blocks_first else self.snapshots)
        while self.ledger.shortfall(size_bytes) > 0:
            last = max(self.fetch_reservations, key=lambda seq: seq.order)
            last.fetched_payloads.clear()
            self.release_fetch(last)
        return True

    def _evict_oldest(self, pool: BlockPool) -> None:
        block = pool.pop_oldest()
        export = self._evicting_exports and not block.stored and not block.is_snapshot
        if export:
            self.exported[block.id] = block.hash
        self.evictions.append(Evict(block.id, export))
        self.ledger.release(self.bytes_of(block))

    def _pool_of(self, block: Block) -> BlockPool:
        return self.snapshots if block.is_snapshot else self.blocks

    def _reclaimable_bytes(self) -> int:
        return self._empty_bytes() + self._cached_bytes() + self._fetch_reserved_bytes()

    def _fetch_reserved_bytes(self) -> int:
        return sum(self.fetch_reservations.values()) * self._config.block_bytes

    def _cached_bytes(self) -> int:
        blocks_bytes = self.blocks.num_evictable * self._config.block_bytes
        return blocks_bytes + self.snapshots.num_evictable * self._config.state_bytes

    def _empty_bytes(self) -> int:
        return sum(
            self._config.slab_bytes(slab.rows, slab.capacity) for slab in self.slots.empty_slabs()
        )
