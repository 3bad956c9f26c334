"""One request on its way through the engine."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum, auto

from engine.plan import Slot
from engine.scheduler.block_pool import Block
from shared import wire
from shared.hashing import block_hash

Payload = tuple[bytes | memoryview, ...]

ARRIVALS_PER_PRIORITY = 256
MAX_PRIORITY = 16
"""Priorities beyond, up or down, count as this."""


class Status(Enum):
    WAITING = auto()
    """New; holds nothing."""
    LOADING = auto()
    """Waits for the kvstore; holds nothing."""
    PREFILLING = auto()
    """Holds a slot; its prompt is being computed."""
    READY = auto()
    """Holds a slot; everything but its last token is computed; waits for a decode row."""
    DECODING = auto()
    ENDING = auto()
    """Its last decode is in flight."""
    PREEMPTED = auto()
    """Gave up its slot to an older one; waits to be restored or recomputed."""
    FINISHED = auto()
    """Nobody waits for it. Its slot, if any, is freed by the next plan."""


HOLDING_SLOT = (Status.PREFILLING, Status.READY, Status.DECODING, Status.ENDING)


@dataclass(eq=False, slots=True, kw_only=True)
class Sequence:
    """A request and how far it is.

    ``token_ids`` are the prompt and every output that is known. ``num_computed_tokens`` counts the
    positions whose KV is in the slot once every plan made so far has run, so it may be ahead of
    ``token_ids`` by the one output that is in flight. ``prefill_end`` is the position of the last
    token, where prefill ends and decoding begins. ``num_saved_blocks`` counts the leading blocks
    that need no `Save` any more. ``num_prompt_logprobs`` counts the prompt's tokens whose
    log-probabilities have been told (the first has none). ``history_sent`` says that the executor
    has the tokens that penalties and grammars look back at. ``fetched_payloads`` are blocks that
    came from the kvstore, by block number. ``failures`` counts the steps that raised while it was
    alone. ``grammar`` is only held, for the executor to find. ``last_snapshot_position`` is the
    position of the newest snapshot of it or that it began with, ``snapshot_positions`` are those
    where its prompt's are taken, and ``trailing_snapshot`` is the private one that follows it while
    it decodes, taken at ``trailing_position``.
    """

    request: wire.Submit
    arrival: int
    parent_hash: bytes
    block_size: int
    token_ids: list[int]
    max_tokens: int
    submitted_s: float
    grammar: object = None

    status: Status = Status.WAITING
    slot: Slot | None = None
    capacity: int = 0
    num_computed_tokens: int = 0
    prefill_end: int = 0
    num_inflight: int = 0
    num_saved_blocks: int = 0
    num_prompt_logprobs: int = 0
    history_sent: bool = False
    max_computed_tokens: int = 0
    stalled: bool = False
    failures: int = 0
    fetch_requested: bool = False
    fetch_first_block: int = 0
    fetched_payloads: dict[int, Payload] = field(default_factory=dict)
    block_hashes: list[bytes] = field(default_factory=list)
    last_snapshot_position: int = 0
    snapshot_positions: tuple[int, ...] = ()
    trailing_snapshot: Block | None = None
    trailing_position: int = 0
    cached_ram_tokens: int = 0
    cached_ssd_tokens: int = 0
    admitted_s: float | None = None
    first_token_s: float | None = None

    @property
    def order(self) -> tuple[int, int]:
        """Who goes first, unique: who came earlier, where each step of priority counts as if
        `ARRIVALS_PER_PRIORITY` arrivals earlier. So no more than that overtake anybody for each
        step."""
        priority = max(-MAX_PRIORITY, min(self.request.priority, MAX_PRIORITY))
        return (self.arrival - ARRIVALS_PER_PRIORITY * priority, self.arrival)

    @property
    def num_prompt_tokens(self) -> int:
        return len(self.request.token_ids)

    @property
    def num_output_tokens(self) -> int:
        """How many outputs are known, those of earlier attempts included."""
        return len(self.token_ids) - self.num_prompt_tokens

    @property
    def max_positions(self) -> int:
        """How many positions it may ever compute: its last output is never an input."""
        return self.num_prompt_tokens + self.max_tokens - 1

    @property
    def all_outputs_planned(self) -> bool:
        """Whether its last allowed output is planned already."""
        return self.num_computed_tokens >= self.max_positions

    @property
    def needs_prompt_logprobs(self) -> bool:
        """Whether it still computes positions of its prompt for their log-probabilities."""
        wanted = self.request.prompt_logprobs is not None
        return wanted and self.num_prompt_logprobs < self.num_prompt_tokens - 1

    @property
    def num_restorable_tokens(self) -> int:
        """How many leading positions may come from blocks instead of being computed."""
        return self.num_prompt_logprobs if self.needs_prompt_logprobs else len(self.token_ids) - 1

    @property
    def num_savable_blocks(self) -> int:
        """How many full blocks have both their KV in the slot and their tokens known."""
        return min(self.num_computed_tokens, len(self.token_ids)) // self.block_size

    @property
    def held_slot(self) -> Slot:
        """The slot of a sequence that must have one."""
        if self.slot is None:
            raise RuntimeError(f"{self.request.request_id} holds no slot ({self.status.name})")
        return self.slot

    def begin(self, slot: Slot, capacity: int, now_s: float) -> None:
        """Starts (again) from nothing in ``slot``."""
        self.slot, self.capacity = slot, capacity
        self.num_computed_tokens = self.num_saved_blocks = self.last_snapshot_position = 0
        self.prefill_end = len(self.token_ids) - 1
        self.stalled = self.history_sent = False
        if self.admitted_s is None:
            self.admitted_s = now_s

    def reset(self) -> None:
        """Forgets slot and KV; everything that was sampled stays."""
        self.slot, self.capacity, self.num_computed_tokens, self.num_saved_blocks = None, 0, 0, 0
        self.fetch_requested = self.stalled = False
        self.fetched_payloads.clear()

    def update_block_hashes(self) -> None:
        """Brings ``block_hashes`` up to the full blocks of the known tokens."""
        while (len(self.block_hashes) + 1) * self.block_size <= len(self.token_ids):
            start = len(self.block_hashes) * self.block_size
            self.parent_hash = block_hash(
                self.parent_hash, self.token_ids[start : start + self.block_size]
            )
            self.block_hashes.append(self.parent_hash)

    def count_cached_tokens(self, ram_tokens: int, ssd_tokens: int) -> tuple[int, int]:
        """Counts tokens that were restored from ``num_computed_tokens`` on, as far as they are of
        the prompt and this sequence never had them before. Returns what was counted."""
        end = self.num_computed_tokens + ram_tokens + ssd_tokens
        fresh = max(
            0,
            min(end, self.num_prompt_tokens)
            - max(self.num_computed_tokens, self.max_computed_tokens),
        )
        ssd = min(ssd_tokens, fresh)
        self.cached_ssd_tokens += ssd
        self.cached_ram_tokens += fresh - ssd
        return fresh - ssd, ssd

    def usage(self, now_s: float) -> wire.Usage:
        admitted = now_s if self.admitted_s is None else self.admitted_s
        first = now_s if self.first_token_s is None else self.first_token_s
        return wire.Usage(
            prompt_tokens=self.num_prompt_tokens,
            completion_tokens=self.num_output_tokens,
            cached_ram_tokens=self.cached_ram_tokens,
            cached_ssd_tokens=self.cached_ssd_tokens,
            queue_s=admitted - self.submitted_s,
            prefill_s=first - admitted,
            decode_s=now_s - first,
        )
