"""The scheduler: requests in, plans out, results in, tokens out."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Collection
from collections.abc import Sequence as SequenceOf
from dataclasses import asdict

from engine.plan import FoundPart, FoundState, Payload, Plan, StepResult, StoreRoom
from engine.scheduler import integrity
from engine.scheduler.config import SchedulerConfig
from engine.scheduler.intake import Refusal, make_sequence
from engine.scheduler.memory import Memory
from engine.scheduler.outputs import Counters, Outputs
from engine.scheduler.planning.drafting import Drafting
from engine.scheduler.planning.plan_builder import InFlightStep, PlanBuilder
from engine.scheduler.planning.planner import Clock, Planner
from engine.scheduler.planning.prefix_cache import PrefixCache
from engine.scheduler.pools.snapshot_pool import Snapshot
from engine.scheduler.sequences.sequence import ARRIVING, Sequence, Status
from engine.scheduler.sequences.sequence_table import SequenceTable
from engine.scheduler.step_meter import StepMeter
from engine.scheduler.timing.chunks import ChunkPolicy
from engine.scheduler.timing.time_share import TimeShare
from engine.speculation.speculator import Speculator
from shared import wire


class Scheduler:
    """Decides what the engine does next, and never touches the device.

    The caller runs each plan and passes its result to `apply`, in order. With ``look_ahead`` it
    may request one more plan before that. Nothing here blocks, and no message raises an
    exception. ``config``, ``sequences``, ``memory`` and ``planner`` are public for tests and
    tools."""

    def __init__(
        self,
        config: SchedulerConfig,
        clock: Clock = time.monotonic,
        speculator: Speculator | None = None,
        chunk_policy: ChunkPolicy | None = None,
    ) -> None:
        """``chunk_policy``: one that has learned already, of a scheduler with the same
        ``config``."""
        self.config = config
        self.sequences = SequenceTable()
        self.memory = Memory(config)
        self._clock = clock
        self._outputs = Outputs()
        self._counters = Counters()
        self._prefix_cache = PrefixCache(config, self.memory, self._outputs, self._counters)
        self._drafting = Drafting(config, speculator)
        time_share = TimeShare(config.streams_share)
        policy = self.chunk_policy = chunk_policy or ChunkPolicy(
            config.state_tokens if config.reuses_states else config.block_size,
            config.prefill_chunk_tokens,
            config.max_chunk_tokens,
            layers=config.layers,
            has_experts=config.has_experts,
            on_gpu=config.look_ahead,
        )
        self.planner = Planner(
            config,
            self.sequences,
            self.memory,
            self._prefix_cache,
            self._drafting,
            policy,
            time_share,
            self._outputs,
            self._counters,
            clock,
        )
        self._meter = StepMeter(
            policy, time_share, self.planner.pictures, self._drafting, self._counters
        )
        self._in_flight: deque[InFlightStep] = deque()
        self._arrivals = 0
        self._steps = 0
        self._draining = False
        self.progress = 0
        """Number of tokens computed so far. It does not change only if nothing is computed."""

    # -- messages ------------------------------------------------------------------

    def submit(self, message: wire.Submit, grammar: object = None, adapter: int = 0) -> None:
        """`receive` and `enqueue` a request with everything that it needs."""
        if (seq := self.receive(message)) is not None:
            seq.grammar = grammar
            self.enqueue(seq, adapter)

    def receive(self, message: wire.Submit) -> Sequence | None:
        """Return the sequence of a request, which ends an older attempt and waits for `enqueue`;
        None if it is refused. `take_outputs` then returns `Refused`."""
        try:
            self._end_older_attempt(message)
            seq = make_sequence(
                message,
                self.config,
                capacity=self.memory.capacity,
                arrival=self._arrivals,
                now_s=self._clock(),
            )
        except Refusal as refusal:
            self._outputs.messages.append(refusal.answer(message))
            return None
        self._arrivals += 1
        self.sequences.live[message.request_id] = seq
        return seq

    def enqueue(self, seq: Sequence, adapter: int = 0) -> None:
        """Accept ``seq`` with its grammar, which is kept until it ends: it waits for a slot.
        `take_outputs` then returns `Accepted` and deltas. ``adapter`` is the place of its adapter,
        which must stay there until then."""
        message = seq.request
        accepted = wire.Accepted(request_id=message.request_id, attempt=message.attempt)
        self._outputs.messages.append(accepted)
        seq.adapter = adapter
        seq.submitted_s = self._clock()
        seq.drafts = self._drafting.begin(message, seq.grammar)
        self._counters.prompt_tokens += seq.num_prompt_tokens
        self._counters.images += len(seq.pictures)
        self.sequences.enqueue(seq)
        if message.generated:
            # An earlier attempt may have reached the end, but its last delta was lost.
            self._send(seq, [], [], seq.finish_reason(self.config.eos_token_ids))

    def refuse(self, seq: Sequence, refused: wire.Refused) -> None:
        """End ``seq``, which is not accepted yet, with this answer."""
        self._outputs.messages.append(refused)
        self.sequences.finish(seq)

    def abort(self, request_id: str, attempt: int | None = None) -> None:
        """End a request without a delta. Its slot is free in the next plan."""
        seq = self.sequences.live.get(request_id)
        if seq is not None and attempt in (None, seq.request.attempt):
            self._counters.aborts += 1
            self._end(seq)

    def withdraw(self, adapter: int) -> list[Sequence]:
        """End the sequences with the adapter in this place. Return new ones, which wait for it and
        continue after the last token."""
        found = [seq for seq in self.sequences.live.values() if seq.adapter == adapter]
        again = []
        for seq in found:
            self._end(seq)
            if (new := self.receive(seq.continuation)) is not None:
                new.grammar = seq.grammar
                again.append(new)
        self._counters.preemptions += len(found)
        return again

    def drop(self, requests: Collection[tuple[str, int]]) -> None:
        """Forget ``requests``, a set of (id, attempt), because their router is gone."""
        for request_id, attempt in requests:
            seq = self.sequences.live.get(request_id)
            if seq is not None and seq.request.attempt == attempt:
                self._end(seq)
        sent, deltas = self._outputs.messages, self._outputs.deltas
        sent[:] = [one for one in sent if (one.request_id, one.attempt) not in requests]
        deltas[:] = [one for one in deltas if (one.request_id, one.attempt) not in requests]

    def clear_cache(self) -> None:
        """Drop unused pages and snapshots."""
        self.memory.evict_all()

    def drain(self) -> None:
        """Refuse new requests from now on, and those that are not accepted yet."""
        self._draining = True
        for seq in self.sequences.arriving():
            self.refuse(seq, _draining().answer(seq.request))

    def on_fetched(
        self,
        ticket: int,
        payloads: SequenceOf[Payload],
        end: FoundState | FoundPart | None = None,
    ) -> None:
        """Accept the kvstore's answer to a fetch: its pages from the first one on, or none, and
        the state or the part of a page at their end."""
        seq = self.sequences.loading.pop(ticket, None)
        if seq is not None:
            config, size = self.config, self.config.page_bytes
            state = end if isinstance(end, FoundState) else None
            state_bytes = config.state_bytes if state else 0
            if isinstance(end, FoundPart):
                seq.fetch.part_page = seq.fetch.first_page + len(payloads)
                seq.fetch.part_blocks = end.blocks
                payloads = [*payloads, end.payload]
            room = self.memory.release_fetch(seq, keep=len(payloads) * size + state_bytes)
            if state and room >= state_bytes:
                blocks = state.end * (config.state_tokens // config.block_size)
                seq.fetch.state_end = seq.fetch.first_state + blocks
                seq.fetch.state = state.payload
                room -= state_bytes
            seq.fetch.payloads = dict(enumerate(payloads[: room // size], seq.fetch.first_page))
            self.sequences.enqueue(seq)

    def on_not_stored(self, block_hash: bytes, *, is_snapshot: bool) -> None:
        """Record that a page or a snapshot of `Outputs.stores` did not reach the kvstore."""
        self.memory.on_not_stored(block_hash, is_snapshot=is_snapshot)

    # -- steps ---------------------------------------------------------------------

    def schedule(self, store_room: StoreRoom | None = None) -> Plan | None:
        """Return the next plan, None if there is nothing to do before a message or a result.

        Data for the kvstore is limited to ``store_room``; the rest is sent later."""
        self.memory.backlog.room = store_room
        if len(self._in_flight) > self.config.look_ahead:
            return None
        while True:
            builder = PlanBuilder(self._steps, self.config)
            self.planner.fill(builder)
            built = builder.build(self.memory)
            if built is not None:
                self._steps += 1
                self._in_flight.append(built[1])
                return built[0]
            if self._in_flight or not builder.changed:
                return None

    def apply(self, result: StepResult) -> None:
        """Process the result of the oldest plan in flight.

        Raises: ValueError if the result belongs to another step, which is a bug of the caller."""
        if not self._in_flight or self._in_flight[0].number != result.step:
            raise ValueError(f"step {result.step} is not the oldest one in flight")
        self._in_flight[0].check(result)
        step = self._in_flight.popleft()
        self.planner.backoff.step_succeeded()
        self.memory.ledger.step_succeeded()
        self._fail_sequences(step, result)
        self._release_saved(step, result)
        self.progress += self._meter.measure(step, result)
        self._add_prompt_logprobs(step, result)
        start = 0
        guesses = result.guesses or ((),) * len(step.decodes)
        for seq, length, guess in zip(step.decodes, result.run_lengths, guesses, strict=True):
            seq.num_inflight -= 1
            seq.num_inflight_drafts = 0
            seq.awaits_guesses &= seq.num_inflight > 0  # a later step may guess
            if seq.status is not Status.FINISHED and seq not in step.discarded:
                if (proposal := step.drafts.get(seq)) is not None:
                    self._drafting.verified(seq, proposal, length - 1)
                run = slice(start, start + length)
                self._append_run(seq, result.tokens[run], result.logprobs[run])
                self._drafting.guessed(seq, guess)
            start += length

    def recover(self, reason: str, *, out_of_memory: bool, too_long: bool = False) -> bool:
        """Undo all plans in flight, and one half built, after a step or `schedule` raised and the
        executor was reset.

        Sequences with a slot wait to start again, fewer of them at once: with a lower memory limit
        if the step was ``out_of_memory``, and with shorter chunks if one took ``too_long``. A
        sequence that was running alone both times ends with ``reason`` as its error. Returns
        False if the steps were for no sequence: the next would raise again."""
        running = self.sequences.with_slot()
        for_ended = any(s.by_slot or s.saved for s in self._in_flight) or self.sequences.leaving
        if out_of_memory:
            self.memory.ran_out()
        is_shorter = (
            too_long and any(s.stretch for s in self._in_flight) and self.chunk_policy.shorten()
        )
        self._in_flight.clear()
        self._meter.clear()
        self.planner.clear()
        self.sequences.drop_slots()
        self.memory.clear()
        self.planner.backoff.step_failed(len(running))
        for seq in self.sequences.live.values():
            seq.num_inflight, seq.num_inflight_drafts, seq.awaits_guesses = 0, 0, False
        for seq in running:
            seq.reset()
            self.sequences.enqueue(seq, Status.PREEMPTED)
        self._counters.preemptions += len(running)
        self._limit_to_memory()
        if len(running) == 1 and not is_shorter and not running[0].is_finished:
            self._count_failure(running[0], reason)
        return bool(running or for_ended)

    def take_outputs(self) -> Outputs:
        """Return the messages since the last call."""
        return self._outputs.take(*self.memory.take_changes())

    # -- state ---------------------------------------------------------------------

    @property
    def idle(self) -> bool:
        """Whether there is no request, and nothing of an earlier one is in flight."""
        sequences = self.sequences
        unsent = sequences.leaving or sequences.vacated or self.memory.backlog.has_next
        return not (sequences.live or self._in_flight or unsent)

    @property
    def context_length(self) -> int:
        """The tokens of the longest sequence: the model's, or what memory holds."""
        return min(self.config.context_length, self.memory.capacity)

    @property
    def num_unstored(self) -> int:
        """Number of pages and snapshots waiting to be sent to the kvstore."""
        return len(self.memory.backlog)

    def live(self) -> list[wire.LiveRequest]:
        """Return every request with its progress."""
        return [
            seq.request.waiting
            if seq.status in ARRIVING
            else wire.LiveRequest(
                request_id=seq.request.request_id,
                attempt=seq.request.attempt,
                generated=seq.num_output_tokens,
                computed_prompt_tokens=self._computed_prompt_tokens(seq),
                cached_prompt_tokens=seq.cached_ram_tokens + seq.cached_ssd_tokens,
            )
            for seq in self.sequences.live.values()
        ]

    def _computed_prompt_tokens(self, seq: Sequence) -> int:
        """Return how many tokens of the prompt of ``seq`` are computed once the plans so far have
        run. An open pass counts in proportion to its computed layers."""
        computed = seq.num_computed_tokens
        if (one := self.planner.passes.of(seq)) is not None:
            more = seq.pass_end - seq.num_computed_tokens
            computed += more * one.layers_done // self.config.layers
        return min(computed, seq.num_prompt_tokens)

    def cached_hashes(self) -> list[bytes]:
        """Return every hash that sequences may start from. `Outputs` has the changes to this
        set."""
        return self.memory.findable_hashes()

    def stats(self) -> wire.EngineStats:
        """Return the gauges and counters of the scheduler. Used blocks are all bytes in use, in
        blocks, including cached pages. Of states and of what passes gather, only what has no memory
        beside the blocks counts."""
        config, memory, sequences = self.config, self.memory, self.sequences
        totals = {f"{name}_total": total for name, total in asdict(self._counters).items()}
        # The memory of pictures is separate: nothing else waits for it.
        limit_bytes = memory.ledger.limit_bytes - config.picture_bytes
        unit = config.unit_bytes
        lost_bytes = config.limit_bytes + config.draft_bytes - limit_bytes  # when memory ran out
        total = max(0, config.total_blocks - -(-lost_bytes // unit))
        free_bytes = memory.pages.num_free * config.page_bytes + config.picture_bytes
        if config.num_blocks:
            beside_bytes = config.limit_bytes - config.total_blocks * unit
            states_bytes = len(memory.used_slots) * config.state_bytes
            free_bytes += min(memory.gather_bytes + states_bytes, beside_bytes)
        used = min(total, -(-(memory.ledger.used_bytes - free_bytes) // unit))
        return wire.EngineStats(
            running=sequences.num_running,
            waiting=len(sequences.waiting) + len(sequences.loading),
            total_blocks=total,
            used_blocks=used,
            free_blocks=total - used,
            limit_bytes=limit_bytes,
            # Pages of background sequences are given to other sequences on demand.
            unevictable_bytes=memory.used_bytes(of_background=False),
            kept_states=len(memory.snapshots),
            open_passes=len(self.planner.passes),
            drafts=self._drafting.stats(),
            image_bytes=self.planner.pictures.used_bytes,
            **totals,
        )

    def check_integrity(self) -> None:
        """Check the invariants of `integrity`. Raises: `IntegrityError`."""
        integrity.check(self.config, self.sequences, self.memory, self._in_flight)

    # -- inside --------------------------------------------------------------------

    def _end_older_attempt(self, message: wire.Submit) -> None:
        """End an older attempt of the request. Raises: `Refusal` if there are too many requests."""
        if self._draining:
            raise _draining()
        live = self.sequences.live
        old = live.get(message.request_id)
        if old is None and len(live) >= self.config.max_sequences:
            raise Refusal("full", f"the engine already has {len(live)} requests")
        if old is not None:
            if old.request.attempt >= message.attempt:
                raise Refusal("invalid", "this request is running already", "request_id")
            self._end(old)

    def _append_run(
        self, seq: Sequence, run: SequenceOf[int], logprobs: SequenceOf[wire.TokenLogprobs | None]
    ) -> None:
        """Append the tokens of a decode and send them."""
        if seq.first_token_s is None:
            seq.first_token_s = self._clock()
            self._counters.image_hits += max(0, len(seq.pictures) - seq.num_encoded)
        finish = seq.append(run, self.config.eos_token_ids)
        self._counters.generated_tokens += len(run)
        self._send(seq, list(run), [one for one in logprobs if one is not None], finish)

    def _add_prompt_logprobs(self, step: InFlightStep, result: StepResult) -> None:
        """Send the new log-probabilities of prompts."""
        for slot, start, found in result.prompt_logprobs:
            seq = step.by_slot[slot]
            # A preempted sequence computes some of them again.
            new = found.after(seq.num_prompt_logprobs - start)
            if new and seq.status is not Status.FINISHED and seq not in step.discarded:
                seq.num_prompt_logprobs += len(new)
                self._outputs.add_delta(seq, [], self._clock(), prompt_logprobs=new)

    def _send(
        self,
        seq: Sequence,
        token_ids: list[int],
        logprobs: list[wire.TokenLogprobs],
        finish: wire.FinishReason | None,
    ) -> None:
        """Send ``token_ids``, the last tokens of ``seq``, and end ``seq`` if it is finished."""
        if token_ids or finish:
            self._outputs.add_delta(
                seq, token_ids, self._clock(), logprobs=logprobs or None, finish=finish
            )
        if finish:
            self._end(seq)

    def _limit_to_memory(self) -> None:
        """Limit all answers to the capacity, which may have become less. End those sequences with
        an error that do not fit any more."""
        capacity = self.memory.capacity
        for seq in list(self.sequences.live.values()):
            seq.max_tokens = min(seq.max_tokens, max(0, capacity - seq.num_prompt_tokens))
            if seq.num_output_tokens < seq.max_tokens:
                continue
            error = f"{len(seq.token_ids)} tokens no longer fit in this engine's memory"
            if seq.status in ARRIVING:
                self.refuse(seq, Refusal("too_large", error, "prompt").answer(seq.request))
            else:
                self._outputs.add_delta(seq, [], self._clock(), finish="error", error=error)
                self.sequences.finish(seq)

    def _count_failure(self, seq: Sequence, reason: str) -> None:
        """Count a step that raised while ``seq`` ran alone. End ``seq`` the second time, because
        ``seq`` must be the cause. The first time, the cache may have used the missing memory."""
        seq.failures += 1
        if seq.failures > 1:
            self._outputs.add_delta(seq, [], self._clock(), finish="error", error=reason)
            self.sequences.finish(seq)

    def _end(self, seq: Sequence) -> None:
        """End ``seq``. What it computed stays cached."""
        last = self._in_flight[-1] if self._in_flight else None
        self._prefix_cache.name_computed(seq, last)
        self._prefix_cache.snapshot_policy.publish_trailing(seq)
        self.memory.drop_fetch(seq)
        if self.planner.passes.of(seq) is None:
            self.memory.release(seq)
        self.sequences.finish(seq)

    def _fail_sequences(self, step: InFlightStep, result: StepResult) -> None:
        """End the sequences whose part of the step raised, and restart those that share their
        pages."""
        passes = self.planner.passes
        reasons = self._drop_failed_pictures(result)
        reasons |= {step.by_slot[slot]: why for slot, why in result.failed}
        for snapshot in step.invalid:
            self.memory.release_withdrawn(snapshot)
        failed = reasons.keys() - step.discarded
        for seq in failed:
            passes.leave(seq, step.pass_number)
        later = self._in_flight[0] if self._in_flight else None
        sharing = discard_failed(failed, step, later, self.memory)
        for seq in failed | sharing:
            seq.num_computed_tokens = 0
        for seq in failed:
            if seq.status is Status.FINISHED:
                continue
            self._outputs.add_delta(seq, [], self._clock(), finish="error", error=reasons[seq])
            self._end(seq)
        for seq in sharing:
            passes.drop(seq)
            if seq.slot is not None and seq.status is not Status.FINISHED:
                self.sequences.vacate(seq)
                self.memory.release(seq)
                self.memory.drop_fetch(seq)
                seq.reset()
                self.sequences.enqueue(seq, Status.PREEMPTED)

    def _drop_failed_pictures(self, result: StepResult) -> dict[Sequence, str]:
        """Drop the pictures that could not be encoded. Return the sequences that still need one of
        them, and why they fail. Their passes are dropped: no chunk in them has raised."""
        found: dict[Sequence, str] = {}
        for digest, reason in result.failed_pictures:
            self.planner.pictures.drop(digest)
            for seq in self.sequences.ordered(Status.PREFILLING):
                if any(one.digest == digest for one in seq.pictures_ahead):
                    found[seq] = f"a picture cannot be encoded: {reason}"
                    self.planner.passes.drop(seq)
        return found

    def _release_saved(self, step: InFlightStep, result: StepResult) -> None:
        """Unpin the saved snapshots, and send what was exported to the kvstore."""
        missing = {snapshot.id for snapshot in step.invalid}
        failed = {step.by_slot[slot] for slot, _ in result.failed}
        for seq, snapshots in reversed(step.saved.items()):
            if seq in failed:
                missing.update(snapshot.id for snapshot in snapshots)
            for snapshot in reversed(snapshots):
                self.memory.snapshots.unpin(snapshot)
        for snapshot_id in missing:
            self.memory.backlog.ignore_export(snapshot_id)
        for block_id, payload in result.exported:
            store = self.memory.backlog.take_exported(block_id, payload)
            if store is not None:
                self._outputs.stores.append(store)


def _draining() -> Refusal:
    return Refusal("draining", "the engine is draining")


def discard_failed(
    failed: set[Sequence], step: InFlightStep, later: InFlightStep | None, memory: Memory
) -> set[Sequence]:
    """Forget the names and snapshots that ``failed`` sequences got in ``step``.

    They could be found since ``step`` was planned. ``later``, the plan after it, may therefore
    have let others share their pages, and named more on top: these names are forgotten too.
    Return the other sequences that have wrong KV in this way; they must start again."""
    bad_names: set[bytes] = set()
    bad_snapshots: set[Snapshot] = set()
    for seq in failed:
        bad_names.update(step.named.pop(seq, ()))
        bad_names.update(later.named.pop(seq, ()) if later else ())
        for content in step.filled.pop(seq, ()):
            memory.forget_stored(content)
        for snapshot in step.saved.pop(seq, ()):
            if memory.withdraw(snapshot):
                memory.release_withdrawn(snapshot)
            bad_snapshots.add(snapshot)
    sharing: set[Sequence] = set()
    if later is not None:
        sharing = {s for s, found in later.shared.items() if not bad_names.isdisjoint(found)}
        sharing |= {s for s, found in later.restored.items() if not bad_snapshots.isdisjoint(found)}
        sharing -= failed
        later.discarded |= failed | sharing
        for seq in later.discarded:
            bad_names.update(later.named.pop(seq, ()))
            for content in later.filled.pop(seq, ()):
                memory.forget_stored(content)
            for snapshot in later.saved.pop(seq, ()):
                if memory.withdraw(snapshot):
                    later.invalid.append(snapshot)
    for block_hash in bad_names:
        memory.withdraw_name(block_hash)
    return sharing
