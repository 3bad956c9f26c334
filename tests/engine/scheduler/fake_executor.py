"""An executor without a model, which checks every operation of a plan.

The KV of position p depends on all tokens up to p, so it is modelled as those tokens. The content
of a row is the tokens that were computed or copied there, that of a block the whole prefix that
ends with it. Recurrent state is all tokens that went into it. Every operation is checked against
that, and memory is counted anew with each.
"""

from __future__ import annotations

import random
import zlib
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from engine.plan import Chunk, Decode, Exported, Plan, PromptLogprobs, Slot, StepResult
from engine.scheduler import SchedulerConfig
from engine.scheduler.planning.prefilling import MAX_END_TOKENS
from engine.scheduler.sequences.thinking import ThinkingProgress
from engine.scheduler.timing.chunks import MIN_TOKENS
from shared import wire
from shared.hashing import block_hashes, salted_root
from tests.engine import marked_pictures
from tests.engine.marked_pictures import marked_chunk, marked_prompt, tokens_of
from tests.packed_logprobs import packed

VOCABULARY = 24
SALTS = ("", "pepper")
HOLE = -1
"""The content of a row where a chunk raised."""


def sample(tokens: Sequence[int], seed: int, index: int, forbidden: Sequence[int] = ()) -> int:
    """Return the token that follows ``tokens`` as output ``index``: any function of them will do.
    After a row with holes it is one that is never right."""
    if HOLE in tokens:
        return VOCABULARY
    noise = zlib.crc32(array("I", tokens).tobytes() + f"{seed}/{index}".encode())
    allowed = [token for token in range(VOCABULARY) if token not in forbidden]
    return allowed[noise % len(allowed)]


def expected(request: wire.Submit, context_length: int) -> tuple[list[int], str]:
    """Return all outputs of ``request``, computed directly, and the reason why it ends."""
    tokens = marked_prompt(request)
    limit = min(request.max_tokens, context_length - len(tokens))
    outputs: list[int] = []
    thinking = ThinkingProgress(request.thinking) if request.thinking else None
    while len(outputs) < limit:
        forced = None
        if thinking is not None:
            thinking.follow(outputs[-1:])
            forced = thinking.forced()
        early = len(outputs) < request.min_tokens
        token = sample(
            tokens + outputs,
            request.sampling.seed,
            len(outputs),
            request.stop_token_ids if early else (),
        )
        token = token if forced is None else forced
        outputs.append(token)
        if not early and token in request.stop_token_ids:
            return outputs, "stop"
    return outputs, "length"


def logprobs_of(tokens: Sequence[int], count: int) -> wire.TokenLogprobs:
    """Return made-up log-probabilities of the last of ``tokens`` after the others."""
    chosen = float(zlib.crc32(array("I", tokens).tobytes()) % 2**24)  # fits into a float32
    return wire.TokenLogprobs(chosen=chosen, top_ids=(0,) * count, top=(0.0,) * count)


def prompt_logprobs_of(request: wire.Submit) -> list[wire.TokenLogprobs]:
    """Return the log-probabilities of the prompt that the client must get."""
    if request.prompt_logprobs is None:
        return []
    ends = range(2, len(request.token_ids) + 1)
    return [logprobs_of(request.token_ids[:end], request.prompt_logprobs) for end in ends]


def content_of(payload: Sequence[bytes | memoryview]) -> tuple[int, ...]:
    """Return the tokens up to the end of the block that was exported as ``payload``."""
    return tuple(array("i", b"".join(payload)))


class StepRaised(Exception):
    """A step raises, as MLX does when it finds no memory."""


@dataclass
class FakePass:
    """A pass of chunks, and how many of its layers are computed. Its chunks are written when all
    are."""

    chunks: tuple[Chunk, ...]
    layers: int = 0


