"""The executor for models whose KV and recurrent state fit into slots."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import mlx.core as mx

from engine.adapters.places import AdapterStore
from engine.batch.ragged import RaggedBatch, Row
from engine.cache import host_blocks
from engine.cache.blocks import BlockStore
from engine.cache.layout import Layout
from engine.cache.slabs import Slab, Slabs, StoredKV
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
from engine.executor.unchecked import UncheckedSlots
from engine.mtp.head import MTPHead
from engine.plan import CopyPositions, Decode, Plan, Slot
from engine.sampling.sampler import Sampler, nan_at

FIRST_ARRAYS = 4
"""This many of a slab's first arrays, two layers or more, are dispatched before the rest of a
step: enough to keep the device busy until the previous step's first tokens are sent."""


class BatchedExecutor(Executor):
    """Runs the decodes of a plan as one batch, and its chunks as another, padded to the longest.

    Chunks, or even decodes, run one by one if the model needs it. Logits of a chunk are
    computed only if it asks for log-probabilities of the prompt: MLX is lazy, and for other
    chunks only the slabs are evaluated.
    """

    def __init__(
        self,
        model: Any,
        layout: Layout,
        block_size: int,
        batch_class: type[RaggedBatch],
        head: MTPHead | None = None,
    ) -> None:
        """If there is a ``head``, its layer is the last of ``layout``."""
        self._guesser = None if head is None else Guesser(model, head, layout, batch_class)
        self._model = model if self._guesser is None else self._guesser.model
        self.layout = layout
        self._block_size = block_size
        self.batch_class = batch_class
        self.spec = spec_of(model, layout, batch_class, block_size, guesses=head is not None)
        self._sampler, self._line = Sampler(), DeviceLine(waits=not self.spec.look_ahead)
        self._pads_chunks = pads_chunks(layout, batch_class)
        self._passes = Passes(
            model=self._model,
            slabs=Slabs(),
            batch=self._batch,
            together=self._pads_chunks,
            longest=layout.longest_pass,
        )
        self.reset()
        self._stopwatch = Stopwatch(asynchronous=self.spec.look_ahead)
        self._clock = StepClock()

    def use_pictures(self, pictures: PictureEmbeddings) -> None:
        """Accept plans with pictures from now on."""
        self._passes.pictures = pictures

    def reset(self) -> None:
        self._passes.clear()
        self._slabs = self._passes.slabs = Slabs()
        self._blocks = BlockStore(self.layout, self._block_size, self.batch_class.writes_in_place)
        self._snapshots = SnapshotStore(self.layout, self._slabs.states)
        self._sampler.reset()
        if self._guesser is not None:
            self._guesser.reset(self._slabs)
        self._line.abandon()
        self._late = LateResults()
        self._unchecked = UncheckedSlots(any(layer.window is None for layer in self.layout.layers))
        self._last: BatchedStep | None = None
        mx.clear_cache()

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
        started = self._line.begin(self._last is not None and self._last.goes_on_in(plan))
        self._stopwatch.start()
        self._export((evict.block_id for evict in plan.evictions if evict.export), self._line.piece)
        for number in plan.dropped_passes:
            self._passes.close(number)
        if self._passes.pictures is not None:
            self._passes.pictures.drop(plan)
        for evict in plan.evictions:
            self._blocks.evict(evict.block_id)
            self._snapshots.evict(evict.block_id)
        for number in plan.freed_slabs:
            self._slabs.free(number)
        self._sampler.free_slabs(plan.freed_slabs)
        self._sampler.free_slots(plan.freed_slots)
        self._unchecked.freed(plan)
        if self._guesser is not None:
            self._guesser.follow(plan)
        failed = self._prepare_slots(plan)
        step = BatchedStep(
            plan=plan,
            ahead=self.spec.look_ahead,
            line=self._line,
            late=self._late,
            unchecked=self._unchecked,
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

    def _prepare_slots(self, plan: Plan) -> list[tuple[Slot, str]]:
        """Create slabs, and run everything that comes before the decodes. Return the slots whose
        blocks or state were never saved."""
        fills = plan.inserts or plan.restores or plan.state_restores or plan.moves or plan.copies
        if plan.resized_slabs or plan.new_slabs or fills:
            self.wait()  # what the plan frees is in use until then
        for resize in plan.resized_slabs:
            self._slabs.resize(resize.slab_id, resize.rows)
        make = partial(Slab, self.layout, in_place=self.batch_class.writes_in_place)
        for new in plan.new_slabs:
            slab = self._slabs[new.slab_id] = make(new.rows, new.capacity)
            if not self.spec.look_ahead:
                mx.eval(slab.contents)
        self._unchecked.clear_begun(plan, self._slabs)
        self._unchecked.computed(plan)
        with self._stopwatch.computing():
            for insert in plan.inserts:
                store = self._snapshots if insert.is_snapshot else self._blocks
                store.insert(insert.block_id, insert.payload)
            failed = self._restore(plan) + self._restore_states(plan)
            moved = [self._slabs.copy_row(m.source, m.target, m.length) for m in plan.moves]
            if moved:  # sent at once: a slab held by the move before would be copied whole
                self._line.send(moved)
            for move in plan.moves:
                self._sampler.move(move.source, move.target)
            self._copy(plan.copies)
            if (plan.moves or plan.copies) and not self.spec.look_ahead:
                self._line.wait()  # rows may be written outside MLX from now on
        return failed

    def _compute_decodes(self, step: BatchedStep) -> None:
        """Compute the decodes of ``step``, and save the slots that its chunks do not change.

        With look-ahead, most of it is dispatched by `BatchedStep.finish`."""
        plan = step.plan
        if plan.decodes:
            self._decode(step)
        changed = step.prefill.slots
        left = {restore.slot.slab_id for restore in plan.restores}
        left -= {*_slab_ids(plan.decodes), *(slot.slab_id for slot in changed)}
        step.unsent += [self._slabs[number].contents for number in sorted(left)]
        with self._stopwatch.computing():
            step.unsent_kept += self._save(plan, lambda slot: slot not in changed, step.failed)
        if (step.unsent or step.unsent_kept) and step.ahead and step.piece is None:
            self._wait_for_slabs()
            slabs = [self._slabs[number] for number in _slab_ids(plan.decodes)]
            # The first layers are sent separately: the device starts while the rest is dispatched.
            first = [slab.arrays[:FIRST_ARRAYS] for slab in slabs]
            step.piece = self._line.send(first, since=step.started)
        elif not step.prefill:
            step.piece = self._line.piece
        exported = self._export(plan.exports, self._line.piece)
        step.save_chunks = partial(
            self._save_chunks, plan, changed, step.failed, set(plan.exports) - exported
        )

    def _save(
        self, plan: Plan, wanted: Callable[[Slot], bool], failed: Sequence[tuple[Slot, str]]
    ) -> Iterator[list[mx.array]]:
        """Save the ``wanted`` slots that did not fail. Yield the arrays to evaluate at once."""
        broken = {slot for slot, _ in failed}
        for save in plan.saves:
            if wanted(save.slot) and save.slot not in broken:
                slab, row = self._slabs[save.slot.slab_id], save.slot.row
                for saved in self._blocks.save(slab, row, save.start, save.block_ids):
                    if saved:
                        yield saved
        for keep in plan.state_saves:
            if wanted(keep.slot) and keep.slot not in broken:
                yield self._snapshots.save(keep.slot, keep.snapshot_id)

    def _save_chunks(
        self,
        plan: Plan,
        changed: set[Slot],
        failed: Sequence[tuple[Slot, str]],
        exports: Iterable[int],
    ) -> Piece | None:
        """Save what the chunks of ``plan`` computed. Return the piece of work, if there is one."""
        piece = None
        with self._stopwatch.computing():
            for saved in self._save(plan, changed.__contains__, failed):
                piece = self._line.send(saved, kept=True)
        self._export(exports, self._line.piece)
        return piece

    def wait(self) -> None:
        if self.spec.look_ahead:
            with self._stopwatch.waiting():
                self._line.wait()

    def _wait_for_slabs(self) -> None:
        """Wait until slabs can be written in place, see `DeviceLine`."""
        if self.spec.look_ahead:
            with self._stopwatch.waiting():
                self._line.wait_for_slabs()

    def read_slot(self, slot: Slot, length: int) -> list[StoredKV]:
        """Return keys and values of each layer at the first ``length`` positions of ``slot``.

        Arrays are (1, kv_heads, length, dim), as attention reads them, with their scales. For
        proofs. The caller must not keep them."""
        slab, row = self._slabs[slot.slab_id], slice(slot.row, slot.row + 1)
        kept = []
        for number in range(len(self.layout.arrays)):
            scales = slab.scales_of(number)
            part = None if scales is None else scales[:, row, :, :length]
            kept.append(StoredKV(slab.read(number, row, length), part))
        return kept

    def _export(self, blocks: Iterable[int], piece: Piece | None) -> set[int]:
        """Export ``blocks`` and snapshots once ``piece`` is done. Return those that exist: all
        except those whose sequence failed."""
        stores = self._blocks, self._snapshots
        found = {block: store for block in blocks for store in stores if block in store}
        for block, store in found.items():
            self._late.add_export(piece, block, store.exporter(block))
        return set(found)

    def _restore(self, plan: Plan) -> list[tuple[Slot, str]]:
        """Run the plan's restores. Return the slots whose blocks were never saved: with look-ahead
        the scheduler learns of a failed save one plan late."""
        failed: list[tuple[Slot, str]] = []
        for group in self._blocks.together(plan.restores):
            one, rows = group[0], [restore.slot.row for restore in group]
            if not all(block in self._blocks for block in one.block_ids):
                why = "the blocks of its prefix could not be computed"
                failed += [(restore.slot, why) for restore in group]
                continue
            slab = self._slabs[one.slot.slab_id]
            for _ in self._blocks.restore(slab, rows, one.start, one.block_ids):
                self._line.send(slab.contents)
                self._line.wait()
        return failed

    def _copy(self, copies: Sequence[CopyPositions]) -> None:
        """Run the ``copies`` of a plan."""
        in_place = self.batch_class.writes_in_place
        copy_positions = host_blocks.copy_positions if in_place else Slab.copy_positions
        for copy in copies:
            self._line.wait()  # as between moves
            slab, source = self._slabs[copy.target.slab_id], self._slabs[copy.source.slab_id]
            copy_positions(slab, copy.target.row, source, copy.source.row, copy.start, copy.end)
            if not in_place:
                self._line.send(slab.contents)

    def _restore_states(self, plan: Plan) -> list[tuple[Slot, str]]:
        """Run the plan's restores of states. Return the slots whose snapshots were never saved."""
        failed = []
        for restore in plan.state_restores:
            if restore.snapshot_id in self._snapshots:
                state = self._snapshots.restore(restore.slot, restore.snapshot_id)
            else:
                failed.append((restore.slot, "the state of its prefix could not be computed"))
                state = self._snapshots.reset(restore.slot)  # its decode may be in this plan
            self._line.send(state, holds_slabs=False)
        return failed

    def _decode(self, step: BatchedStep) -> None:
        """Compute the decodes of ``step``. Adds the arrays to evaluate to its ``unsent``, and
        sets ``piece`` if the pass has been dispatched."""
        rows = DecodeRows.of(step.plan.decodes)
        ordered = rows.decodes
        inputs = self._inputs(ordered)
        slabs = {number: self._slabs[number] for number in _slab_ids(ordered)}
        unseen = any(d.constrained and d.token_id is None for d in ordered)
        masks = None
        if not unseen:
            masks = self._sampler.start_masks(ordered, [d.token_id for d in ordered])
        elif not step.ahead:
            mx.async_eval(inputs)  # separately: reading them would wait for the whole pass
        with self._stopwatch.computing():
            passes = self._decode_passes(step)
            drafted = [d.slot for d in step.plan.decodes if d.drafts]
            kept = self._slabs.states.keep(drafted)
            logits, states = passes.logits(rows, inputs)
            if not step.ahead:
                mx.eval(logits)
        if unseen:
            if step.piece is None:
                self._wait_for_slabs()
            known = self._known_tokens(ordered) or inputs.tolist()
            computed = [logits, states, [s.contents for s in slabs.values()]]
            step.piece = self._line.send(computed, since=step.started)
            masks = self._sampler.start_masks(ordered, known)
        if self.logits_observer is not None:
            self.logits_observer(ordered, logits)
        with self._stopwatch.sampling():
            sampled = self._sampler.sample(logits, ordered, inputs, masks)
            is_nan = nan_at(logits, sampled.tokens)
            if not step.ahead:
                mx.eval(sampled.arrays, is_nan)
        step.decoded = DecodeOutput(sampled, is_nan, rows)
        wants = self._guesser is not None and any(d.guesses for d in step.plan.decodes)
        if wants or (drafted and self.layout.states):
            with self._stopwatch.computing():
                passes.send([logits, sampled.tokens, states, [s.contents for s in slabs.values()]])
                runs = step.decoded.runs
                if drafted and self.layout.states:
                    passes.rewind(rows, inputs, runs, kept)
                if wants and self._guesser is not None:
                    step.decoded.guesses = self._guesser.guess(
                        rows, runs, sampled.tokens, self._sampler, passes.send
                    )
                states = []
        for number, slab in slabs.items():
            # Any token of a run will do: the next plan names its input.
            members = [i for i, d in enumerate(ordered) if d.slot.slab_id == number]
            places = mx.array([ordered[i].slot.row for i in members])
            slab.last_tokens[places] = sampled.tokens[members[0] : members[-1] + 1]
        step.failed += [(ordered[row].slot, why) for row, why in sampled.failed]
        step.unsent.append([sampled.arrays, is_nan, states, [s.contents for s in slabs.values()]])

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
            self._wait_for_slabs()
            step.piece = self._line.send(arrays, since=step.started)

        return DecodePasses(
            model=self._model,
            slabs=self._slabs,
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
        last = []
        for number in _slab_ids(decodes):
            rows = [d.slot.row for d in decodes if d.slot.slab_id == number]
            last.append(self._slabs[number].last_tokens[mx.array(rows)])
        unknown = mx.array([d.token_id is None for d in decodes])
        return mx.where(unknown, mx.concatenate(last), given)

    def _batch(self, rows: Sequence[Row]) -> RaggedBatch:
        return self.batch_class(self.layout, self._slabs, rows)


def _slab_ids(parts: Iterable[Decode]) -> list[int]:
    return sorted({part.slot.slab_id for part in parts})
