"""What the scheduler is told once, at the start."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

StorePolicy = Literal["evict_only", "write_through"]


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerConfig:
    """Sizes and limits, all in the units their names say.

    ``block_bytes`` is one block of all layers, ``slot_block_bytes`` as many positions of
    a slot (unset: the same), ``row_bytes`` what a slot keeps besides, whatever its
    capacity. Slabs of slots and pool blocks together never exceed
    ``limit_bytes``. ``max_batch_size`` bounds the rows that
    decode in a plan, ``prefill_batch_size`` its chunks, ``completion_batch_size``
    the sequences that hold a slot, ``max_sequences`` everything that is live.
    ``prefill_chunk_tokens`` None sizes chunks by predicted time. ``prefix_cache``
    False is for models whose KV cannot be cut into blocks. ``look_ahead`` allows one
    plan to be made before the result of the one before it is known. ``eos_token_ids`` are
    the tokens that grammars end with. ``state_bytes`` is a snapshot of a sequence's recurrent
    state, 0 for models that have none; there are never more than ``max_snapshots`` snapshots.
    ``keeps_kv`` False is for models that keep nothing else.
    """

    block_size: int
    block_bytes: int
    limit_bytes: int
    context_length: int
    max_batch_size: int
    prefill_batch_size: int
    completion_batch_size: int
    namespace: bytes
    slot_block_bytes: int = 0
    row_bytes: int = 0
    prefill_chunk_tokens: int | None = None
    prefix_cache: bool = True
    store_enabled: bool = False
    store_policy: StorePolicy = "evict_only"
    look_ahead: bool = True
    vocab_size: int = 2**31
    eos_token_ids: tuple[int, ...] = ()
    max_sequences: int = 4096
    state_bytes: int = 0
    max_snapshots: int = 0
    keeps_kv: bool = True

    def __post_init__(self) -> None:
        if not self.slot_block_bytes:
            object.__setattr__(self, "slot_block_bytes", self.block_bytes)
        for name in (
            "block_size",
            "block_bytes",
            "slot_block_bytes",
            "context_length",
            "max_batch_size",
            "prefill_batch_size",
            "completion_batch_size",
            "max_sequences",
        ):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}, and must be at least 1")
        if self.max_sequence_blocks < 1:
            raise ValueError(f"limit_bytes {self.limit_bytes} is less than one row of one block")

    @property
    def total_blocks(self) -> int:
        """The blocks that fit beside one slot's recurrent state."""
        return (self.limit_bytes - self.row_bytes) // self.block_bytes

    @property
    def max_sequence_blocks(self) -> int:
        """The length, in blocks, of a sequence that has all memory for its slot."""
        return (self.limit_bytes - self.row_bytes) // self.slot_block_bytes

    @property
    def unit_bytes(self) -> int:
        """What is called a block in figures for people: of a model that keeps nothing for each
        token, the state of a sequence."""
        return self.block_bytes if self.keeps_kv else self.row_bytes

    @property
    def reuses_states(self) -> bool:
        """Whether a prefix is of use only where there is a snapshot at its end."""
        return self.prefix_cache and self.state_bytes > 0

    @property
    def reuses_kv(self) -> bool:
        return self.prefix_cache and self.keeps_kv

    @property
    def uses_store(self) -> bool:
        """Blocks without the state that belongs to them would be of no use."""
        return self.store_enabled and self.prefix_cache and not self.state_bytes

    def slab_bytes(self, rows: int, capacity: int) -> int:
        """The bytes of ``rows`` rows of ``capacity`` tokens (a multiple of the block size)."""
        return rows * (capacity // self.block_size * self.slot_block_bytes + self.row_bytes)

    def capacity_classes(self) -> tuple[int, ...]:
        """The capacities (tokens) that slots come in, smallest first: 512 and up, each
        four times the one before, the last one the context or the memory, whichever is
        less. Little memory starts smaller, so that several sequences share it. Where tokens
        take no memory there is one."""
        largest = min(-(-self.context_length // self.block_size), self.max_sequence_blocks)
        if not self.keeps_kv:
            return (largest * self.block_size,)
        capacity = max(1, min(512 // self.block_size, self.max_sequence_blocks // 8))
        blocks = []
        while capacity < largest:
            blocks.append(capacity)
            capacity *= 4
        return tuple(count * self.block_size for count in (*blocks, largest))