class FakeExecutor:
    """Runs plans, and keeps what they put into slots, blocks and snapshots."""

    def __init__(self, config: SchedulerConfig, speed_tokens_s: float = 1000.0) -> None:
        self.config = config
        self.speed_tokens_s = speed_tokens_s
        self.slab_s = 0.0  # that a new slab takes
        self.begin_s = 0.0  # that the first layer of a pass takes in addition
        self.slabs: dict[int, tuple[int, int]] = {}
        self.rows: dict[Slot, list[int]] = {}
        self.states: dict[Slot, list[int]] = {}
        self.sampled: dict[Slot, int] = {}
        self.history: dict[Slot, list[int]] = {}
        self.lost: dict[Slot, int] = {}
        """The positions before which layers with a window have something else."""
        self.blocks: dict[int, tuple[int, ...]] = {}
        self.snapshots: dict[int, tuple[int, ...]] = {}
        self.block_hashes: dict[int, bytes] = {}
        self.seen_blocks: set[int] = set()
        self.unsaved: set[int] = set()
        self.fail_next_chunk = False
        """Let the next chunk raise: its slot holds wrong KV from then on, and so do blocks saved
        from it later."""
        self.fail_next_step = False
        """Let the next plan raise when it is half done."""
        self._failed: dict[Slot, str] = {}
        self.encoded: dict[bytes, tuple[int, int]] = {}
        """Of pictures: the layers that are computed, and the embeddings."""
        self.lost_pictures: set[bytes] = set()
        """Those that could not be encoded. The next plan may not know it, and go on with them."""
        self.fail_next_picture = False
        self._failed_pictures: list[tuple[bytes, str]] = []
        self.passes: dict[int, FakePass] = {}
        self.broken: set[int] = set()  # passes of which every chunk raised
        self.steps = 0
        self.chunk_tokens: list[int] = []
        self.drafted = self.accepted = 0
        self.wrong_guesses: float | None = None
        """How many of its guesses are wrong; None: it makes none."""
        self._random = random.Random(5)

    def run(self, plan: Plan) -> StepResult:
        assert plan.step == self.steps, "steps come in order"
        self.steps += 1
        self._failed = {}
        for number in plan.dropped_passes:
            self.passes.pop(number, None)
        self._check_open_slots(plan)
        exported = self._evict(plan)
        self._set_up(plan)
        self._restore(plan)
        self._restore_states(plan)
        self._move(plan)
        self._copy(plan)
        if self.fail_next_step:
            self.fail_next_step = False
            raise StepRaised
        self._encode(plan)
        self._begin_pass(plan)
        open_chunks = [chunk for one in self.passes.values() for chunk in one.chunks]
        used = [decode.slot for decode in plan.decodes] + [chunk.slot for chunk in open_chunks]
        assert len(set(used)) == len(used), "a slot has one decode, or a chunk in one pass"
        self._fill_rings(plan)
        runs = self._decode(plan)
        prompt_logprobs = tuple(self._prefill(plan))
        self._save(plan)
        self._save_states(plan)
        exported += [
            Exported(block, self._payload((self.blocks | self.snapshots)[block]))
            for block in plan.exports
            if block not in self.unsaved
        ]
        tokens = sum(1 + len(one.drafts) + len(one.before) for one in plan.decodes)
        decode_s = tokens / self.speed_tokens_s + self.slab_s * len(plan.new_slabs)
        decode_s += self.begin_s * bool(plan.chunks)
        chunks_s = self._prefilled / self.speed_tokens_s
        is_apart = self.config.look_ahead and chunks_s > 0
        return StepResult(
            step=plan.step,
            tokens=tuple(token for run in runs for token in run),
            runs=tuple(map(len, runs)) if any(len(run) > 1 for run in runs) else (),
            guesses=self._guesses(plan, runs),
            prompt_logprobs=prompt_logprobs,
            exported=tuple(exported),
            failed=tuple(self._failed.items()),
            failed_pictures=tuple(self._failed_pictures),
            elapsed_s=1e-6 + (decode_s if is_apart else decode_s + chunks_s),
            chunks_apart=is_apart,
            chunk_times=((plan.step, chunks_s),) if is_apart else (),
        )

    def _begin_pass(self, plan: Plan) -> None:
        """Note which layers of which passes are computed, and check that they go on where they
        ended."""
        if plan.chunks:
            self.passes[plan.step] = FakePass(plan.chunks)
        for chunk in plan.chunks:
            missing = {shown.digest for shown in chunk.pictures} - self._ready_pictures
            if missing:
                assert missing <= self.lost_pictures, "a chunk begins once its pictures are there"
                self._fail_open_chunk(plan.step, chunk)
        self._prefilled: float = 0.0
        self._completed: list[Chunk] = []
        ends = {stretch.number: stretch.end for stretch in plan.stretches}
        if plan.chunks:
            ends.setdefault(plan.step, self.config.layers)
        for number, end in ends.items():
            if number in self.broken:  # by a chunk that raised when the plan was made already
                continue
            one = self.passes[number]
            assert one.layers < end <= self.config.layers, "a pass goes on where it ended"
            tokens = sum(len(chunk.token_ids) for chunk in one.chunks)
            self._prefilled += tokens * (end - one.layers) / self.config.layers
            one.layers = end
            if self.fail_next_chunk and end < self.config.layers:
                self.fail_next_chunk = False
                self._fail_open_chunk(number, one.chunks[0])
            elif end == self.config.layers:
                self._completed += self.passes.pop(number).chunks

    def _encode(self, plan: Plan) -> None:
        self._failed_pictures = []
        for digest in plan.dropped_pictures:
            self.encoded.pop(digest, None)
            self.lost_pictures.discard(digest)
        whole = self.config.picture_layers
        for op in plan.encodes:
            layers, size = self.encoded.get(op.digest, (0, len(op.token_ids)))
            done = whole if op.is_last else layers + op.layers
            assert op.digest in self.lost_pictures or done == layers + op.layers <= whole
            assert op.is_last or done < whole
            self.encoded[op.digest] = done, size
            if self.fail_next_picture:
                self.fail_next_picture = False
                del self.encoded[op.digest]
                self.lost_pictures.add(op.digest)
                self._failed_pictures.append((op.digest, "it cannot be encoded"))
        used = sum(size for _, size in self.encoded.values()) * self.config.picture_token_bytes
        assert used <= self.config.picture_bytes, "within the room for pictures"

    @property
    def _ready_pictures(self) -> set[bytes]:
        layers = self.config.picture_layers
        return {digest for digest, (done, _) in self.encoded.items() if done == layers}

    def _fail_open_chunk(self, number: int, failed: Chunk) -> None:
        """Let a chunk of an open pass raise. The others go on."""
        one = self.passes[number]
        others = [chunk for chunk in one.chunks if chunk is not failed]
        self._failed[failed.slot] = "the chunk raised"
        self._write(failed.slot, failed.start, [HOLE] * len(failed.token_ids))
        one.chunks = tuple(others)
        if not others:
            del self.passes[number]
            self.broken.add(number)

    def reset(self) -> None:
        kept: Any
        for kept in (self.passes, self.encoded, self.slabs, self.blocks, self.snapshots):
            kept.clear()
        for kept in (self.rows, self.states, self.sampled, self.history, self.unsaved):
            kept.clear()

    def _evict(self, plan: Plan) -> list[Exported]:
        exported = []
        for evict in plan.evictions:
            if evict.block_id in self.snapshots:
                content = self.snapshots.pop(evict.block_id)
            elif evict.block_id in self.unsaved:
                continue
            else:
                content = self.blocks.pop(evict.block_id)
            if evict.export:
                exported.append(Exported(evict.block_id, self._payload(content)))
        for slab in plan.freed_slabs:
            rows, _ = self.slabs.pop(slab)
            self._forget_rows(slab, range(rows))
        return exported

    def _forget_rows(self, slab: int, rows: Sequence[int]) -> None:
        for row in rows:
            for kept in (self.rows, self.sampled, self.states):
                kept.pop(Slot(slab, row), None)

    def _set_up(self, plan: Plan) -> None:
        assert not {resized.slab_id for resized in plan.resized_slabs} & set(plan.freed_slabs)
        for resized in plan.resized_slabs:
            rows, capacity = self.slabs[resized.slab_id]
            assert rows != resized.rows > 0
            self.slabs[resized.slab_id] = (resized.rows, capacity)
            self._forget_rows(resized.slab_id, range(resized.rows, rows))
            self._check_memory()
        for slab in plan.new_slabs:
            assert slab.slab_id not in self.slabs and slab.capacity % self.config.block_size == 0
            self.slabs[slab.slab_id] = (slab.rows, slab.capacity)
            self._check_memory()
        for insert in plan.inserts:
            kept = self.snapshots if insert.is_snapshot else self.blocks
            self._keep(kept, insert.block_id, content_of(insert.payload))

    def _check_open_slots(self, plan: Plan) -> None:
        """Check that nothing else happens to the slots of passes that are open."""
        slots = {chunk.slot for one in self.passes.values() for chunk in one.chunks}
        touched = {restore.slot for restore in plan.restores}
        touched |= {restore.slot for restore in plan.state_restores}
        touched |= {slot for move in plan.moves for slot in (move.source, move.target)}
        touched |= {slot for copy in plan.copies for slot in (copy.source, copy.target)}
        touched |= {chunk.slot for chunk in plan.chunks}
        assert slots.isdisjoint(touched), "the slot of an open pass is left alone"
        assert not {slot.slab_id for slot in slots} & set(plan.freed_slabs)
        rows = {resized.slab_id: resized.rows for resized in plan.resized_slabs}
        assert all(slot.row < rows.get(slot.slab_id, slot.row + 1) for slot in slots)

    def _restore(self, plan: Plan) -> None:
        for restore in plan.restores:
            self._check_slot(restore.slot)
            row = self.rows.setdefault(restore.slot, [])
            if restore.start == 0:
                row.clear()
                self.lost.pop(restore.slot, None)
            assert len(row) - self.config.block_size < restore.start <= len(row), "where it ends"
            del row[restore.start :]
            for block in restore.block_ids:
                if block in self.unsaved:
                    self._failed[restore.slot] = "there is no such block"
                    row.extend([HOLE] * self.config.block_size)
                    continue
                content = self.blocks[block]
                whole = HOLE not in row and HOLE not in content
                assert not whole or list(content[: len(row)]) == row, "of another prefix"
                row[:] = content
            self._check_length(restore.slot)

    def _restore_states(self, plan: Plan) -> None:
        for restore in plan.state_restores:
            self._check_slot(restore.slot)
            if restore.snapshot_id in self.unsaved:
                self._failed[restore.slot] = "there is no such state"
                content = [HOLE] * restore.position
            else:
                content = list(self.snapshots[restore.snapshot_id])
            assert len(content) == restore.position
            self.states[restore.slot] = content
            if not self.config.keeps_kv:
                self.rows[restore.slot] = list(content)
            row = self.rows[restore.slot]
            assert HOLE in row or HOLE in content or row == content, "of another prefix"
            self._check_length(restore.slot)

    def _move(self, plan: Plan) -> None:
        sources = {move.source for move in plan.moves}
        for move in plan.moves:
            self._check_slot(move.target)
            assert move.target not in sources
            assert move.length == len(self.rows[move.source])
            self.rows[move.target] = list(self.rows[move.source])
            self.lost[move.target] = self.lost.get(move.source, 0)
            self.states[move.target] = list(self.states[move.source])
            self.sampled.pop(move.target, None)
            if move.source in self.history:
                self.history[move.target] = self.history.pop(move.source)
            self._check_length(move.target)

    def _copy(self, plan: Plan) -> None:
        for copy in plan.copies:
            self._check_slot(copy.target)
            row, source = self.rows[copy.target], self.rows[copy.source]
            assert len(row) == copy.start < copy.end <= len(source)
            assert HOLE not in source and source[: copy.start] == row, "of another prefix"
            row += source[copy.start : copy.end]
            self._check_length(copy.target)

    def _fill_rings(self, plan: Plan) -> None:
        """Chunks are padded to the longest: their padding takes the place of positions too."""
        width = max((len(chunk.token_ids) for chunk in plan.chunks), default=0)
        wide = max((1 + len(decode.drafts) for decode in plan.decodes), default=0)
        passes = [(decode.slot, decode.position, wide) for decode in plan.decodes]
        passes += [(chunk.slot, chunk.start, width) for chunk in plan.chunks]
        for slot, start, tokens in passes:
            for ring in self.config.rings:
                assert tokens <= ring.tokens - ring.window_tokens, "there is room for a pass"
                lost = start + tokens - ring.tokens
                self.lost[slot] = max(lost, self.lost.get(slot, 0) if start else 0)

    def _decode(self, plan: Plan) -> list[list[int]]:
        assert len(plan.decodes) <= self.config.max_batch_size
        runs = []
        for decode in plan.decodes:
            slot = decode.slot
            token = self.sampled[slot] if decode.token_id is None else decode.token_id
            assert not decode.drafts or (decode.token_id is not None and decode.forced is None)
            if decode.history is not None:
                assert decode.sampling.needs_history
                self.history[slot] = list(decode.history)
            if decode.before:
                assert self.config.decodes_ends and not decode.drafts
                assert len(decode.before) <= MAX_END_TOKENS and decode.token_id is not None
                self._write(slot, decode.position - len(decode.before), decode.before)
            run: list[int] = []
            for number, expected_token in enumerate((*decode.drafts, None)):
                run.append(self._compute(decode, number, token))
                if run[-1] != expected_token:
                    break
                token = expected_token
            # What is beyond is written as well, but counts as never computed.
            assert decode.position + len(decode.drafts) < self.slabs[slot.slab_id][1]
            runs.append(run)
            self.sampled[slot] = run[-1]
            self.drafted += len(decode.drafts)
            self.accepted += len(run) - 1
        return runs

    def _guesses(self, plan: Plan, runs: list[list[int]]) -> tuple[tuple[int, ...], ...]:
        """Return what follows each run, some of it wrong."""
        if self.wrong_guesses is None:
            return ()
        found: list[tuple[int, ...]] = []
        for decode, run in zip(plan.decodes, runs, strict=True):
            end = decode.position + 1 + len(decode.drafts) + decode.guesses
            assert end <= self.slabs[decode.slot.slab_id][1], "there is room to compute them"
            tokens, first = [*self.rows[decode.slot], run[-1]], decode.output_index + len(run)
            for index in range(first, first + decode.guesses):
                right = self._random.random() >= self.wrong_guesses
                tokens.append(sample(tokens, decode.sampling.seed, index) if right else 0)
            found.append(tuple(tokens[len(tokens) - decode.guesses :]))
        return tuple(found)

    def _compute(self, decode: Decode, number: int, token: int) -> int:
        """Return what is sampled after ``token``, in place of draft ``number``."""
        slot, index = decode.slot, decode.output_index + number
        self._write(slot, decode.position + number, [token])
        row = self.rows[slot]
        if decode.sampling.needs_history:
            self.history[slot].append(token)
            assert HOLE in row or self.history[slot] == tokens_of(row), "what penalties look at"
        chosen = sample(row, decode.sampling.seed, index, decode.forbidden)
        return chosen if decode.forced is None else decode.forced

    def _prefill(self, plan: Plan) -> Iterator[PromptLogprobs]:
        counted = [c for c in plan.chunks if not c.start or len(c.token_ids) > MAX_END_TOKENS]
        assert len(counted) <= self.config.prefill_batch_size
        for chunk in self._completed:
            assert chunk.token_ids
            self.sampled.pop(chunk.slot, None)
            self.chunk_tokens.append(len(chunk.token_ids))
            if self.fail_next_chunk:
                self.fail_next_chunk = False
                self._failed[chunk.slot] = "the chunk raised"
                self._write(chunk.slot, chunk.start, [HOLE] * len(chunk.token_ids))
                continue
            self._write(chunk.slot, chunk.start, marked_chunk(chunk))
            assert len(chunk.target_ids) <= len(chunk.token_ids)
            if chunk.target_ids:
                row = [abs(t) for t in tokens_of(self.rows[chunk.slot][: chunk.start])]
                known = [*row, *chunk.token_ids]
                found = (
                    logprobs_of([*known[: chunk.start + i + 1], token], chunk.logprobs)
                    for i, token in enumerate(chunk.target_ids)
                )
                yield PromptLogprobs(chunk.slot, chunk.start, packed(list(found)))

    def _save(self, plan: Plan) -> None:
        for save in plan.saves:
            self._check_slot(save.slot)
            assert save.start % self.config.block_size == 0
            assert save.start >= self.lost.get(save.slot, 0), "only what the slot still has"
            for number, block in enumerate(save.block_ids, 1):
                if save.slot in self._failed:
                    self.unsaved.add(block)
                    continue
                end = save.start + number * self.config.block_size
                row = self.rows[save.slot]
                assert len(row) >= end, "only what is computed is saved"
                self._keep(self.blocks, block, tuple(row[:end]))

    def _save_states(self, plan: Plan) -> None:
        for save in plan.state_saves:
            self._check_slot(save.slot)
            assert save.position % self.config.block_size == 0
            if save.slot in self._failed:
                self.unsaved.add(save.snapshot_id)
                continue
            assert len(self.states[save.slot]) == save.position, "the state of that position"
            self._keep(self.snapshots, save.snapshot_id, tuple(self.states[save.slot]))

    def check_hashes(self, hashes: dict[int, bytes], *, settled: bool) -> None:
        """Check that the scheduler's blocks hold the prefixes of their hashes. As long as results
        are on their way it may not know yet of blocks that do not."""
        for block, block_hash in hashes.items():
            if block in self.block_hashes:
                continue
            content = self.snapshots.get(block, self.blocks.get(block, ()))
            if block in self.unsaved or HOLE in content:
                assert not settled
                continue
            self.check_content(block_hash, content)
            self.block_hashes[block] = block_hash

    def check_content(self, block_hash: bytes, content: Sequence[int]) -> None:
        roots = [salted_root(self.config.namespace, salt) for salt in SALTS]
        size = self.config.block_size
        tokens, pictures = tokens_of(content), marked_pictures.pictures_in(content)
        assert block_hash in {block_hashes(root, tokens, size, pictures)[-1] for root in roots}

    def _keep(self, kept: dict[int, tuple[int, ...]], name: int, content: tuple[int, ...]) -> None:
        assert name not in self.seen_blocks, "ids are never used twice"
        assert len(content) % self.config.block_size == 0
        self.seen_blocks.add(name)
        kept[name] = content
        self._check_memory()

    def _payload(self, content: tuple[int, ...]) -> tuple[memoryview, ...]:
        raw = memoryview(array("i", content).tobytes())
        return (raw[: len(raw) // 2], raw[len(raw) // 2 :])

    def _write(self, slot: Slot, start: int, tokens: Sequence[int]) -> None:
        self._check_slot(slot)
        row = self.rows.setdefault(slot, [])
        if start == 0:
            row.clear()
        assert len(row) == start, "what is computed follows what is there"
        row.extend(tokens)
        state = self.states.setdefault(slot, [])
        if start == 0:
            state.clear()
        if self.config.state_bytes:
            assert len(state) == start, "state goes on where it ended"
        state.extend(tokens)
        self._check_length(slot)

    def _check_slot(self, slot: Slot) -> None:
        assert slot.slab_id in self.slabs, "the slab is there"
        assert 0 <= slot.row < self.slabs[slot.slab_id][0]

    def _check_length(self, slot: Slot) -> None:
        assert len(self.rows[slot]) <= self.slabs[slot.slab_id][1], "within the capacity"

    def _check_memory(self) -> None:
        config = self.config
        held = sum(rows * capacity for rows, capacity in self.slabs.values()) // config.block_size
        used = held * config.slot_block_bytes + len(self.blocks) * config.block_bytes
        used += sum(rows for rows, _ in self.slabs.values()) * config.state_bytes
        for ring in config.rings:
            spared = (rows * max(0, tokens - ring.tokens) for rows, tokens in self.slabs.values())
            used -= sum(spared) * ring.token_bytes
        used += len(self.snapshots) * config.state_bytes
        for one in self.passes.values():
            used += max(0, len(one.chunks[0].token_ids) - MIN_TOKENS) * config.pass_token_bytes
        assert used <= config.limit_bytes, "over the limit"
        assert len(self.snapshots) <= config.max_snapshots
