"""The executor for models whose KV and recurrent state fit into slots."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import mlx.core as mx

from engine.batch import device
from engine.batch.ragged import RaggedBatch, Row
from engine.cache.blocks import BlockStore
from engine.cache.layout import Layout
from engine.cache.slabs import Slab, Slabs, StoredKV
from engine.cache.snapshots import SnapshotStore
from engine.executor.base import Executor, ExecutorSpec, PendingStep, is_allocation_failure
from engine.executor.stopwatch import StepClock, Stopwatch
from engine.plan import Chunk, Decode, Exported, Plan, PromptLogprobs, Slot, StepResult
from engine.sampling.logprobs import PendingLogprobs, target_logprobs
from engine.sampling.sampler import Sampler, SamplerOutput
from shared.wire import TokenLogprobs


class BatchedExecutor(Executor):
    """Runs the decodes of a plan as one batch, and its chunks as another, padded to the longest.

    Chunks, or even decodes, run one by one if the model needs it. Logits of a chunk are
    computed only if it asks for log-probabilities of the prompt: MLX is lazy, and for other
    chunks only the slabs are evaluated.
    """

    def __init__(
        self, model: Any, layout: Layout, block_size: int, batch_class: type[RaggedBatch]
    ) -> None:
        self._model = model
        self.layout = layout
        self._block_size = block_size
        self.batch_class = batch_class
        self._sampler = Sampler()
        self.reset()
        # There is one state per sequence and not one per position. Padding would change it.
        self._batches_chunks = batch_class.pads_rows and not layout.states
        shares_slabs = device.shares_slabs()
        self.spec = ExecutorSpec(
            batching=batch_class.batching,
            # On the CPU MLX queues few operations: dispatching a step takes as long as running
            # the step before it, so looking ahead would only delay tokens by a step.
            look_ahead=mx.default_device() == mx.gpu,
            batches_decodes=not batch_class.one_row_per_pass,
            max_sequences=None,
            prefix_cache=True,
            keeps_kv=bool(layout.layers) or not layout.states,
            kv_bits=layout.kv_bits,
            block_token_bytes=max(1, layout.block_token_bytes),
            slot_token_bytes=max(1, layout.slot_token_bytes + shares_slabs * layout.array_bytes),
            state_bytes=layout.state_bytes,
            shares_slabs=shares_slabs,
        )
        self._stopwatch = Stopwatch(asynchronous=self.spec.look_ahead)
        self._clock = StepClock()

    def reset(self) -> None:
        self._slabs = Slabs()
        self._blocks = BlockStore(self.layout, self._block_size, self.batch_class.writes_in_place)
        self._snapshots = SnapshotStore(self.layout, self._slabs.states)
        self._sampler.reset()
        mx.clear_cache()

    def dispatch(self, plan: Plan) -> PendingStep:
        started = time.perf_counter()
        self._stopwatch.start()
        exported = self._export(evict.block_id for evict in plan.evictions if evict.export)
        for evict in plan.evictions:
            self._blocks.evict(evict.block_id)
            self._snapshots.evict(evict.block_id)
        for number in plan.freed_slabs:
            self._slabs.free(number)
        self._sampler.free_slabs(plan.freed_slabs)
        for resize in plan.resized_slabs:
            self._slabs.resize(resize.slab_id, resize.rows)
        for new in plan.new_slabs:
            self._slabs[new.slab_id] = Slab(self.layout, new.rows, new.capacity)
        inserted: list[mx.array] = []
        for insert in plan.inserts:
            store = self._snapshots if insert.is_snapshot else self._blocks
            inserted += store.insert(insert.block_id, insert.payload)
        with self._stopwatch.computing():
            mx.eval(inserted)  # all in one call: each call wakes another thread
            failed = self._restore(plan)
            failed += self._restore_states(plan)
            for move in plan.moves:
                self._slabs.copy_row(move.source, move.target, move.length)
                self._sampler.move(move.source, move.target)
        decoded = self._decode(plan.decodes) if plan.decodes else None
        failed += decoded.failed if decoded else ()
        finished: list[mx.array] = []
        logprobs: list[tuple[Chunk, PendingLogprobs]] = []
        for group in _chunk_groups(plan.chunks):
            with self._stopwatch.computing():
                not_computed, done = self._prefill(group, logprobs)
            failed += not_computed
            finished += done
        broken = {slot for slot, _ in failed}
        for save in plan.saves:
            if save.slot not in broken:
                slab, row = self._slabs[save.slot.slab_id], save.slot.row
                with self._stopwatch.computing():
                    mx.async_eval(self._blocks.save(slab, row, save.start, save.block_ids))
        for keep in plan.state_saves:
            if keep.slot not in broken:
                with self._stopwatch.computing():
                    mx.async_eval(self._snapshots.save(keep.slot, keep.snapshot_id))
        exported += self._export(plan.exports)
        spent_s = self._stopwatch.stop()
        return BatchedStep(
            plan, decoded, finished, logprobs, failed, exported, self._clock, started, spent_s
        )

    def read_slot(self, slot: Slot, length: int) -> list[StoredKV]:
        """Return keys and values of each layer at the first ``length`` positions of ``slot``.

        Arrays are (1, kv_heads, length, dim), as attention reads them, with their scales. For
        proofs. The caller must not keep them."""
        slab, row = self._slabs[slot.slab_id], slice(slot.row, slot.row + 1)
        return [
            StoredKV(
                slab.read(number, row, length),
                slab.scales[number][:, row, :, :length] if number in slab.scales else None,
            )
            for number in range(len(self.layout.arrays))
        ]

    def _export(self, blocks: Iterable[int]) -> list[Exported]:
        """Return the bytes of ``blocks`` and snapshots, except those whose sequence failed."""
        return [
            Exported(block, store.export(block))
            for block in blocks
            for store in (self._blocks, self._snapshots)
            if block in store
        ]

    def _restore(self, plan: Plan) -> list[tuple[Slot, str]]:
        """Run the plan's restores and return those whose blocks were never saved.

        They exist because with look-ahead the scheduler learns of a failed save one plan late."""
        failed = []
        for restore in plan.restores:
            slot = restore.slot
            if not all(block in self._blocks for block in restore.block_ids):
                failed.append((slot, "the blocks of its prefix could not be computed"))
                continue
            slab = self._slabs[slot.slab_id]
            self._blocks.restore(slab, slot.row, restore.start, restore.block_ids)
            mx.async_eval(slab.contents)
        return failed

    def _restore_states(self, plan: Plan) -> list[tuple[Slot, str]]:
        """Run the plan's restores of states; return those whose snapshots were never saved."""
        failed = []
        for restore in plan.state_restores:
            if restore.snapshot_id in self._snapshots:
                state = self._snapshots.restore(restore.slot, restore.snapshot_id)
            else:
                failed.append((restore.slot, "the state of its prefix could not be computed"))
                state = self._snapshots.reset(restore.slot)  # its decode may be in this plan
            mx.async_eval(state)
        return failed

    def _decode(self, decodes: Sequence[Decode]) -> _DecodeOutput:
        order = sorted(range(len(decodes)), key=lambda i: decodes[i].slot)
        ordered = [decodes[i] for i in order]
        inputs = self._inputs(ordered)
        unseen = any(d.constrained and d.token_id is None for d in ordered)
        if unseen:
            mx.async_eval(inputs)  # apart from the pass, or reading them would wait for the pass
            masks = None
        else:
            masks = self._sampler.start_masks(ordered, [d.token_id for d in ordered])
        with self._stopwatch.computing():
            logits = self._logits(ordered, inputs)
            if not self.spec.look_ahead:
                mx.eval(logits)
        if unseen:
            slabs = {d.slot.slab_id for d in ordered}
            mx.async_eval(logits, [self._slabs[number].contents for number in slabs])
            masks = self._sampler.start_masks(ordered, inputs.tolist())
        if self.logits_observer is not None:
            self.logits_observer(ordered, logits)
        with self._stopwatch.sampling():
            sampled = self._sampler.sample(logits, ordered, inputs, masks)
            if not self.spec.look_ahead:
                mx.eval(sampled.arrays)
        touched = sampled.arrays
        for number in {d.slot.slab_id for d in ordered}:
            slab = self._slabs[number]
            members = [i for i, d in enumerate(ordered) if d.slot.slab_id == number]
            rows = mx.array([ordered[i].slot.row for i in members])
            slab.last_tokens[rows] = sampled.tokens[members[0] : members[-1] + 1]
            touched += slab.contents
        mx.async_eval(touched)
        failed = [(ordered[row].slot, why) for row, why in sampled.failed]
        return _DecodeOutput(sampled, order, failed)

    def _logits(self, decodes: Sequence[Decode], inputs: mx.array) -> mx.array:
        """Return logits (rows, vocab) of ``decodes``, ordered by slot, for their ``inputs``."""
        inputs = inputs[:, None]
        passes = self._passes(decodes)
        logits = []
        for places in passes:
            rows = [Row(d.slot, d.position, d.position + 1) for d in (decodes[i] for i in places)]
            part = inputs if len(passes) == 1 else inputs[mx.array(places)]
            batch = self._batch(rows)
            logits.append(batch.logits(self._model, part)[:, -1])
            states = batch.commit_states()
            if states or len(passes) > 1:
                slabs = {row.slot.slab_id for row in rows}
                mx.async_eval(logits[-1], states, [self._slabs[s].contents for s in slabs])
        if len(passes) == 1:
            return logits[0]
        places = [place for places in passes for place in places]
        return mx.concatenate(logits)[mx.array(sorted(range(len(places)), key=places.__getitem__))]

    def _passes(self, decodes: Sequence[Decode]) -> list[list[int]]:
        """Return the indices of ``decodes`` of each pass: one pass if the model allows it.

        With recurrent layers a row at position 0 runs alone, since some do not begin with zeros."""
        everything = list(range(len(decodes)))
        if self.batch_class.one_row_per_pass:
            return [[i] for i in everything]
        if not self.layout.states:
            return [everything]
        begin = [i for i in everything if decodes[i].position == 0]
        others = [i for i in everything if decodes[i].position > 0]
        return [*([i] for i in begin), *([others] if others else [])]

    def _inputs(self, decodes: Sequence[Decode]) -> mx.array:
        """Return the input tokens (rows,): given by the plan, or sampled last in the slot."""
        given = mx.array([0 if d.token_id is None else d.token_id for d in decodes], mx.int32)
        if all(d.token_id is not None for d in decodes):
            return given
        last = []
        for number in sorted({d.slot.slab_id for d in decodes}):
            rows = [d.slot.row for d in decodes if d.slot.slab_id == number]
            last.append(self._slabs[number].last_tokens[mx.array(rows)])
        unknown = mx.array([d.token_id is None for d in decodes])
        return mx.where(unknown, mx.concatenate(last), given)

    def _prefill(
        self, chunks: Sequence[Chunk], logprobs: list[tuple[Chunk, PendingLogprobs]]
    ) -> tuple[list[tuple[Slot, str]], list[mx.array]]:
        """Run ``chunks``. Return those that failed, and arrays to evaluate for the others.

        Log-probabilities that the chunks ask for are added to ``logprobs``."""
        if not chunks:
            return [], []
        if self._batches_chunks or len(chunks) == 1:
            try:
                return [], [self._forward(sorted(chunks, key=lambda chunk: chunk.slot), logprobs)]
            except Exception as error:
                if is_allocation_failure(error):
                    raise
                if len(chunks) == 1:
                    return [(chunks[0].slot, f"{type(error).__name__}: {error}")], []
        # One by one. If that is because one chunk raised, the others are written again.
        alone = [self._prefill([chunk], logprobs) for chunk in chunks]
        return [f for failed, _ in alone for f in failed], [d for _, done in alone for d in done]

    def _forward(
        self, chunks: Sequence[Chunk], logprobs: list[tuple[Chunk, PendingLogprobs]]
    ) -> mx.array:
        width = max(len(chunk.token_ids) for chunk in chunks)
        tokens = [list(chunk.token_ids) + [0] * (width - len(chunk.token_ids)) for chunk in chunks]
        batch = self._batch([Row(c.slot, c.start, c.start + len(c.token_ids)) for c in chunks])
        kv_only = not any(chunk.target_ids for chunk in chunks)
        logits = batch.logits(self._model, mx.array(tokens, mx.int32), kv_only=kv_only)
        asked = [
            (chunk, target_logprobs(logits[row], chunk.target_ids, chunk.logprobs))
            for row, chunk in enumerate(chunks)
            if chunk.target_ids
        ]
        slabs = [self._slabs[number] for number in {chunk.slot.slab_id for chunk in chunks}]
        states = batch.commit_states()
        # A new array, not a slice: a slice would keep the slab from being written in place.
        done: mx.array = sum((slab.completion_marker() for slab in slabs), mx.array(0))
        mx.async_eval(done, states, [s.arrays for _, s in asked], [slab.contents for slab in slabs])
        logprobs += asked
        return done

    def _batch(self, rows: Sequence[Row]) -> RaggedBatch:
        return self.batch_class(self.layout, self._slabs, rows)


