"""Prefix reuse: sequences share the pages of equal prefixes, and find those of the kvstore."""

from __future__ import annotations

from collections.abc import Collection
from collections.abc import Sequence as SequenceOf

from engine.scheduler.config import SchedulerConfig
from engine.scheduler.memory import Memory
from engine.scheduler.outputs import Counters, Outputs
from engine.scheduler.planning.pictures import WholePictures
from engine.scheduler.planning.plan_builder import InFlightStep, PlanBuilder
from engine.scheduler.planning.snapshot_policy import SnapshotPolicy
from engine.scheduler.pools.page_pool import Page, PageContent
from engine.scheduler.sequences.sequence import Sequence

MIN_COPIED = 4
"""Fewer positions than this are computed instead of copied."""


class PrefixCache:
    """Lets sequences share pages, and names the blocks in them."""

    def __init__(
        self, config: SchedulerConfig, memory: Memory, outputs: Outputs, counters: Counters
    ) -> None:
        self._config = config
        self._memory = memory
        self._pages = memory.pages
        self._outputs = outputs
        self._counters = counters
        self.snapshot_policy = SnapshotPolicy(config, memory)
        self._whole_pictures = WholePictures(config)

    def share(
        self, seq: Sequence, builder: PlanBuilder, ahead: Collection[bytes] | None = None
    ) -> None:
        """Let the table of ``seq`` go on with cached pages, and with those of running sequences,
        where its computed part ends. If the model has recurrent state, they end at the last
        snapshot among them. A part of a page is copied only if the block after it is not in
        ``ahead``: those blocks are computed next, and then the page is shared. None: no part is.

        The pages fetched from the kvstore are inserted first, as many as a plan may insert. If
        more are left, ``seq`` is restoring (`Sequence.is_restoring`): call this again for the next
        plan."""
        config, policy = self._config, self.snapshot_policy
        size = config.block_size
        first = seq.num_computed_tokens // size
        limit = min(seq.num_restorable_tokens // size, len(seq.block_hashes))
        self._insert_pages(seq, limit, builder)
        fetched_end = self._insert_fetched_state(seq, first, limit, builder)
        known = seq.num_computed_tokens // config.page_tokens
        end = limit
        if config.keeps_kv:
            end = self._reach(seq, known, limit, builder)
            if ahead is None or (end < len(seq.block_hashes) and seq.block_hashes[end] in ahead):
                end = end // config.blocks_per_page * config.blocks_per_page
            end = max(first, end)
        end = policy.restorable_end(seq, first, end)
        if config.keeps_kv:
            end = max(first, self._whole_pictures.restorable_blocks(seq, end))
            end = policy.restorable_end(seq, first, end)
        if end <= first:
            return
        snapshot = policy.pin(seq, end) if config.reuses_states else None
        taken = self._take(seq, known, end, builder) if config.keeps_kv else end
        if snapshot is not None and taken == end:
            builder.restore_state(seq, end * size, snapshot)
        elif snapshot is not None:
            self._memory.snapshots.unpin(snapshot)
        end = taken
        if end <= first:
            return
        self._count(seq, first, end, of_state=end == fetched_end)
        builder.step.shared.setdefault(seq, []).extend(seq.block_hashes[first:end])
        if config.uses_store:
            self._touch_stored(seq, first, end)
        seq.advance(end * size)
        seq.snapshots.newest_position = end * size
        seq.num_named_blocks = end

    def copy_running(self, seq: Sequence, builder: PlanBuilder) -> None:
        """Copy the positions after the last block of ``seq`` from a running sequence with the same
        tokens there, if there is one. Sequences that start with the same new prefix then compute
        only the tokens they do not share.

        Not with look-ahead: the positions may still turn out to be wrong, and have no name."""
        start, size = seq.num_computed_tokens, self._config.block_size
        number, rest = divmod(start, size)
        if rest or not number or self._config.look_ahead or self._config.state_bytes:
            return
        if seq.needs_prompt_logprobs or seq.pictures or not self._config.keeps_kv:
            return
        before = slice(number - 1, number)
        place, first = divmod(start, self._config.page_tokens)
        inserted = {page for page, _, _ in builder.inserted}  # after all copies
        end, best = start + MIN_COPIED - 1, None
        for source in self._memory.holders:
            if source is seq or source.block_hashes[before] != seq.block_hashes[before]:
                continue
            last = min(start + size, seq.prefill_end, source.num_computed_tokens)
            common = _count_common(seq.token_ids[start:last], source.token_ids[start:last])
            is_usable = not (source.pictures or source.is_finished)
            if is_usable and start + common > end and source.pages[place] not in inserted:
                end, best = start + common, source.pages[place]
        if best is None or not self._memory.reserve_gathers(seq, end):
            return
        copied = self._memory.copy_of(best, first + end - start)
        if copied is None:
            return
        self._memory.replace(seq, place, [copied])
        self._counters.cached_ram_tokens += sum(seq.count_cached_tokens(end - start, 0))
        seq.advance(end)

    def name_computed(self, seq: Sequence, step: InFlightStep | None) -> None:
        """Let others find the full blocks of ``seq``, computed in ``step`` or before."""
        if not self._config.prefix_cache:
            return
        seq.update_block_hashes()
        if not self._config.keeps_kv:
            return
        named = []
        for number in range(seq.num_named_blocks, seq.num_nameable_blocks):
            place, index = divmod(number, self._config.blocks_per_page)
            end = (index + 1) * self._config.block_size
            block_hash = seq.block_hashes[number]
            content = self._name(seq.pages[place], end, block_hash)
            named.append(block_hash)
            if content is not None and step is not None:
                step.filled.setdefault(seq, []).append(content)
        seq.num_named_blocks = max(seq.num_named_blocks, seq.num_nameable_blocks)
        if named and step is not None:
            step.named.setdefault(seq, []).extend(named)

    def name_inserted(self, builder: PlanBuilder) -> None:
        """Let others find the pages that ``builder`` inserts."""
        for page, _, hashes in builder.inserted:
            for number, block_hash in enumerate(hashes, 1):
                self._name(page, number * self._config.block_size, block_hash, stored=True)
            self._pages.name_part(page, stored=True)

    def _name(
        self, page: Page, end: int, block_hash: bytes, *, stored: bool = False
    ) -> PageContent | None:
        """Name a block. Return the content of the page if it is full with that."""
        before = page.content
        self._pages.name(page, end, block_hash, stored=stored)
        if end < self._config.page_tokens or page.content is None:
            return None
        if before is not None and before is not page.content:
            self._memory.backlog.discard(before)
        if self._config.writes_through:
            self._memory.backlog.add([page.content])
        return page.content

    def _reach(self, seq: Sequence, known: int, limit: int, builder: PlanBuilder) -> int:
        """Return the number of blocks of ``seq``, up to ``limit``, that are cached or inserted by
        this plan, if its pages before number ``known`` are computed."""
        size = self._config.blocks_per_page
        inserted = self._inserted(builder)
        while (known + 1) * size <= limit:
            block_hash = seq.block_hashes[(known + 1) * size - 1]
            if block_hash not in self._pages and block_hash not in inserted:
                break
            known += 1
        hashes = seq.block_hashes[:limit]
        blocks = self._pages.match(hashes, known).blocks
        part = range(known * size, min(len(hashes), (known + 1) * size))
        return max([blocks, *(number + 1 for number in part if hashes[number] in inserted)])

    def _inserted(self, builder: PlanBuilder) -> dict[bytes, Page]:
        return {hashes[-1]: page for page, _, hashes in builder.inserted}

    def _take(self, seq: Sequence, known: int, end: int, builder: PlanBuilder) -> int:
        """Put the pages with the blocks of ``seq`` up to ``end`` into its table, after ``known``
        ones. Return the number of blocks that it has then."""
        config, size = self._config, self._config.blocks_per_page
        inserted = self._inserted(builder)
        pages: list[Page] = []
        for number in range(known, end // size):
            block_hash = seq.block_hashes[(number + 1) * size - 1]
            page = self._pages.full_page(block_hash) or inserted[block_hash]
            self._pages.acquire(page)
            pages.append(page)
        reached = max(end // size, known) * size
        has_room = self._memory.reserve_gathers(seq, end * config.block_size)
        if end > reached and has_room:
            part_end = (end - reached) * config.block_size
            found = self._pages.part_of_page(seq.block_hashes[end - 1], part_end)
            new = inserted.get(seq.block_hashes[end - 1])
            if found is None:  # in a page that this plan inserts, and copies come before that
                if new is not None and new.refs == 1:  # nobody else takes it
                    self._pages.acquire(new)
                    pages.append(new)
                    reached = end
            elif not found.refs and found.named_end == part_end:
                self._pages.acquire(found)
                pages.append(found)
                reached = end
            elif (copied := self._memory.copy_of(found, part_end)) is not None:
                pages.append(copied)
                reached = end
        is_whole = reached == end or not config.whole_picture_tokens
        if has_room and is_whole and reached * config.block_size > seq.num_computed_tokens:
            self._memory.replace(seq, known, pages)
            return reached
        for page in reversed(pages):
            self._pages.release(page)
        return 0

    def _insert_pages(self, seq: Sequence, limit: int, builder: PlanBuilder) -> None:
        """Insert fetched pages of ``seq``, which are needed up to block ``limit``, unless they are
        cached. What cannot be inserted at all is dropped."""
        size = self._config.blocks_per_page
        computed = seq.num_computed_tokens // self._config.page_tokens
        inserted = self._inserted(builder)
        for number in sorted(seq.fetch.payloads):
            last = seq.fetch.part_blocks if number == seq.fetch.part_page else size
            hashes = seq.block_hashes[number * size : number * size + last]
            is_known = not hashes or hashes[-1] in self._pages or hashes[-1] in inserted
            if number < computed or number * size + last > limit or is_known:
                del seq.fetch.payloads[number]
                self._memory.spend_page(seq)
                continue
            if len(builder.inserted) >= self._config.max_inserts:
                return
            payload = seq.fetch.payloads.pop(number)
            page = self._memory.page_for_fetched(seq, number)
            if page is None:
                self._memory.drop_fetch(seq)
                return
            builder.inserted.append((page, payload, hashes))
            self._memory.release_later(page)
            seq.fetch.inserted.add(number)
        if seq.fetch.state is None:
            self._memory.drop_fetch(seq)

    def _insert_fetched_state(
        self, seq: Sequence, first: int, limit: int, builder: PlanBuilder
    ) -> int:
        """Insert the state that the kvstore returned for ``seq``, if it makes more blocks usable
        than the snapshots in RAM, once all its pages are there. Return the number of blocks before
        it, 0 if it was not inserted."""
        number, payload = seq.fetch.state_end, seq.fetch.state
        if payload is None or seq.fetch.payloads:
            return 0
        known = seq.num_computed_tokens // self._config.page_tokens
        reach = self._reach(seq, known, limit, builder) if self._config.keeps_kv else limit
        snapshot = None
        known_end = self.snapshot_policy.restorable_end(seq, first, reach)
        if first < number <= reach and known_end < number:
            snapshot = self._memory.add_fetched_snapshot(seq.block_hashes[number - 1], seq)
        self._memory.drop_fetch(seq)
        if snapshot is None:
            return 0
        builder.inserted_states.append((snapshot, payload))
        builder.keep_pinned(seq, snapshot)
        return number

    def _count(self, seq: Sequence, first: int, end: int, *, of_state: bool) -> None:
        """Count the tokens of the blocks from ``first`` to ``end`` that were found."""
        size = self._config.blocks_per_page
        pages = ((number * size, (number + 1) * size) for number in seq.fetch.inserted)
        inserted = sum(max(0, min(end, high) - max(first, low)) for low, high in pages)
        if of_state and not self._config.keeps_kv:
            inserted = end - first
        tokens = (end - first) * self._config.block_size
        inserted *= self._config.block_size
        # A part of a page that was computed is not found again.
        seq.num_computed_tokens = first * self._config.block_size
        ram, ssd = seq.count_cached_tokens(tokens - inserted, inserted)
        self._counters.cached_ram_tokens += ram
        self._counters.cached_ssd_tokens += ssd

    def _touch_stored(self, seq: Sequence, first: int, end: int) -> None:
        size = self._config.blocks_per_page
        if self._config.keeps_kv and (pages := seq.block_hashes[size - 1 : end : size]):
            part = seq.block_hashes[end - 1 : end] if end % size else []
            self._outputs.touches.append([*pages[first // size :], *part])
        if self._config.reuses_states:
            self._outputs.state_touches.append(seq.block_hashes[end - 1])


def _count_common(one: SequenceOf[int], other: SequenceOf[int]) -> int:
    """Return the length of the common prefix of ``one`` and ``other``."""
    pairs = enumerate(zip(one, other, strict=False))
    return next((index for index, (a, b) in pairs if a != b), min(len(one), len(other)))
