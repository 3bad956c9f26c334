"""A request on its way through the engine."""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, field
from enum import Enum, auto

import msgspec

from engine.plan import Cancellation, Payload, Slot
from engine.scheduler.pools.page_pool import Page
from engine.scheduler.pools.snapshot_pool import Snapshot
from engine.scheduler.sequences.thinking import ThinkingProgress
from engine.speculation.sequence_drafts import SequenceDrafts
from shared import wire
from shared.hashing import Picture, block_hash, pictures_in

ARRIVALS_PER_PRIORITY = 256
"""Number of arrivals by which one step of priority moves a sequence forward."""
MAX_PRIORITY = 16
"""Priorities are clamped to this range, up and down."""
_BEHIND_ALL = 2**60
"""Added to the order of background sequences, so that they come after all others."""


class Status(Enum):
    AWAITING_GRAMMAR = auto()
    """Its grammar is being compiled; holds nothing."""
    AWAITING_ADAPTER = auto()
    """Its adapter has no place yet; holds nothing."""
    WAITING = auto()
    """Waits for a slot; holds nothing."""
    LOADING = auto()
    """Waits for the kvstore; holds nothing."""
    PREFILLING = auto()
    """Holds a slot; its prompt is being computed."""
    READY = auto()
    """Holds a slot; everything except its last token is computed; waits for a decode row."""
    DECODING = auto()
    ENDING = auto()
    """The last decode is in flight."""
    PREEMPTED = auto()
    """Gave up its slot to an older sequence; waits to be restored or recomputed."""
    FINISHED = auto()
    """Has ended. Its slot, if any, is freed by the next plan."""


ARRIVING = (Status.AWAITING_GRAMMAR, Status.AWAITING_ADAPTER)
"""Not accepted yet."""
HOLDING_SLOT = (Status.PREFILLING, Status.READY, Status.DECODING, Status.ENDING)


@dataclass(slots=True)
class SequenceFetch:
    """The pages of a sequence that the kvstore was asked for, and the state after them."""

    requested: bool = False
    first_page: int = 0  # number of the first page that was asked for
    payloads: dict[int, Payload] = field(default_factory=dict)
    """Pages received and not inserted yet, by their number in the table."""
    part_page: int = -1  # number of the one that is not full, -1 if all are
    part_blocks: int = 0  # its blocks
    inserted: set[int] = field(default_factory=set)  # numbers of the pages that were inserted
    first_state: int = 0  # number of the first hash after which a state was searched
    state_end: int = 0  # number of blocks before the received state
    state: Payload | None = None
    cancellation: Cancellation = field(default_factory=Cancellation)

    def drop(self) -> None:
        """Discard what was received, and do not receive more."""
        self.payloads.clear()
        self.state = None
        self.cancellation.is_set = True


@dataclass(slots=True)
class SequenceSnapshots:
    """The snapshots of a sequence's recurrent state."""

    newest_position: int = 0  # hash of its newest snapshot, or of the one it started from
    prompt_positions: tuple[int, ...] = ()  # positions of snapshots in its prompt
    trailing: Snapshot | None = None  # its private snapshot, replaced while it decodes
    trailing_position: int = 0


@dataclass(frozen=True, slots=True, eq=False)
class SequencePicture:
    """A picture in the prompt of a sequence."""

    digest: bytes
    start: int
    end: int  # exclusive
    places: tuple[int, ...]  # positions that have embeddings
    token_ids: tuple[int, ...]
    size_bytes: int  # of the encoder's input
    grid: tuple[int, int, int] | None = None
    """Number of embeddings in time, rows and columns, if positions have these axes. All
    positions of the picture are then places."""

    @property
    def first(self) -> int:
        """The first position that has an embedding."""
        return self.places[0]

    @property
    def last(self) -> int:
        """The end (exclusive) of the positions that have embeddings."""
        return self.places[-1] + 1


