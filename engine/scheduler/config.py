"""The scheduler's configuration, fixed at startup."""

from __future__ import annotations

import heapq
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from engine.plan import page_tokens
from engine.scheduler.timing.chunks import MAX_TOKENS
from engine.scheduler.timing.time_share import DEFAULT_STREAMS_SHARE

StorePolicy = Literal["evict_only", "write_through"]


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerConfig:
    """Sizes and limits of one engine. Raises: ValueError if one is out of range."""

    block_size: int  # tokens
    block_bytes: int  # as many positions of pages
    page_tokens: int = 0  # a multiple of block_size; 0: `engine.plan.page_tokens`
    limit_bytes: int  # pages, unpacked rows, states and snapshots together never exceed this
    num_blocks: int = 0
    """How many blocks that is for display; the rest is for states, and for what passes gather.
    0: as many as fit."""
    draft_bytes: int = 0  # the slots of a draft model, in addition to that
    context_length: int  # tokens
    max_batch_size: int  # max sequences that decode in one plan
    prefill_batch_size: int  # chunks of one plan, without short ends
    completion_batch_size: int  # max sequences that hold a slot
    namespace: bytes
    gather_token_bytes: int = 0
    """Temporary arrays of one position while a pass gathers the pages of a sequence."""
    gather_rows: int = 1  # max sequences whose pages are gathered at once
    pads_gathers: bool = False  # whether each of them takes as much as the longest
    unpacked_token_bytes: int = 0  # one position of an unpacked row; 0: there are none
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
    prefix_cache: bool = True  # False for models whose KV cannot be shared
    store_enabled: bool = False
    store_policy: StorePolicy = "evict_only"
    max_insert_bytes: int = 64 * 1024 * 1024
    """Max size of what one plan inserts from the kvstore: streams wait while it is copied, and
    until then it is in memory twice."""
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
        names = "block_size block_bytes context_length max_batch_size"
        names += " prefill_batch_size completion_batch_size max_sequences"
        for name in names.split():
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}, and must be at least 1")
        if not self.page_tokens:
            object.__setattr__(self, "page_tokens", page_tokens(self.block_size))
        if self.page_tokens < 1 or self.page_tokens % self.block_size:
            raise ValueError(f"page_tokens {self.page_tokens} is no multiple of {self.block_size}")
        if self.capacity < 1:
            raise ValueError(f"limit_bytes {self.limit_bytes} is less than one page")

    @property
    def beside_bytes(self) -> int:
        """The ledger's bytes in addition to `limit_bytes`, for data with its own limit."""
        return self.draft_bytes + self.picture_bytes

    @property
    def blocks_per_page(self) -> int:
        return self.page_tokens // self.block_size

    @property
    def page_bytes(self) -> int:
        return self.blocks_per_page * self.block_bytes

    @property
    def max_inserts(self) -> int:
        """Max pages from the kvstore that one plan inserts."""
        return max(1, self.max_insert_bytes // self.page_bytes)

    @property
    def states_bytes(self) -> int:
        """Recurrent state of a sequence, and its snapshots from which its next turn goes on: at the
        end of its prompt, and of its answer."""
        return (3 if self.reuses_states else 1) * self.state_bytes

    @property
    def capacity(self) -> int:
        """The length in tokens of a sequence that has all memory to itself."""
        return self.capacity_within(self.limit_bytes)

    def capacity_within(self, limit_bytes: int) -> int:
        """Return `capacity` with another limit."""
        if not self.keeps_kv:
            return self.context_length
        page_bytes = self.page_bytes + self.gather_bytes([1])
        return (limit_bytes - self.states_bytes) // page_bytes * self.page_tokens

    def gather_bytes(self, lengths: Iterable[int]) -> int:
        """Return what gathers of sequences with these numbers of pages take."""
        if not self.gather_token_bytes:
            return 0
        longest = heapq.nlargest(self.gather_rows, filter(None, lengths))
        pages = len(longest) * longest[0] if self.pads_gathers and longest else sum(longest)
        return pages * self.page_tokens * self.gather_token_bytes

    def longest_of(self, sequences: int) -> int:
        """Return the length in tokens that so many sequences, with nothing in common, can have at
        once."""
        if not self.keeps_kv:
            return self.context_length
        room = max(0, self.limit_bytes - self.states_bytes - (sequences - 1) * self.state_bytes)
        pages = room // (sequences * self.page_bytes + self.gather_bytes([1] * sequences))
        return min(pages * self.page_tokens, self.context_length)

    def at_once(self, tokens: int) -> int:
        """Return how many sequences of ``tokens``, with nothing in common, fit at once."""
        pages = -(-tokens // self.page_tokens) if self.keeps_kv else 0
        room = max(0, self.limit_bytes - self.states_bytes + self.state_bytes)
        each, gathered = pages * self.page_bytes + self.state_bytes, self.gather_bytes([pages])
        few = room // max(1, each + gathered)
        if few <= self.gather_rows:
            return few
        return max(self.gather_rows, (room - self.gather_rows * gathered) // max(1, each))

    @property
    def state_tokens(self) -> int:
        """Snapshots are taken at multiples of this position."""
        return self.page_tokens if self.keeps_kv else self.block_size

    @property
    def unit_bytes(self) -> int:
        """The size of a "block" in figures for display: for models without KV, the size of a
        sequence's state."""
        return self.block_bytes if self.keeps_kv else self.state_bytes

    @property
    def total_blocks(self) -> int:
        """The number of "blocks" for display."""
        own_bytes = self.state_bytes if self.keeps_kv else 0
        fit = (self.limit_bytes - own_bytes) // self.unit_bytes
        return min(self.num_blocks, fit) if self.num_blocks else fit

    @property
    def reuses_states(self) -> bool:
        """Whether a prefix can be reused only if there is a snapshot at its end."""
        return self.prefix_cache and self.state_bytes > 0

    @property
    def uses_store(self) -> bool:
        """Whether pages, and the snapshots without which some are useless, go to the kvstore."""
        return self.store_enabled and self.prefix_cache

    @property
    def stores_parts(self) -> bool:
        """Whether pages that are not full go there too. With recurrent state, prefixes end with
        pages."""
        return self.uses_store and self.keeps_kv and not self.state_bytes

    @property
    def writes_through(self) -> bool:
        """Whether they are sent as soon as they are complete, not only when they leave RAM."""
        return self.uses_store and self.store_policy == "write_through"
