"""One request on its way through the engine."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum, auto

from engine.plan import Slot
from engine.scheduler.pool import Block
from shared import wire
from shared.hashing import block_hash

Payload = tuple[bytes | memoryview, ...]

OVERTAKING = 256
MOST_PRIORITY = 16
"""Priorities beyond, up or down, count as this."""


class State(Enum):
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


HOLDING = (State.PREFILLING, State.READY, State.DECODING, State.ENDING)


@dataclass(eq=False, slots=True, kw_only=True)
class Sequence:
    """A request and how far it is.

    ``tokens`` are the prompt and every output that is known. ``computed`` counts the
    positions whose KV is in the slot once every plan made so far has run, so it may be
    ahead of ``tokens`` by the one output that is in flight. ``target`` is the position
    of the last token, where prefill ends and decoding begins. ``saved`` counts the
    leading blocks that need no `Save` any more. ``scored`` counts the prompt's tokens whose
    log-probabilities have been told (the first has none). ``recorded`` says that the
    executor has the tokens that penalties and grammars look back at. ``payloads`` are blocks
    that came from the kvstore, by block number. ``failures`` counts the steps that raised
    while it was alone. ``grammar`` is only held, for the executor to find. ``kept`` is the
    position of the newest snapshot of it or that it began with, ``marks`` are those where its
    prompt's are taken, and ``trail`` is the private one that follows it while it decodes,
    taken at ``trail_position``.
    """

    request: wire.Submit
    arrival: int
    parent: bytes
    block_size: int
    tokens: list[int]
    max_tokens: int
    submitted_s: float
    grammar: object = None

    state: State = State.WAITING
    slot: Slot | None = None
    capacity: int = 0
    computed: int = 0
    target: int = 0
    pending: int = 0
    saved: int = 0
    scored: int = 0
    recorded: bool = False
    reached: int = 0
    stalled: bool = False
    failures: int = 0
    asked: bool = False
    first_asked: int = 0
    payloads: dict[int, Payload] = field(default_factory=dict)
    hashes: list[bytes] = field(default_factory=list)
    kept: int = 0
    marks: tuple[int, ...] = ()
    trail: Block | None = None
    trail_position: int = 0
    cached_ram: int = 0
    cached_ssd: int = 0
    admitted_s: float | None = None
    first_token_s: float | None = None

    @property
    def order(self) -> tuple[int, int]:
        """Who goes first, unique: who came earlier, where each step of priority counts as
        if `OVERTAKING` arrivals earlier. So no more than that overtake anybody for each step."""
        priority = max(-MOST_PRIORITY, min(self.request.priority, MOST_PRIORITY))
        return (self.arrival - OVERTAKING * priority, self.arrival)

    @property
    def prompt_length(self) -> int:
        return len(self.request.token_ids)

    @property
    def outputs(self) -> int:
        """How many outputs are known, those of earlier attempts included."""
        return len(self.tokens) - self.prompt_length

    @property
    def positions(self) -> int:
        """How many positions it may ever compute: its last output is never an input."""
        return self.prompt_length + self.max_tokens - 1

    @property
    def exhausted(self) -> bool:
        """Whether its last allowed output is planned already."""
        return self.computed >= self.positions

    @property
    def scoring(self) -> bool:
        """Whether it still computes positions of its prompt for their log-probabilities."""
        wanted = self.request.prompt_logprobs is not None
        return wanted and self.scored < self.prompt_length - 1

    @property
    def restorable(self) -> int:
        """How many leading positions may come from blocks instead of being computed."""
        return self.scored if self.scoring else len(self.tokens) - 1

    @property
    def publishable(self) -> int:
        """How many full blocks have both their KV in the slot and their tokens known."""
        return min(self.computed, len(self.tokens)) // self.block_size

    @property
    def holder(self) -> Slot:
        """The slot of a sequence that must have one."""
        if self.slot is None:
            raise RuntimeError(f"{self.request.request_id} holds no slot ({self.state.name})")
        return self.slot

    def begin(self, slot: Slot, capacity: int, now_s: float) -> None:
        """Starts (again) from nothing in ``slot``."""
        self.slot, self.capacity = slot, capacity
        self.computed = self.saved = self.kept = 0
        self.target = len(self.tokens) - 1
        self.stalled = self.recorded = False
        if self.admitted_s is None:
            self.admitted_s = now_s

    def reset(self) -> None:
        """Forgets slot and KV; everything that was sampled stays."""
        self.slot, self.capacity, self.computed, self.saved = None, 0, 0, 0
        self.asked = self.stalled = False
        self.payloads.clear()

    def extend_hashes(self) -> None:
        """Brings ``hashes`` up to the full blocks of the known tokens."""
        while (len(self.hashes) + 1) * self.block_size <= len(self.tokens):
            start = len(self.hashes) * self.block_size
            self.parent = block_hash(self.parent, self.tokens[start : start + self.block_size])
            self.hashes.append(self.parent)

    def reuse(self, ram_tokens: int, ssd_tokens: int) -> tuple[int, int]:
        """Counts tokens that were restored from ``computed`` on, as far as they are of the
        prompt and this sequence never had them before. Returns what was counted."""
        end = self.computed + ram_tokens + ssd_tokens
        fresh = max(0, min(end, self.prompt_length) - max(self.computed, self.reached))
        ssd = min(ssd_tokens, fresh)
        self.cached_ssd += ssd
        self.cached_ram += fresh - ssd
        return fresh - ssd, ssd

    def usage(self, now_s: float) -> wire.Usage:
        admitted = now_s if self.admitted_s is None else self.admitted_s
        first = now_s if self.first_token_s is None else self.first_token_s
        return wire.Usage(
            prompt_tokens=self.prompt_length,
            completion_tokens=self.outputs,
            cached_ram_tokens=self.cached_ram,
            cached_ssd_tokens=self.cached_ssd,
            queue_s=admitted - self.submitted_s,
            prefill_s=first - admitted,
            decode_s=now_s - first,
        )
