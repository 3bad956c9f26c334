"""An executor without a model, which checks every operation of a plan.

The KV of position p depends on all tokens up to p, so it is modelled as those tokens: a place in a
page holds a `Prefix`. Recurrent state is all tokens that went into it. Every operation, and
everything that is read, is checked against that, and memory is counted anew with each plan.
"""

from __future__ import annotations

import random
import zlib
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from engine.plan import (
    Chunk,
    Decode,
    Export,
    Exported,
    Plan,
    PromptLogprobs,
    Slot,
    StepResult,
)
from engine.scheduler import SchedulerConfig
from engine.scheduler.planning.planner import MAX_END_TOKENS
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
    """Return the tokens up to the end of the page or state that was exported as ``payload``."""
    return tuple(array("i", b"".join(payload)))


class StepRaised(Exception):
    """A step raises, as MLX does when it finds no memory."""


class Prefix:
    """Tokens up to a position. Equal prefixes are the same object."""

    def __init__(self, parent: Prefix | None = None, token: int = 0) -> None:
        self.parent, self.token = parent, token
        self._next: dict[int, Prefix] = {}

    def then(self, token: int) -> Prefix:
        return self._next.setdefault(token, Prefix(self, token))

    @property
    def tokens(self) -> list[int]:
        found, one = [], self
        while one.parent is not None:
            found.append(one.token)
            one = one.parent
        return found[::-1]


@dataclass
class FakePass:
    """A pass of chunks, and how many of its layers are computed. Its chunks are written when all
    are."""

    chunks: tuple[Chunk, ...]
    layers: int = 0