def _chunk_groups(chunks: Sequence[Chunk]) -> list[list[Chunk]]:
    """Return the chunks that are computed together. Chunks with ``target_ids`` run one by one,
    since the logits of a whole chunk are large."""
    kv_only = [chunk for chunk in chunks if not chunk.target_ids]
    return [kv_only, *([chunk] for chunk in chunks if chunk.target_ids)]


class _DecodeOutput(NamedTuple):
    sampled: SamplerOutput
    order: list[int]  # index of the plan's decode, for each sampled row
    failed: list[tuple[Slot, str]]  # slots whose tokens are invalid, and why

    def read(self) -> tuple[tuple[int, ...], tuple[TokenLogprobs | None, ...]]:
        """Return tokens and log-probabilities in the plan's order."""
        read = zip(self.order, self.sampled.tokens.tolist(), strict=True)
        tokens = tuple(token for _, token in sorted(read))
        logprobs: list[TokenLogprobs | None] = [None] * len(tokens)
        if self.sampled.logprobs is not None:
            rows = zip(self.sampled.logprob_rows, self.sampled.logprobs.read(), strict=True)
            for row, scores in rows:
                logprobs[self.order[row]] = scores
        return tokens, tuple(logprobs)


@dataclass(frozen=True)
class BatchedStep(PendingStep):
    plan: Plan
    decoded: _DecodeOutput | None
    chunks_done: list[mx.array]  # evaluated once all chunks are computed
    logprobs: list[tuple[Chunk, PendingLogprobs]]
    failed: list[tuple[Slot, str]]
    exported: list[Exported]
    clock: StepClock
    started: float
    spent_s: tuple[float, float]  # for building and for sampling

    def read(self) -> StepResult:
        tokens, logprobs = self.decoded.read() if self.decoded else ((), ())
        if self.decoded is None:
            mx.eval(self.chunks_done)
        prompt_logprobs = tuple(PromptLogprobs(c.slot, c.start, s.read()) for c, s in self.logprobs)
        return StepResult(
            step=self.plan.step,
            tokens=tokens,
            logprobs=logprobs,
            prompt_logprobs=prompt_logprobs,
            exported=tuple(self.exported),
            failed=tuple(self.failed),
            elapsed_s=self.clock.elapsed_s(self.started),
            build_s=self.spent_s[0],
            sample_s=self.spent_s[1],
        )
