"""A plan being built, and its record until its result arrives."""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from engine import plan
from engine.scheduler.config import SchedulerConfig
from engine.scheduler.memory import Memory
from engine.scheduler.planning.passes import OpenPass, PlannedChunk
from engine.scheduler.planning.pictures import axes_of, position_shift, shown_parts
from engine.scheduler.pools.page_pool import Page, PageContent, Storable
from engine.scheduler.pools.snapshot_pool import Snapshot
from engine.scheduler.sequences.sequence import Sequence
from engine.scheduler.timing.chunks import share_of_time
from engine.speculation.source import Proposal
from shared import wire


class PlannedStretch(NamedTuple):
    """A part of a pass."""

    sizes: list[tuple[int, int]]  # (start, tokens) of each chunk of the pass
    share: float  # fraction of its time
    scored: bool  # whether prompt log-probabilities are computed, which takes longer
    charged_s: float | None  # predicted seconds, if streams wait meanwhile; None if none do
    begins: bool  # whether it is the first of its pass


class PlannedEncoding(NamedTuple):
    """A part of the encoding of a picture."""

    size_bytes: float  # of the encoded arrays, times the fraction of layers
    is_last: bool
    charged_s: float | None  # as in `PlannedStretch`


@dataclass(eq=False, slots=True)
class InFlightStep:
    """The record of a plan in flight: its sequences, and what its result will complete."""

    number: int
    decodes: list[Sequence] = field(default_factory=list)
    drafts: dict[Sequence, Proposal] = field(default_factory=dict)  # sequences that have drafts
    guessing: set[Sequence] = field(default_factory=set)  # whose next tokens are guessed
    stretch: PlannedStretch | None = None
    pass_number: int | None = None  # of the stretch's pass
    encoding: PlannedEncoding | None = None
    completed: list[PlannedChunk] = field(default_factory=list)  # chunks whose pass ends here
    ends: list[PlannedChunk] = field(default_factory=list)  # that its decodes compute
    ends_charged_s: float | None = None  # as in `PlannedStretch`
    begins_alone: bool = False
    """Whether, with look-ahead, no decode was in flight when it was planned, so that the device
    waits while it is built."""
    has_waited: set[Sequence] = field(default_factory=set)  # decodes left out of the plan before
    fills_memory: bool = False
    """Whether it waits for new memory or for bytes to be copied into it, so that its time says
    little about the next ones."""
    by_slot: dict[plan.Slot, Sequence] = field(default_factory=dict)
    shared: dict[Sequence, list[bytes]] = field(default_factory=dict)
    """The blocks of pages that sequences got from others."""
    named: dict[Sequence, list[bytes]] = field(default_factory=dict)
    """The blocks of sequences that others can find from the next plan on."""
    filled: dict[Sequence, list[PageContent]] = field(default_factory=dict)
    """The contents of the pages that these blocks fill: they may be on their way to the kvstore."""
    restored: dict[Sequence, list[Snapshot]] = field(default_factory=dict)
    saved: dict[Sequence, list[Snapshot]] = field(default_factory=dict)
    """Snapshots that stay pinned until the result arrives."""
    discarded: set[Sequence] = field(default_factory=set)
    """Sequences whose part of the result is ignored."""
    invalid: list[Snapshot] = field(default_factory=list)
    """Snapshots to remove, saved from slots that held wrong state."""

    def check(self, result: plan.StepResult) -> None:
        """Raise ValueError if ``result`` cannot belong to this step."""
        if len(self.decodes) != len(result.run_lengths):
            raise ValueError(f"step {result.step} has another number of tokens than decodes")
        if result.guesses and len(result.guesses) != len(self.decodes):
            raise ValueError(f"step {result.step} has another number of guesses than decodes")
        if any(slot not in self.by_slot for slot, _ in result.failed):
            raise ValueError(f"step {result.step} failed for a slot that it did not use")
        if any(scored.slot not in self.by_slot for scored in result.prompt_logprobs):
            raise ValueError(f"step {result.step} scored a slot that it did not use")


