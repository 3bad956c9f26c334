"""An executor without a model, which believes nothing that a plan says.

The KV of position p stands for all tokens up to p, so it is modelled as those tokens. A
row's content is the tokens that were computed or copied there, a block's is the whole
prefix that ends with it. Recurrent state is all tokens that went into it. Every part of a
plan is checked against that, and memory is counted anew, part by part.
"""

from __future__ import annotations

import zlib
from array import array
from collections.abc import Iterator, Sequence

from engine.plan import Chunk, Decode, Exported, Plan, PromptLogprobs, Slot, StepResult
from engine.scheduler import SchedulerConfig
from shared import wire
from shared.hashing import block_hashes, salted

VOCABULARY = 24
SALTS = ("", "pepper")
HOLE = -1
"""What lies in a row where a chunk raised."""


def sample(tokens: Sequence[int], seed: int, index: int, forbidden: Sequence[int] = ()) -> int:
    """The token that follows ``tokens`` as output ``index``: any function of them will do.
    One that is never right follows a row with holes."""
    if HOLE in tokens:
        return VOCABULARY
    noise = zlib.crc32(array("I", tokens).tobytes() + f"{seed}/{index}".encode())
    allowed = [token for token in range(VOCABULARY) if token not in forbidden]
    return allowed[noise % len(allowed)]


def expected(request: wire.Submit, context_length: int) -> tuple[list[int], str]:
    """All outputs of ``request``, computed directly, and how it ends."""
    tokens = list(request.token_ids)
    limit = min(request.max_tokens, context_length - len(tokens))
    outputs: list[int] = []
    while len(outputs) < limit:
        early = len(outputs) < request.min_tokens
        token = sample(
            tokens + outputs,
            request.sampling.seed,
            len(outputs),
            request.stop_token_ids if early else (),
        )
        outputs.append(token)
        if not early and token in request.stop_token_ids:
            return outputs, "stop"
    return outputs, "length"


def scores_of(tokens: Sequence[int], count: int) -> wire.TokenLogprobs:
    """Stands for how likely the last of ``tokens`` is after the others."""
    chosen = float(zlib.crc32(array("I", tokens).tobytes()))
    return wire.TokenLogprobs(chosen=chosen, top_ids=[0] * count, top=[0.0] * count)


def prompt_logprobs_of(request: wire.Submit) -> list[wire.TokenLogprobs]:
    """What the client is to get of its prompt."""
    if request.prompt_logprobs is None:
        return []
    ends = range(2, len(request.token_ids) + 1)
    return [scores_of(request.token_ids[:end], request.prompt_logprobs) for end in ends]


def content_of(payload: Sequence[bytes | memoryview]) -> tuple[int, ...]:
    """The tokens up to the end of the block that was exported as ``payload``."""
    return tuple(array("i", b"".join(payload)))


class StepRaised(Exception):
    """What the fake raises where MLX finds no memory."""