@dataclass(eq=False, slots=True, kw_only=True)
class Sequence:
    """A request and its progress."""

    request: wire.Submit
    arrival: int
    parent_hash: bytes  # the last hash in `block_hashes`, or the root
    block_size: int
    token_ids: list[int]  # the prompt and all known outputs
    max_tokens: int
    submitted_s: float
    adapter: int = 0  # the place of its adapter until it ends; 0: none
    grammar: object = None  # kept alive here for the executor
    thinking: ThinkingProgress | None = None  # None: reasoning is unlimited
    pictures: tuple[SequencePicture, ...] = ()  # in prompt order
    num_encoded: int = 0  # pictures encoded first for this sequence

    status: Status = Status.AWAITING_GRAMMAR
    slot: Slot | None = None
    pages: list[Page] = field(default_factory=list)  # its table
    capacity: int = 0  # positions in its pages
    num_computed_tokens: int = 0
    """Number of positions whose KV is in its pages once every plan made so far has run, without
    drafts in flight. It may exceed the length of ``token_ids`` by the one output in flight."""
    pass_end: int = 0  # end of its chunk in an open pass; 0 if there is none
    max_computed_tokens: int = 0  # the largest `num_computed_tokens` so far
    prefill_end: int = 0  # position of the last token, where prefill ends and decoding begins
    num_inflight: int = 0  # decodes in flight
    num_inflight_drafts: int = 0  # drafts of these decodes, which count as computed once accepted
    awaits_guesses: bool = False  # the executor guesses the tokens after a decode in flight
    drafts: SequenceDrafts | None = None  # None: no drafts
    block_hashes: list[bytes] = field(default_factory=list)
    num_named_blocks: int = 0  # leading blocks that can be found in its pages or in others
    num_prompt_logprobs: int = 0
    """Number of prompt tokens whose log-probabilities have been sent; the first token has none."""
    history_sent: bool = False  # the executor has the tokens for penalties and grammars
    failures: int = 0  # steps that raised while it ran alone
    fetch: SequenceFetch = field(default_factory=SequenceFetch)
    snapshots: SequenceSnapshots = field(default_factory=SequenceSnapshots)

    cached_ram_tokens: int = 0
    cached_ssd_tokens: int = 0
    admitted_s: float | None = None
    first_token_s: float | None = None

    @property
    def order(self) -> tuple[int, int]:
        """The unique sort key, smallest first: the arrival number, reduced by
        `ARRIVALS_PER_PRIORITY` for each step of priority. Each step thus overtakes a limited
        number of earlier sequences. Background sequences come last."""
        priority = max(-MAX_PRIORITY, min(self.request.priority, MAX_PRIORITY))
        place = self.arrival - ARRIVALS_PER_PRIORITY * priority
        return (place + _BEHIND_ALL if self.is_background else place, self.arrival)

    @property
    def is_background(self) -> bool:
        """Whether it belongs to a batch: it gives up its row, its slot and its prompt's time to
        any other sequence that needs them."""
        return self.request.is_background

    @property
    def num_prompt_tokens(self) -> int:
        return len(self.request.token_ids)

    @property
    def num_output_tokens(self) -> int:
        """Number of known outputs, including those of earlier attempts."""
        return len(self.token_ids) - self.num_prompt_tokens

    @property
    def continuation(self) -> wire.Submit:
        """A request for its remaining outputs."""
        generated = self.token_ids[self.num_prompt_tokens :]
        return msgspec.structs.replace(self.request, generated=generated, prompt_logprobs=None)

    @property
    def next_position(self) -> int:
        """The position of the next decode's input. If it is not the next position to compute, the
        decode computes the end of the prompt too (`Decode.before`)."""
        return max(self.num_computed_tokens, self.prefill_end)

    @property
    def max_positions(self) -> int:
        """Max number of positions to compute: the last output is never an input."""
        return self.num_prompt_tokens + self.max_tokens - 1

    @property
    def all_outputs_planned(self) -> bool:
        return self.num_computed_tokens >= self.max_positions

    @property
    def needs_prompt_logprobs(self) -> bool:
        """Whether it still computes positions of its prompt for their log-probabilities."""
        wanted = self.request.prompt_logprobs is not None
        return wanted and self.num_prompt_logprobs < self.num_prompt_tokens - 1

    @property
    def num_restorable_tokens(self) -> int:
        """Number of leading positions that need not be computed if they are cached."""
        return self.num_prompt_logprobs if self.needs_prompt_logprobs else len(self.token_ids) - 1

    @property
    def num_nameable_blocks(self) -> int:
        """Number of full blocks whose KV is in its pages and whose tokens are known."""
        return min(self.num_computed_tokens, len(self.token_ids)) // self.block_size

    @property
    def is_restoring(self) -> bool:
        """Whether later plans insert more of its prefix: until then it computes nothing. Only for
        a sequence that holds a slot."""
        return bool(self.fetch.payloads)

    @property
    def is_finished(self) -> bool:
        return self.status is Status.FINISHED

    @property
    def held_slot(self) -> Slot:
        """Return its slot. Raises: RuntimeError if it has none."""
        if self.slot is None:
            raise RuntimeError(f"{self.request.request_id} holds no slot ({self.status.name})")
        return self.slot

    def follow_thinking(self) -> ThinkingProgress | None:
        """Return its progress in reasoning after all known outputs, None if reasoning is
        unlimited."""
        if self.thinking is not None:
            known = self.num_prompt_tokens + self.thinking.num_outputs
            self.thinking.follow(self.token_ids[known:])
        return self.thinking

    def begin(self, slot: Slot, now_s: float) -> None:
        """Start, or restart, in ``slot``, with nothing computed."""
        self.slot = slot
        self.num_computed_tokens = self.num_named_blocks = self.snapshots.newest_position = 0
        self.prefill_end = len(self.token_ids) - 1
        self.history_sent = False
        if self.admitted_s is None:
            self.admitted_s = now_s

    def advance(self, num_computed_tokens: int) -> None:
        """Record that the plan being built computes or finds up to this position."""
        self.num_computed_tokens = num_computed_tokens
        self.max_computed_tokens = max(self.max_computed_tokens, num_computed_tokens)

    def append(
        self, run: SequenceOf[int], eos_token_ids: SequenceOf[int]
    ) -> wire.FinishReason | None:
        """Append the outputs of a decode, all accepted drafts except the last one. Return the
        reason if the sequence ends with them, else None."""
        self.token_ids += run
        # Otherwise it restarts. A READY sequence has lost its row.
        if self.status in (Status.READY, Status.DECODING, Status.ENDING):
            self.num_computed_tokens += len(run) - 1
            self.max_computed_tokens = max(self.max_computed_tokens, self.num_computed_tokens)
        return self.finish_reason(eos_token_ids)

    def finish_reason(self, eos_token_ids: SequenceOf[int]) -> wire.FinishReason | None:
        """Return the reason if it ends with its last token, else None."""
        request, last = self.request, self.token_ids[-1]
        may_stop = self.num_output_tokens > request.min_tokens
        at_end = request.grammar is not None and last in eos_token_ids
        if (at_end and self.num_output_tokens > 0) or (may_stop and last in request.stop_token_ids):
            return "stop"
        return "length" if self.num_output_tokens >= self.max_tokens else None

    def reset(self) -> None:
        """Forget the slot and its KV, but keep all sampled tokens."""
        self.slot, self.num_computed_tokens, self.num_named_blocks = None, 0, 0
        self.fetch = SequenceFetch()

    def update_block_hashes(self) -> None:
        """Extend ``block_hashes`` to all full blocks of known tokens."""
        if (len(self.block_hashes) + 1) * self.block_size > len(self.token_ids):
            return
        pictures = self.hashed_pictures
        while (len(self.block_hashes) + 1) * self.block_size <= len(self.token_ids):
            start = len(self.block_hashes) * self.block_size
            end = start + self.block_size
            shown = pictures_in(pictures, start, end) if pictures else b""
            self.parent_hash = block_hash(self.parent_hash, self.token_ids[start:end], shown)
            self.block_hashes.append(self.parent_hash)

    @property
    def hashed_pictures(self) -> list[Picture]:
        """Pictures in the form that block hashes use."""
        return [Picture(one.start, one.end - one.start, one.digest) for one in self.pictures]

    @property
    def has_pictures_ahead(self) -> bool:
        """Whether positions of a picture are still to be computed."""
        return bool(self.pictures) and self.pictures[-1].end > self.num_computed_tokens

    @property
    def pictures_ahead(self) -> list[SequencePicture]:
        """The pictures with positions still to be computed."""
        return [one for one in self.pictures if one.end > self.num_computed_tokens]

    def count_cached_tokens(self, ram_tokens: int, ssd_tokens: int) -> tuple[int, int]:
        """Count the tokens that were restored from ``num_computed_tokens`` on.

        Only prompt tokens that this sequence never had before count. Returns the numbers
        counted, from RAM and from SSD."""
        end = self.num_computed_tokens + ram_tokens + ssd_tokens
        known = max(self.num_computed_tokens, self.max_computed_tokens)
        fresh = max(0, min(end, self.num_prompt_tokens) - known)
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
            accepted_prediction_tokens=self.drafts.accepted if self.drafts else 0,
            rejected_prediction_tokens=self.drafts.rejected if self.drafts else 0,
            queue_s=admitted - self.submitted_s,
            prefill_s=first - admitted,
            decode_s=now_s - first,
        )