class PlanBuilder:
    """Collects the operations of one plan."""

    def __init__(self, number: int, config: SchedulerConfig) -> None:
        self._config = config
        self.step = InFlightStep(number)
        self.freed_slots: list[plan.Slot] = []
        self.inserted: list[tuple[Page, plan.Payload, SequenceOf[bytes]]] = []
        """Pages from the kvstore, and the hashes of their blocks."""
        self.inserted_states: list[tuple[Snapshot, plan.Payload]] = []
        self.state_restores: list[plan.RestoreState] = []
        self.decodes: list[plan.Decode] = []
        self.dropped_passes: list[int] = []
        self.dropped_pictures: list[bytes] = []
        self.encodes: list[plan.EncodePicture] = []
        self.chunks: list[plan.Chunk] = []
        self.stretches: list[plan.Stretch] = []
        self.state_saves: list[plan.SaveState] = []
        self.exported: list[Storable] = []
        self.preempted: list[Sequence] = []
        self.changed = False
        """Whether anything changed, even if nothing was planned: another attempt may then plan
        more."""

    def keep_pinned(self, seq: Sequence, snapshot: Snapshot) -> None:
        """Keep ``snapshot`` pinned until the plan is built, because it inserts it."""
        self.step.restored.setdefault(seq, []).append(snapshot)

    def restore_state(self, seq: Sequence, position: int, snapshot: Snapshot) -> None:
        """Copy ``snapshot``, pinned for this, into the slot's recurrent state."""
        slot = seq.held_slot
        self.state_restores.append(plan.RestoreState(slot, position, snapshot.id))
        self.step.restored.setdefault(seq, []).append(snapshot)
        self.step.by_slot[slot] = seq

    def preempt(self, seq: Sequence) -> None:
        """Note that ``seq`` loses its slot with this plan, which nothing else uses."""
        self.preempted.append(seq)
        self.state_restores = [one for one in self.state_restores if one.slot != seq.slot]

    def decode(self, seq: Sequence, proposal: Proposal | None, guesses: int) -> None:
        """Decode the next token of ``seq``, with the drafts of ``proposal``, and let the executor
        guess so many tokens after them."""
        request, position, slot = seq.request, seq.next_position, seq.held_slot
        index = position + 1 - seq.num_prompt_tokens
        history: tuple[int, ...] | None = None
        needs_history = request.sampling.needs_history or request.grammar is not None
        if needs_history and not seq.history_sent:  # with the first decode in a slot
            seq.history_sent = True
            history = tuple(seq.token_ids[:position])
        thinking = seq.follow_thinking()
        self.decodes.append(
            plan.Decode(
                slot=slot,
                position=position,
                token_id=None if seq.num_inflight else seq.token_ids[position],
                output_index=index,
                sampling=request.sampling,
                forbidden=self._forbidden(request, index),
                logprobs=request.logprobs,
                logprob_token_ids=request.logprob_token_ids,
                history=history,
                constrained=request.grammar is not None,
                grammar=None if history is None else request.grammar,
                forced=thinking.forced() if thinking and not seq.num_inflight else None,
                drafts=proposal.tokens if proposal else (),
                guesses=guesses,
                shift=position_shift(seq, position) if seq.pictures else 0,
                adapter=seq.adapter,
                before=tuple(seq.token_ids[seq.num_computed_tokens : position]),
            )
        )
        self.step.decodes.append(seq)
        if proposal is not None:
            self.step.drafts[seq] = proposal
        if guesses:
            self.step.guessing.add(seq)
        self.step.by_slot[slot] = seq

    def _forbidden(self, request: wire.Submit, index: int) -> tuple[int, ...]:
        """Return the tokens that output number ``index`` must not be."""
        early = index < request.min_tokens
        tokens = set(request.stop_token_ids) if early else set()
        if request.grammar is not None:
            # The last resort: these end the output even if the request set no stop token.
            ends = self._config.eos_token_ids
            tokens.update(ends if early else set(ends) - set(request.stop_token_ids))
        return tuple(sorted(tokens))

    def chunk(self, seq: Sequence, end: int) -> None:
        """Compute the prompt of ``seq`` up to ``end`` in a pass that begins in this plan."""
        start = seq.num_computed_tokens
        target_ids: tuple[int, ...] = ()
        if seq.needs_prompt_logprobs:
            target_ids = tuple(seq.request.token_ids[start + 1 : end + 1])
        self.chunks.append(
            plan.Chunk(
                slot=seq.held_slot,
                start=start,
                token_ids=tuple(seq.token_ids[start:end]),
                target_ids=target_ids,
                logprobs=seq.request.prompt_logprobs or 0 if target_ids else 0,
                pictures=shown_parts(seq, start, end),
                shift=position_shift(seq, start) if seq.pictures else 0,
                axes=axes_of(seq, start, end),
                adapter=seq.adapter,
            )
        )

    def stretch(self, one: OpenPass, count: int, layers: int, charged_s: float | None) -> None:
        """Compute ``count`` more of the ``layers`` of a pass, whose chunks are in this plan or
        an earlier one. ``charged_s``: see `PlannedStretch`."""
        begins = not one.layers_done
        share = share_of_time(one.layers_done, one.layers_done + count, layers)
        one.layers_done += count
        if count < layers:
            self.stretches.append(plan.Stretch(one.number, one.layers_done))
        scored = any(chunk.seq.needs_prompt_logprobs for chunk in one.chunks)
        self.step.pass_number = one.number
        self.step.stretch = PlannedStretch(one.sizes, share, scored, charged_s, begins)
        for chunk in one.chunks:
            self.step.by_slot[chunk.seq.held_slot] = chunk.seq
        if one.layers_done == layers:
            self.step.completed = list(one.chunks)

    @property
    def has_prompts(self) -> bool:
        """Whether any part of a prompt is computed."""
        return self.step.stretch is not None or self.step.encoding is not None

    def encode(self, op: plan.EncodePicture, encoding: PlannedEncoding) -> None:
        self.encodes.append(op)
        self.step.encoding = encoding

    def save_state(self, seq: Sequence, snapshot: Snapshot) -> None:
        """Copy the slot's recurrent state into ``snapshot``."""
        state_save = plan.SaveState(seq.held_slot, seq.num_computed_tokens, snapshot.id)
        self.state_saves.append(state_save)
        self.step.saved.setdefault(seq, []).append(snapshot)
        self.step.by_slot[seq.held_slot] = seq

    def build(self, memory: Memory) -> tuple[plan.Plan, InFlightStep] | None:
        """Return the plan, including the operations of ``memory``, and its record; None if the
        plan is empty. Snapshots pinned for restoring are unpinned, because plans run in order."""
        for snapshots in reversed(self.step.restored.values()):
            for snapshot in reversed(snapshots):
                memory.snapshots.unpin(snapshot)
        changes = memory.take_plan()
        inserts, names = self._inserts(memory)
        operations: dict[str, Any] = {
            name: tuple(getattr(self, name))
            for name in (
                *("freed_slots", "state_restores", "decodes", "encodes", "chunks", "stretches"),
                *("dropped_passes", "dropped_pictures", "state_saves"),
            )
        }
        operations |= changes._asdict() | {
            "inserts": tuple(inserts),
            "exports": tuple(one.export for one in self.exported),
            "names": (*names, *(one.name for one in self.exported), *changes.names),
        }
        if not any(operations.values()):
            return None
        self.step.fills_memory = bool(changes.num_pages or inserts or changes.unpacked)
        return plan.Plan(step=self.step.number, **operations), self.step

    def _inserts(self, memory: Memory) -> tuple[list[plan.Insert], list[plan.BlockName]]:
        inserts, names = [], []
        for page, payload, hashes in self.inserted:
            inserts.append(plan.Insert(memory.next_id(), payload, page.number))
            names.append(plan.BlockName(inserts[-1].block_id, hashes[-1]))
        for snapshot, payload in self.inserted_states:
            inserts.append(plan.Insert(snapshot.id, payload))
            names.append(snapshot.name)
        return inserts, names