class FakeExecutor:
    """Runs plans. With ``fail_next_step`` the next one raises when it is half done. With
    ``fail_next_chunk`` the next chunk raises: its slot holds something
    wrong from then on, and blocks saved from it later do too."""

    def __init__(self, config: SchedulerConfig, speed_tokens_s: float = 1000.0) -> None:
        self.config = config
        self.speed_tokens_s = speed_tokens_s
        self.slabs: dict[int, tuple[int, int]] = {}
        self.rows: dict[Slot, list[int]] = {}
        self.states: dict[Slot, list[int]] = {}
        self.sampled: dict[Slot, int] = {}
        self.recorded: dict[Slot, list[int]] = {}
        self.blocks: dict[int, tuple[int, ...]] = {}
        self.snapshots: dict[int, tuple[int, ...]] = {}
        self.block_hashes: dict[int, bytes] = {}
        self.seen_blocks: set[int] = set()
        self.unsaved: set[int] = set()
        self.fail_next_chunk = False
        self.fail_next_step = False
        self._failed: dict[Slot, str] = {}
        self.steps = 0
        self.chunk_tokens: list[int] = []

    def run(self, plan: Plan) -> StepResult:
        assert plan.step == self.steps, "steps come in order"
        self.steps += 1
        self._failed = {}
        exported = self._give_up(plan)
        self._set_up(plan)
        self._restore(plan)
        self._restore_states(plan)
        self._move(plan)
        if self.fail_next_step:
            self.fail_next_step = False
            raise StepRaised
        parts: tuple[Decode | Chunk, ...] = (*plan.decodes, *plan.chunks)
        used = [part.slot for part in parts]
        assert len(set(used)) == len(used), "a slot has one part in a step"
        tokens = self._decode(plan)
        scored = tuple(self._prefill(plan))
        self._save(plan)
        self._save_states(plan)
        exported += [
            Exported(block, self._payload(self.blocks[block]))
            for block in plan.exports
            if block not in self.unsaved
        ]
        computed = len(plan.decodes) + sum(len(chunk.token_ids) for chunk in plan.chunks)
        return StepResult(
            step=plan.step,
            tokens=tuple(tokens),
            prompt_logprobs=scored,
            exported=tuple(exported),
            failed=tuple(self._failed.items()),
            elapsed_s=computed / self.speed_tokens_s,
        )

    def reset(self) -> None:
        self.slabs.clear()
        self.rows.clear()
        self.states.clear()
        self.sampled.clear()
        self.recorded.clear()
        self.blocks.clear()
        self.snapshots.clear()
        self.unsaved.clear()

    def _give_up(self, plan: Plan) -> list[Exported]:
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
            for row in range(rows):
                self.rows.pop(Slot(slab, row), None)
                self.sampled.pop(Slot(slab, row), None)
                self.states.pop(Slot(slab, row), None)
        return exported

    def _set_up(self, plan: Plan) -> None:
        for part in plan.new_slabs:
            assert part.slab_id not in self.slabs and part.capacity % self.config.block_size == 0
            self.slabs[part.slab_id] = (part.rows, part.capacity)
            self._check_memory()
        for insert in plan.inserts:
            self._new_block(insert.block_id, content_of(insert.payload))

    def _restore(self, plan: Plan) -> None:
        for restore in plan.restores:
            self._check_slot(restore.slot)
            row = self.rows.setdefault(restore.slot, [])
            if restore.start == 0:
                row.clear()
            assert len(row) == restore.start, "a restore goes where the row ends"
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
            self.states[move.target] = list(self.states[move.source])
            self.sampled.pop(move.target, None)
            if move.source in self.recorded:
                self.recorded[move.target] = self.recorded.pop(move.source)
            self._check_length(move.target)

    def _decode(self, plan: Plan) -> list[int]:
        assert len(plan.decodes) <= self.config.max_batch_size
        tokens = []
        for part in plan.decodes:
            token = self.sampled[part.slot] if part.token_id is None else part.token_id
            self._write(part.slot, part.position, [token])
            row, seed = self.rows[part.slot], part.sampling.seed
            if part.sampling.looks_back:
                if part.history is not None:
                    self.recorded[part.slot] = list(part.history)
                self.recorded[part.slot].append(token)
                assert HOLE in row or self.recorded[part.slot] == row, "what penalties look at"
            else:
                assert part.history is None
            tokens.append(sample(row, seed, part.output_index, part.forbidden))
            self.sampled[part.slot] = tokens[-1]
        return tokens

    def _prefill(self, plan: Plan) -> Iterator[PromptLogprobs]:
        assert len(plan.chunks) <= self.config.prefill_batch_size
        for chunk in plan.chunks:
            assert chunk.token_ids
            self.sampled.pop(chunk.slot, None)
            self.chunk_tokens.append(len(chunk.token_ids))
            if self.fail_next_chunk:
                self.fail_next_chunk = False
                self._failed[chunk.slot] = "the chunk raised"
                self._write(chunk.slot, chunk.start, [HOLE] * len(chunk.token_ids))
                continue
            self._write(chunk.slot, chunk.start, chunk.token_ids)
            assert len(chunk.target_ids) <= len(chunk.token_ids)
            if chunk.target_ids:
                row = [abs(token) for token in self.rows[chunk.slot][: chunk.start]]
                known = [*row, *chunk.token_ids]
                found = (
                    scores_of([*known[: chunk.start + i + 1], token], chunk.logprobs)
                    for i, token in enumerate(chunk.target_ids)
                )
                yield PromptLogprobs(chunk.slot, chunk.start, tuple(found))

    def _save(self, plan: Plan) -> None:
        for save in plan.saves:
            self._check_slot(save.slot)
            assert save.start % self.config.block_size == 0
            for number, block in enumerate(save.block_ids, 1):
                if save.slot in self._failed:
                    self.unsaved.add(block)
                    continue
                end = save.start + number * self.config.block_size
                row = self.rows[save.slot]
                assert len(row) >= end, "only what is computed is saved"
                self._new_block(block, tuple(row[:end]))

    def _save_states(self, plan: Plan) -> None:
        for save in plan.state_saves:
            self._check_slot(save.slot)
            assert save.position % self.config.block_size == 0
            if save.slot in self._failed:
                self.unsaved.add(save.snapshot_id)
                continue
            assert len(self.states[save.slot]) == save.position, "the state of that position"
            assert save.snapshot_id not in self.seen_blocks, "ids are never used twice"
            self.seen_blocks.add(save.snapshot_id)
            self.snapshots[save.snapshot_id] = tuple(self.states[save.slot])
            self._check_memory()

    def check_hashes(self, hashes: dict[int, bytes], *, settled: bool) -> None:
        """That the blocks which the scheduler believes in hold what their hashes say; as
        long as results are on their way it may not know yet of those that do not."""
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
        roots = [salted(self.config.namespace, salt) for salt in SALTS]
        size = self.config.block_size
        assert block_hash in {block_hashes(root, content, size)[-1] for root in roots}

    def _new_block(self, block: int, content: tuple[int, ...]) -> None:
        assert block not in self.seen_blocks, "ids are never used twice"
        assert len(content) % self.config.block_size == 0
        self.seen_blocks.add(block)
        self.blocks[block] = content
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
        used += len(self.snapshots) * config.state_bytes
        assert used <= config.limit_bytes, "over the limit"
        assert len(self.snapshots) <= config.max_snapshots
