"""The executor for models whose KV fits into pages, and whose recurrent state has one size."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import mlx.core as mx

from engine.adapters.places import AdapterStore
from engine.batch.ragged import RaggedBatch, Row
from engine.cache.layout import Layout
from engine.cache.pages import StoredKV
from engine.cache.slots import Slots
from engine.cache.snapshots import SnapshotStore
from engine.executor.base import Executor
from engine.executor.decoding import DecodePasses, DecodeRows
from engine.executor.guessing import Guesser
from engine.executor.line import DeviceLine, Piece
from engine.executor.pictures import PictureEmbeddings
from engine.executor.prefill import Passes, Prefill
from engine.executor.spec import pads_chunks, spec_of
from engine.executor.steps import BatchedStep, DecodeOutput, LateResults
from engine.executor.stopwatch import StepClock, Stopwatch
from engine.mtp.head import MTPHead
from engine.plan import CopyPage, Decode, Export, Plan, Slot
from engine.sampling.sampler import Sampler

FIRST_ARRAYS = 2
"""The pages of this many layers are dispatched before the rest of a step: enough to keep the device
busy until the previous step's first tokens are sent."""


class BatchedExecutor(Executor):
    """Runs the decodes of a plan as one batch, and its chunks as another, padded to the longest.

    Chunks, or even decodes, run one by one if the model needs it. Logits of a chunk are
    computed only if it asks for log-probabilities of the prompt: MLX is lazy, and for other
    chunks only the pages are evaluated.
    """

    def __init__(
        self,
        model: Any,
        layout: Layout,
        page_tokens: int,
        batch_class: type[RaggedBatch],
        head: MTPHead | None = None,
    ) -> None:
        """If there is a ``head``, its layer is the last of ``layout``."""
        self._guesser = None if head is None else Guesser(model, head, layout, batch_class)
        self._model = model if self._guesser is None else self._guesser.model
        self.layout = layout
        self._page_tokens = page_tokens
        self.batch_class = batch_class
        self.spec = spec_of(model, layout, batch_class, page_tokens, guesses=head is not None)
        self._sampler, self._line = Sampler(), DeviceLine(waits=not self.spec.look_ahead)
        self._pads_chunks = pads_chunks(layout, batch_class)
        self._slots = self._new_slots()
        self._passes = Passes(
            model=self._model,
            slots=self._slots,
            batch=self._batch,
            together=self._pads_chunks,
        )
        self.reset()
        self._stopwatch = Stopwatch(asynchronous=self.spec.look_ahead)
        self._clock = StepClock()

    def use_pictures(self, pictures: PictureEmbeddings) -> None:
        """Accept plans with pictures from now on."""
        self._passes.pictures = pictures

    def reset(self) -> None:
        self._passes.clear()
        self._slots = self._passes.slots = self._new_slots()
        self._pages = self._slots.pages
        self._snapshots = SnapshotStore(self.layout, self._slots.states)
        self._sampler.reset()
        if self._guesser is not None:
            self._guesser.reset(self._slots)
        self._line.abandon()
        self._late = LateResults()
        self._last: BatchedStep | None = None
        mx.clear_cache()

    def _new_slots(self) -> Slots:
        return Slots(self.batch_class.pages_class(self.layout, self._page_tokens))

    @property
    def host_bytes(self) -> int:
        return 0 if self._pages.contents else self._pages.nbytes

    @property
    def deterministic(self) -> bool:
        return self.batch_class.deterministic

    def make_deterministic(self) -> bool:
        return self.batch_class.make_deterministic()

    def adapter_store(self, store: AdapterStore) -> AdapterStore:
        return self.batch_class.adapter_store(store)

    def release_weights(self, files: Sequence[Path] = ()) -> None:
        self.batch_class.release_weights(files)

    def dispatch(self, plan: Plan) -> BatchedStep:
        if self._last is not None:
            self._last.finish()
        started = self._line.begin(self._last is not None and self._last.is_continued_by(plan))
        self._stopwatch.start()
        self._export(plan.exports_first)
        for number in plan.dropped_passes:
            self._passes.close(number)
        if self._passes.pictures is not None:
            self._passes.pictures.drop(plan)
        for snapshot in plan.evictions:
            self._snapshots.evict(snapshot)
        self._slots.free(plan.freed_slots)
        self._sampler.free_slots(plan.freed_slots)
        if self._guesser is not None:
            self._guesser.free_slots(plan.freed_slots)
        failed = self._prepare(plan)
        step = BatchedStep(
            plan=plan,
            ahead=self.spec.look_ahead,
            line=self._line,
            late=self._late,
            stopwatch=self._stopwatch,
            clock=self._clock,
            started=started,
            failed=failed,
            prefill=Prefill(plan, self._passes, failed, self._stopwatch, self._line),
        )
        self._compute_decodes(step)
        self._last = step
        if not step.ahead:
            step.finish()
        step.add_spent(self._stopwatch.stop())
        return step

    def _prepare(self, plan: Plan) -> list[tuple[Slot, str]]:
        """Run everything that comes before the decodes. Return the slots whose state was never
        saved: with look-ahead the scheduler learns of a failed save one plan late."""
        if plan.moved_pages or plan.num_pages or plan.copies or plan.inserts or plan.state_restores:
            self.wait()  # pages are written in place
        with self._stopwatch.computing():
            for copy in plan.moved_pages:
                self._pages.copy(*_fields(copy))
            if plan.num_pages:
                self._pages.resize(plan.num_pages)
            for table in plan.tables:
                self._slots.change(table)
            for copy in plan.copies:
                self._pages.copy(*_fields(copy))
            for insert in plan.inserts:
                if insert.page is None:
                    self._snapshots.insert(insert.block_id, insert.payload)
                else:
                    self._pages.insert(insert.page, insert.payload)
            if plan.copies or plan.inserts:
                self._line.send(self._pages.contents)
                self._line.wait()
            for unpack in plan.unpacked:
                self._pages.unpack(unpack.slot, unpack.tokens)
            return self._restore_states(plan)

    def _compute_decodes(self, step: BatchedStep) -> None:
        """Compute the decodes of ``step``, and save the states that its chunks do not change.

        With look-ahead, most of it is dispatched by `BatchedStep.finish`."""
        plan = step.plan
        if plan.decodes:
            self._decode(step)
        changed = step.prefill.slots
        with self._stopwatch.computing():
            step.unsent_kept += self._save(plan, lambda slot: slot not in changed, step.failed)
        if (step.unsent or step.unsent_kept) and step.ahead and step.piece is None:
            self._wait_for_pages()
            # The first layers are sent separately: the device starts while the rest is dispatched.
            first = self._pages.contents[:FIRST_ARRAYS] if plan.decodes else []
            step.piece = self._line.send(first, since=step.started)
        elif not step.prefill:
            step.piece = self._line.piece
        step.save_chunks = partial(self._save_chunks, plan, changed, step.failed)

    def _save(
        self, plan: Plan, wanted: Callable[[Slot], bool], failed: Sequence[tuple[Slot, str]]
    ) -> list[list[mx.array]]:
        """Save the states of the ``wanted`` slots that did not fail. Return the arrays to
        evaluate."""
        broken = {slot for slot, _ in failed}
        return [
            self._snapshots.save(keep.slot, keep.snapshot_id)
            for keep in plan.state_saves
            if wanted(keep.slot) and keep.slot not in broken
        ]

    def _save_chunks(
        self, plan: Plan, changed: set[Slot], failed: Sequence[tuple[Slot, str]]
    ) -> Piece | None:
        """Save the states that the chunks of ``plan`` computed, and export what it exports. Return
        the piece of work, if there is one."""
        piece = None
        with self._stopwatch.computing():
            for saved in self._save(plan, changed.__contains__, failed):
                piece = self._line.send(saved, kept=True)
        self._export(plan.exports)
        return piece

    def wait(self) -> None:
        if self.spec.look_ahead:
            with self._stopwatch.waiting():
                self._line.wait()

    def _wait_for_pages(self) -> None:
        """Wait until pages can be written in place, see `DeviceLine`."""
        if self.spec.look_ahead:
            with self._stopwatch.waiting():
                self._line.wait_for_pages()

    def read_slot(self, slot: Slot, length: int) -> list[StoredKV]:
        """Return keys and values of each layer at the first ``length`` positions of ``slot``.

        Arrays are (1, kv_heads, length, dim), as attention reads them, with their scales. For
        proofs. The caller must not keep them."""
        table = self._slots.tables[slot]
        return [self._pages.read(n, table, length) for n in range(len(self.layout.arrays))]

    def _export(self, exports: Iterable[Export]) -> None:
        """Return the bytes of pages and snapshots with a result, as they are once all that was
        dispatched is done. A snapshot whose sequence failed does not exist."""
        found = {
            each.block_id: self._snapshots.exporter(each.block_id)
            if each.page is None
            else self._pages.exporter(each.page, each.positions)
            for each in exports
            if each.page is not None or each.block_id in self._snapshots
        }
        if arrays := self._pages.take_exporting():
            self._line.send(arrays, kept=True)
        for block_id, exporter in found.items():
            self._late.add_export(self._line.piece, block_id, exporter)

    def _restore_states(self, plan: Plan) -> list[tuple[Slot, str]]:
        """Run the plan's restores of states. Return the slots whose snapshots were never saved."""
        failed = []
        for restore in plan.state_restores:
            if restore.snapshot_id in self._snapshots:
                state = self._snapshots.restore(restore.slot, restore.snapshot_id)
            else:
                failed.append((restore.slot, "the state of its prefix could not be computed"))
                state = self._snapshots.reset(restore.slot)  # its decode may be in this plan
            self._line.send(state, holds_pages=False)
        return failed

    def _decode(self, step: BatchedStep) -> None:
        """Compute the decodes of ``step``. Adds the arrays to evaluate to its ``unsent``, and
        sets ``piece`` if the pass has been dispatched."""
        rows = DecodeRows.of(step.plan.decodes)
        ordered = rows.decodes
        inputs = self._inputs(ordered)
        unseen = any(d.constrained and d.token_id is None for d in ordered)
        masks = None
        if not unseen:
            masks = self._sampler.start_masks(ordered, [d.token_id for d in ordered])
        elif not step.ahead:
            mx.async_eval(inputs)  # separately: reading them would wait for the whole pass
        with self._stopwatch.computing():
            passes = self._decode_passes(step)
            drafted = [d.slot for d in step.plan.decodes if d.drafts]
            kept = self._slots.states.keep(drafted)
            logits, states = passes.logits(rows, inputs)
            if not step.ahead:
                mx.eval(logits)
        if unseen:
            if step.piece is None:
                self._wait_for_pages()
            known = self._known_tokens(ordered) or inputs.tolist()
            computed = [logits, states, self._slots.contents]
            step.piece = self._line.send(computed, since=step.started)
            masks = self._sampler.start_masks(ordered, known)
        if self.logits_observer is not None:
            self.logits_observer(ordered, logits)
        with self._stopwatch.sampling():
            sampled = self._sampler.sample(logits, ordered, inputs, masks)
            if not step.ahead:
                mx.eval(sampled.arrays)
        step.decoded = DecodeOutput(sampled, rows)
        wants = self._guesser is not None and any(d.guesses for d in step.plan.decodes)
        if wants or (drafted and self.layout.states):
            with self._stopwatch.computing():
                passes.send([logits, sampled.tokens, states, self._slots.contents])
                runs = step.decoded.runs
                if drafted and self.layout.states:
                    passes.rewind(rows, inputs, runs, kept)
                if wants and self._guesser is not None:
                    step.decoded.guesses = self._guesser.guess(
                        rows, runs, sampled.tokens, self._sampler, passes.send
                    )
                states = []
        # Any token of a run will do: the next plan names its input.
        lasts = {decode.slot: row for row, decode in enumerate(ordered)}
        self._slots.set_last_tokens(list(lasts), sampled.tokens[mx.array(list(lasts.values()))])
        step.failed += [(ordered[row].slot, why) for row, why in sampled.failed]
        step.unsent.append([sampled.arrays, states, self._slots.contents])

    def _known_tokens(self, decodes: Sequence[Decode]) -> list[int] | None:
        """Return the input tokens, if those missing in the plan are already in host memory: the
        previous step sampled them, and was waited for."""
        if not self.spec.look_ahead or self._last is None or self._last.decoded is None:
            return None
        last = self._last.decoded.tokens_by_slot()
        known = [last.get(d.slot) if d.token_id is None else d.token_id for d in decodes]
        return None if None in known else [token for token in known if token is not None]

    def _decode_passes(self, step: BatchedStep) -> DecodePasses:
        def send(arrays: list[Any]) -> None:
            self._wait_for_pages()
            step.piece = self._line.send(arrays, since=step.started)

        return DecodePasses(
            model=self._model,
            slots=self._slots,
            batch=self._batch,
            one_row=self.batch_class.one_row_per_pass,
            pads=self._pads_chunks,
            has_states=bool(self.layout.states),
            send=send,
        )

    def _inputs(self, decodes: Sequence[Decode]) -> mx.array:
        """Return the input tokens (rows,): given by the plan, or sampled last in the slot."""
        given = mx.array([0 if d.token_id is None else d.token_id for d in decodes], mx.int32)
        if all(d.token_id is not None for d in decodes):
            return given
        last = self._slots.last_tokens[mx.array([d.slot for d in decodes])]
        return mx.where(mx.array([d.token_id is None for d in decodes]), last, given)

    def _batch(self, rows: Sequence[Row]) -> RaggedBatch:
        return self.batch_class(self.layout, self._slots, rows)


def _fields(copy: CopyPage) -> tuple[int, int, int]:
    return copy.source, copy.target, copy.positions