class FakeExecutor:
    """Runs plans, and keeps what they put into pages, states and snapshots."""

    def __init__(self, config: SchedulerConfig, speed_tokens_s: float = 1000.0) -> None:
        self.config = config
        self.speed_tokens_s = speed_tokens_s
        self.resize_s = 0.0  # that another number of pages takes
        self.begin_s = 0.0  # that the first layer of a pass takes in addition
        self.end_token_s = 0.0  # that a token of the end of a prompt takes in addition
        self.root = Prefix()
        self.num_pages = 0
        self.pages: dict[int, list[Prefix | None]] = {}
        self.tables: dict[Slot, list[int]] = {}
        self.unpacked: dict[Slot, int] = {}
        self.states: dict[Slot, list[int]] = {}
        self.sampled: dict[Slot, int] = {}
        self.history: dict[Slot, list[int]] = {}
        self.snapshots: dict[int, tuple[int, ...]] = {}
        self.checked: set[tuple[bytes, object]] = set()
        self.seen_ids: set[int] = set()
        self.unsaved: set[int] = set()
        self.copied = 0  # positions
        self.fail_next_chunk = False
        """Let the next chunk raise: its pages hold wrong KV from then on."""
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
        self._check_open_passes(plan)
        exported = [self._export(export) for export in plan.exports_first]
        self._set_up(plan)
        self._fill(plan)
        self._restore_states(plan)
        if self.fail_next_step:
            self.fail_next_step = False
            raise StepRaised
        self._encode(plan)
        self._begin_pass(plan)
        open_chunks = [chunk for one in self.passes.values() for chunk in one.chunks]
        used = [decode.slot for decode in plan.decodes] + [chunk.slot for chunk in open_chunks]
        assert len(set(used)) == len(used), "a slot has one decode, or a chunk in one pass"
        self._check_alone(used)
        runs = self._decode(plan)
        prompt_logprobs = tuple(self._prefill(plan))
        self._save_states(plan)
        exported += [
            self._export(export)
            for export in plan.exports
            if export.page is not None or export.block_id not in self.unsaved
        ]
        tokens = sum(1 + len(one.drafts) + len(one.before) for one in plan.decodes)
        decode_s = tokens / self.speed_tokens_s + self.resize_s * bool(plan.num_pages)
        decode_s += self.begin_s * bool(plan.chunks)
        decode_s += self.end_token_s * sum(len(one.before) for one in plan.decodes)
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
        for kept in (self.passes, self.encoded, self.pages, self.tables, self.snapshots):
            kept.clear()
        for kept in (self.unpacked, self.states, self.sampled, self.history, self.unsaved):
            kept.clear()
        self.num_pages = 0

    def _set_up(self, plan: Plan) -> None:
        for snapshot in plan.evictions:
            assert snapshot in self.snapshots or snapshot in self.unsaved
            self.snapshots.pop(snapshot, None)
        for slot in plan.freed_slots:
            kept: Any
            for kept in (self.tables, self.unpacked, self.states, self.sampled, self.history):
                kept.pop(slot, None)
        for move in plan.moved_pages:
            assert plan.num_pages <= move.source and move.target < plan.num_pages
            self.pages[move.target] = list(self._page(move.source))
        if plan.num_pages:
            assert self.config.keeps_kv
            assert plan.num_pages * self.config.page_bytes <= self.config.limit_bytes
            self.num_pages = plan.num_pages
            for page in [page for page in self.pages if page >= plan.num_pages]:
                del self.pages[page]
        for change in plan.tables:
            table = self.tables.setdefault(change.slot, [])
            assert change.first <= len(table), "a table has no gaps"
            assert all(page < self.num_pages for page in change.pages), "the page is there"
            table[change.first :] = change.pages
            assert len(set(table)) == len(table)

    def _fill(self, plan: Plan) -> None:
        for copy in plan.copies:
            source, target = self._page(copy.source), self._page(copy.target)
            assert 0 < copy.positions < self.config.page_tokens and copy.source != copy.target
            assert None not in source[: copy.positions]
            target[: copy.positions] = source[: copy.positions]
            self.copied += copy.positions
        assert len({*(c.target for c in plan.copies)}) == len(plan.copies)
        for insert in plan.inserts:
            content = content_of(insert.payload)
            if insert.page is None:
                self._keep(insert.block_id, content)
            else:
                size, prefixes, one = self.config.page_tokens, [], self.root
                for token in content:
                    one = one.then(token)
                    prefixes.append(one)
                first = (len(prefixes) - 1) // size * size
                held: list[Prefix | None] = [*prefixes[first:]]
                self._page(insert.page)[:] = held + [None] * (size - len(held))
        for unpack in plan.unpacked:
            assert self.config.unpacked_token_bytes and unpack.slot in self.tables
            if unpack.tokens:
                self.unpacked[unpack.slot] = unpack.tokens
            else:
                del self.unpacked[unpack.slot]

    def _check_open_passes(self, plan: Plan) -> None:
        """Check that nothing else happens to the slots and pages of passes that are open."""
        dropped = set(plan.dropped_passes)
        open_passes = [one for number, one in self.passes.items() if number not in dropped]
        slots = {chunk.slot for one in open_passes for chunk in one.chunks}
        touched = {restore.slot for restore in plan.state_restores} | set(plan.freed_slots)
        touched |= {change.slot for change in plan.tables} | {one.slot for one in plan.unpacked}
        touched |= {chunk.slot for chunk in plan.chunks}
        assert slots.isdisjoint(touched), "the slot of an open pass is left alone"
        pages = {page for slot in slots for page in self.tables.get(slot, ())}
        changed = {copy.target for copy in (*plan.moved_pages, *plan.copies)}
        changed |= {insert.page for insert in plan.inserts if insert.page is not None}
        changed |= {move.source for move in plan.moved_pages}
        assert pages.isdisjoint(changed), "the pages of an open pass are left alone"
        assert not plan.num_pages or all(page < plan.num_pages for page in pages)

    def _check_alone(self, slots: Sequence[Slot]) -> None:
        """Check that sequences share the same content only."""
        for one in slots:
            for other in slots:
                if one < other:
                    pairs = list(
                        zip(self.tables.get(one, ()), self.tables.get(other, ()), strict=False)
                    )
                    common = set(self.tables.get(one, ())) & set(self.tables.get(other, ()))
                    assert common == {a for a, b in pairs if a == b}, "shared at the same place"

    def _page(self, number: int) -> list[Prefix | None]:
        assert 0 <= number < self.num_pages, "the page is there"
        return self.pages.setdefault(number, [None] * self.config.page_tokens)

    def _export(self, export: Export) -> Exported:
        if export.page is None:
            return Exported(export.block_id, self._payload(self.snapshots[export.block_id]))
        page = self._page(export.page)[: export.positions]
        last = page[-1]
        assert last is not None and len(page) == export.positions
        return Exported(export.block_id, self._payload(tuple(last.tokens)))

    def row(self, slot: Slot, length: int) -> list[int]:
        """Return the tokens of a slot's first positions, as attention reads them."""
        if not self.config.keeps_kv:
            return list(self.states.get(slot, ())[:length])
        size, table = self.config.page_tokens, self.tables.get(slot, [])
        assert length <= len(table) * size, "within the table"
        before, tokens = self.root, []
        for position in range(length):
            one = self._page(table[position // size])[position % size]
            assert one is not None, "only what was written is read"
            assert one.parent is before, "of the same prefix"
            tokens.append(one.token)
            before = one
        return tokens

    def _restore_states(self, plan: Plan) -> None:
        for restore in plan.state_restores:
            if restore.snapshot_id in self.unsaved:
                self._failed[restore.slot] = "there is no such state"
                content = [HOLE] * restore.position
            else:
                content = list(self.snapshots[restore.snapshot_id])
            assert len(content) == restore.position
            self.states[restore.slot] = content
            if self.config.keeps_kv:
                row = self.row(restore.slot, restore.position)
                assert HOLE in row or HOLE in content or row == content, "of another prefix"

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
            self._check_room(slot, decode.position + 1 + len(decode.drafts))
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
            self._check_room(decode.slot, end)
            row = self.row(decode.slot, decode.position + len(run))
            tokens, first = [*row, run[-1]], decode.output_index + len(run)
            for index in range(first, first + decode.guesses):
                right = self._random.random() >= self.wrong_guesses
                tokens.append(sample(tokens, decode.sampling.seed, index) if right else 0)
            found.append(tuple(tokens[len(tokens) - decode.guesses :]))
        return tuple(found)

    def _compute(self, decode: Decode, number: int, token: int) -> int:
        """Return what is sampled after ``token``, in place of draft ``number``."""
        slot, index = decode.slot, decode.output_index + number
        self._write(slot, decode.position + number, [token])
        row = self.row(slot, decode.position + number + 1)
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
                row = [abs(t) for t in tokens_of(self.row(chunk.slot, chunk.start))]
                known = [*row, *chunk.token_ids]
                found = (
                    logprobs_of([*known[: chunk.start + i + 1], token], chunk.logprobs)
                    for i, token in enumerate(chunk.target_ids)
                )
                yield PromptLogprobs(chunk.slot, chunk.start, packed(list(found)))

    def _save_states(self, plan: Plan) -> None:
        for save in plan.state_saves:
            assert save.position % self.config.state_tokens == 0
            if save.slot in self._failed:
                self.unsaved.add(save.snapshot_id)
                continue
            assert len(self.states[save.slot]) == save.position, "the state of that position"
            self._keep(save.snapshot_id, tuple(self.states[save.slot]))

    def check_named(self, block_hash: bytes, page: int, end: int, *, settled: bool) -> None:
        """Check that a page holds the prefix of a hash up to ``end``. As long as results are on
        their way the scheduler may not know yet that it does not."""
        one = self._page(page)[end - 1]
        if (block_hash, one) in self.checked:
            return
        assert one is not None
        tokens = one.tokens
        if HOLE in tokens:
            assert not settled
            return
        assert len(tokens) % self.config.page_tokens == end % self.config.page_tokens
        self.check_content(block_hash, tokens)
        self.checked.add((block_hash, one))

    def check_snapshot(self, snapshot: int, block_hash: bytes, *, settled: bool) -> None:
        """The same for a snapshot."""
        content = self.snapshots.get(snapshot, ())
        if (block_hash, snapshot) in self.checked:
            return
        if snapshot in self.unsaved or HOLE in content:
            assert not settled
            return
        self.check_content(block_hash, content)
        self.checked.add((block_hash, snapshot))

    def check_content(self, block_hash: bytes, content: Sequence[int]) -> None:
        roots = [salted_root(self.config.namespace, salt) for salt in SALTS]
        size = self.config.block_size
        tokens, pictures = tokens_of(content), marked_pictures.pictures_in(content)
        assert block_hash in {block_hashes(root, tokens, size, pictures)[-1] for root in roots}

    def _keep(self, name: int, content: tuple[int, ...]) -> None:
        assert name not in self.seen_ids, "ids are never used twice"
        assert len(content) % self.config.state_tokens == 0
        self.seen_ids.add(name)
        self.snapshots[name] = content

    def _payload(self, content: tuple[int, ...]) -> tuple[memoryview, ...]:
        raw = memoryview(array("i", content).tobytes())
        return (raw[: len(raw) // 2], raw[len(raw) // 2 :])

    def _write(self, slot: Slot, start: int, tokens: Sequence[int]) -> None:
        """Compute the KV of ``tokens`` from ``start`` on. All positions before are read."""
        if self.config.keeps_kv:
            size, one = self.config.page_tokens, self.root
            self.row(slot, start)
            self._check_room(slot, start + len(tokens))
            if start:
                last = self._page(self.tables[slot][(start - 1) // size])[(start - 1) % size]
                assert last is not None
                one = last
            for position, token in enumerate(tokens, start):
                one = one.then(token)
                self._page(self.tables[slot][position // size])[position % size] = one
        state = self.states.setdefault(slot, [])
        if start == 0:
            state.clear()
        if self.config.state_bytes:
            assert len(state) == start, "state goes on where it ended"
        del state[start:]
        state.extend(tokens)

    def _check_room(self, slot: Slot, end: int) -> None:
        if self.config.keeps_kv:
            assert end <= len(self.tables[slot]) * self.config.page_tokens, "within the table"
        assert end <= self.unpacked.get(slot, end), "within the unpacked row"

    def check_memory(self, held: set[Slot]) -> None:
        """Check that the limit is kept, if only the slots ``held`` are still needed."""
        config = self.config
        used = self.num_pages * config.page_bytes + len(self.snapshots) * config.state_bytes
        used += len(held) * config.state_bytes
        unpacked = sum(tokens for slot, tokens in self.unpacked.items() if slot in held)
        used += unpacked * config.unpacked_token_bytes
        lengths = [len(table) for slot, table in self.tables.items() if slot in held and table]
        gathered = sorted(lengths, reverse=True)[: config.gather_rows]
        if config.pads_gathers:
            gathered = [max(lengths, default=0)] * len(gathered)
        used += sum(gathered) * config.page_tokens * config.gather_token_bytes
        least = max(MIN_TOKENS, config.block_size)
        for one in self.passes.values():
            used += max(0, len(one.chunks[0].token_ids) - least) * config.pass_token_bytes
        assert used <= config.limit_bytes, "over the limit"
        assert len(self.snapshots) <= config.max_snapshots
