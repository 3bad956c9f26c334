"""The scheduler's configuration, fixed at startup."""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass
from typing import Literal, NamedTuple

from engine.scheduler.timing.chunks import MAX_TOKENS
from engine.scheduler.timing.time_share import DEFAULT_STREAMS_SHARE

StorePolicy = Literal["evict_only", "write_through"]

ROOMY_TOKENS = 2048
"""Smallest capacity with shared slabs, if memory has room for that many tokens per sequence many
times over."""


class Ring(NamedTuple):
    """KV of layers with a window, of which a slot keeps only the last positions."""

    tokens: int  # positions that a slot keeps, if its capacity is larger
    window_tokens: int  # of these, the ones that a pass leaves as they were before it
    token_bytes: int  # of one position


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerConfig:
    """Sizes and limits of one engine. Raises: ValueError if one is out of range."""

    block_size: int  # tokens
    block_bytes: int  # one block of all layers
    limit_bytes: int  # slabs, blocks and snapshots together never exceed this
    draft_bytes: int = 0  # the slots of a draft model, in addition to that
    context_length: int  # tokens
    max_batch_size: int  # max sequences that decode in one plan
    prefill_batch_size: int  # chunks of one plan, without short ends
    completion_batch_size: int  # max sequences that hold a slot
    namespace: bytes
    slot_block_bytes: int = 0  # as many positions of a slot as a block has; 0: as `block_bytes`
    shares_slabs: bool = False
    """Whether all slots of one capacity are in one slab that grows. ``slot_block_bytes`` then
    includes the temporary copy of a slab."""
    rings: tuple[Ring, ...] = ()  # the part of ``slot_block_bytes`` that long slots do without
    batches_chunks: bool = True  # whether all chunks of a plan are computed in one pass
    decodes_ends: bool = False  # whether decodes may compute known tokens too (`Decode.before`)
    prefill_chunk_tokens: int | None = None  # None: chunks are sized by predicted time
    max_chunk_tokens: int = MAX_TOKENS  # in that case, the max size of a chunk
    has_experts: bool = False  # whether a chunk reads more of the weights than a decode
    layers: int = 1  # parts of a pass of chunks that may be computed in different plans
    pass_token_bytes: int = 0  # activations of one token of a pass
    score_bytes: int = 0
    """Attention scores of one token of a pass, for each position that it may attend to."""
    streams_share: float = DEFAULT_STREAMS_SHARE
    """Fraction of the time for running streams while prompts are computed."""
    prefix_cache: bool = True  # False for models whose KV cannot be divided into blocks
    store_enabled: bool = False
    store_policy: StorePolicy = "evict_only"
    max_insert_bytes: int = 64 * 1024 * 1024
    """Max size of what one plan inserts from the kvstore: streams wait while it is copied, and
    until then it is in memory twice."""
    max_restored_blocks: int | None = None
    """Max blocks that one plan copies into slots while streams wait for it, and a multiple of that
    otherwise; None: no limit. It does not apply to models that cannot continue after each block."""
    look_ahead: bool = True  # plan one step before the result of the previous one is known
    vocab_size: int = 2**31
    eos_token_ids: tuple[int, ...] = ()  # tokens that grammars end with
    max_sequences: int = 4096  # live sequences
    state_bytes: int = 0
    """Recurrent state of one sequence, in a slot or a snapshot; 0 for models without it."""
    max_snapshots: int = 0
    keeps_kv: bool = True  # False for models that have only recurrent state
    image_token_id: int | None = None  # represents embeddings of pictures; None: not supported
    picture_token_bytes: int = 1  # one embedding
    picture_bytes: int = 0  # all cached embeddings, in addition to `limit_bytes`
    picture_layers: int = 1  # parts of an encoding that may be computed in different plans
    whole_picture_tokens: int = 0
    """Max tokens of a chunk, for models in which a picture's embeddings attend to each other and
    must be in one chunk; 0 for other models."""

    def __post_init__(self) -> None:
        if not self.slot_block_bytes:
            object.__setattr__(self, "slot_block_bytes", self.block_bytes)
        names = "block_size block_bytes slot_block_bytes context_length max_batch_size"
        names += " prefill_batch_size completion_batch_size max_sequences"
        for name in names.split():
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}, and must be at least 1")
        if self.max_sequence_blocks < 1:
            raise ValueError(f"limit_bytes {self.limit_bytes} is less than one row of one block")

    @property
    def beside_bytes(self) -> int:
        """The ledger's bytes in addition to `limit_bytes`, for data with its own limit."""
        return self.draft_bytes + self.picture_bytes

    @property
    def max_sequence_blocks(self) -> int:
        """The length, in blocks, of a sequence that uses all memory for its slot."""
        whole = (self.limit_bytes - self.state_bytes) // self.slot_block_bytes
        if not self.rings:
            return whole
        lengths = range(whole, max(whole, -(-self.context_length // self.block_size)) + 1)
        fit = bisect_right(
            lengths, self.limit_bytes, key=lambda n: self.slab_bytes(1, n * self.block_size)
        )
        return lengths[max(fit, 1) - 1]

    @property
    def window_tokens(self) -> int | None:
        """The positions before its last pass that a slot still has in all layers, None for all."""
        return min((ring.window_tokens for ring in self.rings), default=None)

    @property
    def unit_bytes(self) -> int:
        """The size of a "block" in figures for display: for models without KV, the size of a
        sequence's state."""
        return self.block_bytes if self.keeps_kv else self.state_bytes

    @property
    def reuses_states(self) -> bool:
        """Whether a prefix can be reused only if there is a snapshot at its end."""
        return self.prefix_cache and self.state_bytes > 0

    @property
    def reuses_kv(self) -> bool:
        return self.prefix_cache and self.keeps_kv

    @property
    def copies_positions(self) -> bool:
        """Whether positions are copied from slot to slot. A ring may no longer have them, and
        with look-ahead the positions of another sequence may still turn out to be wrong."""
        return self.reuses_kv and not (self.state_bytes or self.rings or self.look_ahead)

    @property
    def uses_store(self) -> bool:
        """Whether blocks, and the snapshots without which some are useless, go to the kvstore."""
        return self.store_enabled and self.prefix_cache

    @property
    def writes_through(self) -> bool:
        """Whether they are sent as soon as they are complete, not only when they leave RAM."""
        return self.uses_store and self.store_policy == "write_through"

    @property
    def state_blocks(self) -> int:
        """The number of blocks that take at least as many bytes as a state."""
        return -(-self.state_bytes // self.block_bytes)

    def slab_bytes(self, rows: int, capacity: int) -> int:
        """Return the bytes of ``rows`` rows of ``capacity`` tokens (whole blocks)."""
        slot_bytes = capacity // self.block_size * self.slot_block_bytes + self.state_bytes
        for ring in self.rings:
            slot_bytes -= max(0, capacity - ring.tokens) * ring.token_bytes
        return rows * slot_bytes

    def capacity_classes(self) -> tuple[int, ...]:
        """Return the capacities (tokens) of slots, smallest first.

        They start at 512, each four times the previous one. The last one is the context or the
        memory, whichever is less. With little memory they start smaller, so that several sequences
        share it. With shared slabs and much memory they start larger, because each class needs its
        own operations in every layer. If tokens take no memory, there is one class.
        """
        largest = min(-(-self.context_length // self.block_size), self.max_sequence_blocks)
        if not self.keeps_kv:
            return (largest * self.block_size,)
        capacity = max(1, min(512 // self.block_size, self.max_sequence_blocks // 8))
        roomy_bytes = self.slab_bytes(self.completion_batch_size, ROOMY_TOKENS)
        if self.shares_slabs and roomy_bytes <= self.limit_bytes // 4:
            capacity = max(1, ROOMY_TOKENS // self.block_size)
        blocks = []
        while capacity < largest:
            blocks.append(capacity)
            capacity *= 4
        return tuple(count * self.block_size for count in (*blocks, largest))
