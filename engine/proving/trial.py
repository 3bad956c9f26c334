"""Drives an executor like a scheduler, and compares all logits with mlx-lm's."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any, NamedTuple

import mlx.core as mx

from engine import plan
from engine.executor.base import Executor, PendingStep
from engine.plan import (
    Chunk,
    CopyPage,
    Decode,
    Export,
    Plan,
    SaveState,
    Slot,
    StepResult,
    Stretch,
    Table,
)
from engine.proving.oracle import Reference
from engine.proving.replay import Replay, RoundingMismatch
from shared.wire import SamplingParams

PAGE_TOKENS = 16
SLOTS, PAGES_EACH = 4, 6
"""Slots, and the pages that each begins with."""
PAGES = SLOTS * PAGES_EACH
DRAFTED = 2
"""Tokens of a prompt that are computed as drafts."""
GREEDY = SamplingParams(temperature=0.0, seed=1)


_Input = tuple[Slot, Reference, int]
"""A decode: slot, sequence and step."""


class _Decoded(NamedTuple):
    """A dispatched step, the inputs whose logits are expected, and all logits."""

    inputs: tuple[_Input, ...]
    pending: PendingStep
    logits: dict[tuple[Slot, int], mx.array]  # by position


class StepFailed(Exception):
    """A chunk raised an exception, whose message this has."""


class Trial:
    """Runs references through an executor, in stages.

    With a ``replay``, logits are compared with its logits instead of the expected ones.
    """

    def __init__(
        self, executor: Executor, replay: Replay | None = None, stretch: int | None = None
    ) -> None:
        """With ``stretch``, chunks are computed that many layers at a time, with decodes in
        between, if the executor supports it."""
        self._executor, self._spec = executor, executor.spec
        self._replay = replay
        self._stretch = stretch or self._spec.layers
        self._logits: dict[tuple[Slot, int], mx.array] = {}
        executor.logits_observer = self._observe
        self._step = 0
        self._stage = ""
        self.max_difference = 0.0  # the largest `logits_distance` so far
        self.worst_stage = ""  # the stage of that distance

    def run_short(self, references: Sequence[Reference]) -> None:
        """Check whether rows disturb each other. For an executor that batches."""
        self.begin()
        self.join_and_leave(references, pace=1)
        self.draft(references)

    def run_all(self, references: Sequence[Reference]) -> None:
        """Run all stages on five ``references``, the first and last longer than two blocks."""
        if self._spec.max_sequences == 1:
            self.one_by_one(references)
            return
        self.begin()
        self.join_and_leave(references)
        self.draft(references)
        if self._spec.prefix_cache:
            self.rewind(references)
            self.reuse_a_prefix(references)
        self.move_pages(references)
        if self._spec.look_ahead:
            self.look_ahead(references)

    def begin(self) -> None:
        """Give every slot pages that are not neighbours."""
        tables = (Table(slot, 0, tuple(range(slot, PAGES, SLOTS))) for slot in range(SLOTS))
        self.run(num_pages=PAGES, tables=tuple(tables))

    # -- stages ----------------------------------------------------------------

    def one_by_one(self, references: Sequence[Reference]) -> None:
        """Run one sequence after the other, each prefilled in two chunks."""
        self._stage = "one at a time"
        for number, one in enumerate(references):
            self.prefill(number, one)
            for step in range(one.steps):
                self.decode((number, one, step))
            self.run(freed_slots=(number,))

    def join_and_leave(self, references: Sequence[Reference], pace: int = 2) -> None:
        """Add a sequence every ``pace`` steps; each leaves when it is done.

        There are three slots, so that later sequences reuse slots.
        """
        self._stage = "joining and leaving"
        free = [3, 0, 2]
        waiting = list(references)
        joining: dict[Slot, tuple[Reference, list[Chunk]]] = {}
        running: dict[Slot, tuple[Reference, int]] = {}
        turn = 0
        while waiting or joining or running:
            if waiting and free and turn % pace == 0:
                slot, one = free.pop(), waiting.pop(0)
                joining[slot] = (one, self._chunks(slot, one))
            turn += 1
            chunks = tuple(left.pop(0) for _, left in joining.values() if left)
            decodes = [(slot, one, step) for slot, (one, step) in running.items()]
            if decodes or chunks:
                self.decode(*reversed(decodes), chunks=chunks)
            for slot, one, step in decodes:
                running[slot] = (one, step + 1)
                if step + 1 == one.steps:
                    del running[slot]
                    free.append(slot)
            for slot in [slot for slot, (_, left) in joining.items() if not left]:
                running[slot] = (joining.pop(slot)[0], 0)

    def draft(self, references: Sequence[Reference]) -> None:
        """Compute two rows with the right tokens as drafts, in different numbers. All except the
        last of a prompt are random, so most are rejected. One row goes on."""
        self._stage = "drafts"
        one, other = references[:2]
        slots = 1, 2
        prompt, rest = one.prompt[:-DRAFTED], one.prompt[-DRAFTED:]
        before = replace(one, prompt=prompt, continuation=rest + one.continuation)
        self.prefill(slots[0], before)
        self.prefill(slots[1], other)
        decodes = (
            _decode(slots[0], before, 0, drafts=DRAFTED + 1),
            _decode(slots[1], other, 0, drafts=1),
        )
        pairs = (slots[0], one), (slots[1], other)
        inputs = tuple((*pair, step) for pair in pairs for step in (0, 1))
        pending = self._executor.dispatch(self._plan(decodes=decodes))
        found = self._read(_Decoded(inputs, pending, self._logits))
        if found.run_lengths[1] == 1:  # its draft is rejected
            self.decode((slots[1], other, 1))

    def rewind(self, references: Sequence[Reference]) -> None:
        """Rewind one row while another continues."""
        self._stage = "rewinding"
        back, other = (2, references[4]), (0, references[1])
        self.prefill(*back)
        self.prefill(*other)
        self.decode((*other, 0), (*back, 0), keep=(SaveState(back[0], back[1].position(1), 20),))
        for step in range(1, back[1].steps - 1):
            self.decode((*back, step), (*other, step))
        if self._spec.state_bytes:
            self.run(state_restores=(plan.RestoreState(back[0], back[1].position(1), 20),))
        self.decode((*back, 1), (*other, back[1].steps - 1))

    def reuse_a_prefix(self, references: Sequence[Reference]) -> None:
        """Start two slots from two pages of the last sequence, which were exported as bytes. Both
        read the same pages."""
        self._stage = "reusing a prefix"
        one, source = references[4], 2
        end, step = 2 * PAGE_TOKENS, min(2 * PAGE_TOKENS, self._spec.max_chunk_tokens)
        for start in range(0, end - step, step):
            self.run(chunks=(_chunk(source, one, start, start + step),))
        pages = tuple(Export(1 + i, source + i * SLOTS) for i in range(2 * self._spec.keeps_kv))
        has_state = bool(self._spec.state_bytes)
        saved = self.run(
            chunks=(_chunk(source, one, end - step, end),),
            state_saves=(SaveState(source, end, 3),) * has_state,
            exports=(*pages, *(Export(3),) * has_state),
        )
        inserts = tuple(
            plan.Insert(
                number + 10,
                tuple(bytes(part) for part in parts),
                None if number == 3 else PAGES - 1 + number,
            )
            for number, parts in saved.exported
        )
        self.prefill(source, references[0])
        tables = tuple(
            Table(slot, 0, (PAGES, PAGES + 1, *range(slot, PAGES - 2 * SLOTS, SLOTS)))
            for slot in (1, 3)
        )
        self.run(num_pages=PAGES + 2, tables=tables, inserts=inserts)
        for number, target in enumerate((1, 3)):
            self.run(state_restores=(plan.RestoreState(target, end, 13),) * has_state)
            for start in range(end, len(one.prompt) - 1, self._spec.max_chunk_tokens):
                until = min(start + self._spec.max_chunk_tokens, len(one.prompt) - 1)
                self.run(chunks=(_chunk(target, one, start, until),))
            for step in range(one.steps):
                beside = () if number else ((source, references[0], step),)
                self.decode((target, one, step), *beside)
        self.begin()

    def move_pages(self, references: Sequence[Reference]) -> None:
        """Move the pages of a sequence so that there are fewer pages, and copy the part of a page
        that it has, beside a sequence whose pages stay."""
        self._stage = "moving pages"
        one, other = references[0], references[2]
        self.prefill(3, one)
        self.prefill(1, other)
        self.decode((3, one, 0), (1, other, 0))
        pages = range(0, PAGES - SLOTS, SLOTS)
        last, end = divmod(one.position(1) - 1, PAGE_TOKENS)
        table = (*pages[:last], 2, *pages[last + 1 :])
        self.run(
            moved_pages=tuple(CopyPage(page + 3, page, PAGE_TOKENS) for page in pages),
            num_pages=PAGES - SLOTS,
            tables=(Table(3, 0, table), Table(1, PAGES_EACH - 1, ())),
            copies=(CopyPage(pages[last], 2, end + 1),),
        )
        for step in range(1, one.steps):
            self.decode((3, one, step), (1, other, step))
        self.begin()

    def look_ahead(self, references: Sequence[Reference]) -> None:
        """Let the number of pages grow and shrink, and dispatch each decode before the previous one
        is read."""
        self._stage = "looking ahead"
        beside, *both = 2, (0, references[4]), (1, references[1])
        self.prefill(*both[0])
        self.run(num_pages=2 * PAGES)
        self.prefill(*both[1])
        self.prefill(beside, references[2])
        last = both[0][1].steps - 1
        before = self._dispatch(tuple((*one, 0) for one in both))
        before.pending.finish()
        for step in range(1, last):
            decoded = self._dispatch(tuple((*one, step) for one in both))
            self._read(before, early=True)
            decoded.pending.finish()
            before = decoded
        self._read(before)
        self.run(num_pages=PAGES)
        self.decode(*((*one, last) for one in both))

    # -- steps -----------------------------------------------------------------

    def run(self, **parts: Any) -> StepResult:
        """Run a plan, or several if its chunks are computed in parts."""
        last = {name: parts.pop(name, ()) for name in ("state_saves", "exports")}
        if not parts.get("chunks") or self._stretch >= self._spec.layers:
            return self._run(**parts, **last)
        number = self._begin(**parts)
        for end in self._ends_after_first():
            is_last = end >= self._spec.layers
            found = self._run(stretches=(Stretch(number, end),), **(last if is_last else {}))
        return found

    def _run(self, **parts: Any) -> StepResult:
        return _checked(self._executor.dispatch(self._plan(**parts)))

    def _begin(self, **parts: Any) -> int:
        """Compute the first part of chunks. Return the number of their pass."""
        self._run(**parts, stretches=(Stretch(self._step + 1, self._stretch),))
        return self._step

    def _ends_after_first(self) -> Iterator[int]:
        for start in range(self._stretch, self._spec.layers, self._stretch):
            yield start + self._stretch

    def _plan(self, **parts: Any) -> Plan:
        self._step += 1
        return Plan(step=self._step, **parts)

    def prefill(self, slot: Slot, one: Reference) -> None:
        for chunk in self._chunks(slot, one):
            self.run(chunks=(chunk,))

    def _chunks(self, slot: Slot, one: Reference) -> list[Chunk]:
        return list(_chunks(slot, one, self._spec.max_chunk_tokens))

    def decode(
        self,
        *decodes: _Input,
        chunks: tuple[Chunk, ...] = (),
        keep: tuple[SaveState, ...] = (),
    ) -> StepResult:
        """Run decodes (slot, reference, step) in one plan, and compare their logits.

        ``keep`` is ignored if the model has no recurrent state.
        """
        state_saves = keep if self._spec.state_bytes else ()
        if not chunks or self._stretch >= self._spec.layers:
            return self._read(self._dispatch(decodes, chunks=chunks, state_saves=state_saves))
        number = self._begin(chunks=chunks)
        second, *others = self._ends_after_first()
        stretches = (Stretch(number, second),)
        found = self._read(self._dispatch(decodes, stretches=stretches, state_saves=state_saves))
        for end in others:
            self._run(stretches=(Stretch(number, end),))
        return found

    def _dispatch(self, decodes: tuple[_Input, ...], **parts: Any) -> _Decoded:
        plan = self._plan(
            decodes=tuple(_decode(slot, one, step) for slot, one, step in decodes),
            **parts,
        )
        pending = self._executor.dispatch(plan)
        return _Decoded(decodes, pending, self._logits)

    def _read(self, decoded: _Decoded, *, early: bool = False) -> StepResult:
        """Wait for a step, and compare the logits of its decodes."""
        result = _checked(decoded.pending, early=early)
        for slot, one, step in decoded.inputs:
            logits = decoded.logits[slot, one.position(step)]
            difference = self._difference(slot, one, step, logits)
            if not difference <= self.max_difference:
                self.max_difference, self.worst_stage = difference, self._stage
        return result

    def _difference(self, slot: Slot, one: Reference, step: int, logits: mx.array) -> float:
        if self._replay is None:
            return one.difference(step, logits)
        try:
            return self._replay.difference(slot, one, step, logits)
        except RoundingMismatch as wrong:
            raise RoundingMismatch(f"{self._stage}: {wrong}") from wrong

    def _observe(self, decodes: Sequence[Decode], logits: mx.array) -> None:
        rows = zip(decodes, logits, strict=True)
        self._logits = {(decode.slot, decode.position): row for decode, row in rows}


def _checked(pending: PendingStep, *, early: bool = False) -> StepResult:
    """Wait for a step. ``early``: see `PendingStep.read`. Raises `StepFailed`."""
    result = pending.read(early=early)
    if result.failed:
        raise StepFailed(result.failed[0][1])
    return result


def _chunks(slot: Slot, one: Reference, longest: int) -> tuple[Chunk, ...]:
    """Return the prompt without its last token, in two chunks if it is long enough, or in more if
    those are longer than ``longest``."""
    length = len(one.prompt) - 1
    middle = length * 2 // 5
    cuts = [0, *range(longest, middle, longest), middle]
    cuts += [*range(middle + longest, length, longest), length]
    return tuple(_chunk(slot, one, a, b) for a, b in pairwise(cuts) if b > a)


def _chunk(slot: Slot, one: Reference, start: int, end: int) -> Chunk:
    return Chunk(slot, start, one.prompt[start:end], adapter=one.adapter)


def _decode(slot: Slot, one: Reference, step: int, drafts: int = 0) -> Decode:
    position, token = one.position(step), one.token(step)
    drafted = tuple(one.token(step + 1 + i) for i in range(drafts))
    return Decode(slot, position, token, step, GREEDY, adapter=one.adapter, drafts=drafted)
