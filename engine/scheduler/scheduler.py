"""The scheduler: requests in, plans out, results in, tokens out."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from collections.abc import Sequence as SequenceOf

from engine.plan import Plan, StepResult
from engine.scheduler import integrity
from engine.scheduler.chunks import ChunkPolicy
from engine.scheduler.config import SchedulerConfig
from engine.scheduler.draft import Draft, Step
from engine.scheduler.failures import take_back
from engine.scheduler.intake import Refusal, take_in
from engine.scheduler.memory import Memory
from engine.scheduler.outputs import Counters, Outputs
from engine.scheduler.planner import Planner
from engine.scheduler.recurrence import StateKeeper
from engine.scheduler.roster import Roster
from engine.scheduler.sequence import HOLDING, Payload, Sequence, State
from shared import wire

KEPT_OF_USED = 0.9
"""Of what was in use when the device had no more memory, as much is used from then on."""


class Scheduler:
    """Decides what the engine does next, and never touches the device.

    The caller runs each plan and hands its result to `apply`, in order. With
    ``look_ahead`` one more plan may be asked for before that. Nothing here blocks, and
    no message makes anything raise; `apply` raises ValueError for a result that belongs
    to another step, which is a bug of the caller.
    """

    def __init__(
        self, config: SchedulerConfig, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._config = config
        self._clock = clock
        self._roster = Roster()
        self._memory = Memory(config)
        self._keeper = StateKeeper(config, self._memory)
        self._policy = ChunkPolicy(config.block_size, config.prefill_chunk_tokens)
        self._outputs = Outputs()
        self._counters = Counters()
        self._planner = Planner(
            config,
            self._roster,
            self._memory,
            self._keeper,
            self._policy,
            self._outputs,
            self._counters,
            clock,
        )
        self._in_flight: deque[Step] = deque()
        self._arrivals = 0
        self._steps = 0
        self._draining = False
        self.progress = 0
        """Tokens computed so far. It stands still only when nothing gets done."""

    # -- messages ------------------------------------------------------------------

    def submit(self, message: wire.Submit, grammar: object = None) -> None:
        """Takes a request in: `Accepted`, and deltas from then on, or `Refused`. ``grammar``
        is kept as long as the request: what its grammar was compiled to."""
        try:
            self._make_way(message)
            seq = take_in(
                message,
                self._config,
                largest_capacity=self._memory.largest_capacity,
                arrival=self._arrivals,
                now_s=self._clock(),
                grammar=grammar,
            )
        except Refusal as refusal:
            self._outputs.messages.append(
                wire.Refused(
                    request_id=message.request_id,
                    attempt=message.attempt,
                    reason=refusal.reason,
                    message=str(refusal),
                    param=refusal.param,
                )
            )
            return
        self._outputs.messages.append(
            wire.Accepted(request_id=message.request_id, attempt=message.attempt)
        )
        self._arrivals += 1
        self._counters.prompt_tokens += seq.prompt_length
        self._roster.live[message.request_id] = seq
        self._roster.enqueue(seq)
        if message.generated:
            # An earlier attempt may have got to the end without saying so.
            self._end_where_due(seq, [], None)

    def abort(self, request_id: str, attempt: int | None = None) -> None:
        """Ends a request without a word; its slot is free in the next plan."""
        seq = self._roster.live.get(request_id)
        if seq is not None and attempt in (None, seq.request.attempt):
            self._counters.aborts += 1
            self._drop(seq)

    def drop_all(self) -> None:
        """Forgets every request and what there was to say: the router is a new one."""
        for seq in list(self._roster.live.values()):
            self._drop(seq)
        self._outputs.messages.clear()
        self._outputs.deltas.clear()

    def drain(self) -> None:
        """From now on new requests are refused."""
        self._draining = True

    def fetched(self, ticket: int, payloads: SequenceOf[Payload]) -> None:
        """The kvstore's answer to a fetch: its blocks from the first one on, or none."""
        seq = self._roster.loading.pop(ticket, None)
        if seq is not None:
            room = self._memory.give_back(seq, but=len(payloads))
            seq.payloads = dict(enumerate(payloads[:room], seq.first_asked))
            self._roster.enqueue(seq)

    # -- steps ---------------------------------------------------------------------

    def schedule(self) -> Plan | None:
        """The next plan; None when there is nothing to do before a message or a result."""
        if len(self._in_flight) > self._config.look_ahead:
            return None
        while True:
            draft = Draft(self._steps)
            self._planner.fill(draft)
            emitted = draft.emit(self._memory)
            if emitted is not None:
                self._steps += 1
                self._in_flight.append(emitted[1])
                return emitted[0]
            if self._in_flight or not draft.changed:
                return None

    def apply(self, result: StepResult) -> None:
        """Takes in the result of the oldest plan in flight."""
        if not self._in_flight or self._in_flight[0].number != result.step:
            raise ValueError(f"step {result.step} is not the oldest one in flight")
        if len(self._in_flight[0].decodes) != len(result.tokens):
            raise ValueError(f"step {result.step} has another number of tokens than decodes")
        if any(slot not in self._in_flight[0].members for slot, _ in result.failed):
            raise ValueError(f"step {result.step} failed for a slot that it did not use")
        if any(scored.slot not in self._in_flight[0].members for scored in result.scored):
            raise ValueError(f"step {result.step} scored a slot that it did not use")
        step = self._in_flight.popleft()
        self._planner.caution.calm()
        self._fail(step, result)
        self._settle_blocks(step, result)
        self._measure(step, result)
        self._tell_prompts(step, result)
        logprobs = result.logprobs or (None,) * len(result.tokens)
        for seq, token, logprob in zip(step.decodes, result.tokens, logprobs, strict=True):
            seq.pending -= 1
            if seq.state is not State.FINISHED and seq not in step.discarded:
                self._advance(seq, token, logprob)

    def start_over(self, reason: str, *, less_memory: bool) -> bool:
        """Takes back all plans in flight, one of which raised; the executor has been reset.

        Who held a slot waits to begin again, fewer of them at once, and with ``less_memory``
        where there was too little; one that was alone twice ends with ``reason`` as its error.
        False when nobody was: then this would happen again.
        """
        holders = self._roster.ordered(*HOLDING)
        ledger = self._memory.ledger
        if less_memory:
            self._memory.lower_limit(max(KEPT_OF_USED * ledger.used_bytes, ledger.limit_bytes / 2))
        self._in_flight.clear()
        self._roster.drop_slots()
        self._memory.clear()
        self._planner.caution.alarm(len(holders))
        for seq in self._roster.live.values():
            seq.pending = 0
        for seq in holders:
            seq.reset()
            self._roster.enqueue(seq, State.PREEMPTED)
        self._counters.preemptions += len(holders)
        if len(holders) == 1:
            self._blame(holders[0], reason)
        return bool(holders)

    def take_outputs(self) -> Outputs:
        """What there is to say since the last call."""
        return self._outputs.take(*self._memory.take_changes())

    # -- state ---------------------------------------------------------------------

    @property
    def idle(self) -> bool:
        """Whether there is no request, and nothing left of one."""
        roster = self._roster
        return not (roster.live or self._in_flight or roster.leaving or roster.vacated)

    def live(self) -> list[wire.LiveRequest]:
        return [
            wire.LiveRequest(
                request_id=seq.request.request_id,
                attempt=seq.request.attempt,
                generated=seq.outputs,
            )
            for seq in self._roster.live.values()
        ]

    def cached_hashes(self) -> list[bytes]:
        """Every hash that others may start from: the whole that `Outputs` has the changes of."""
        return self._memory.findable_hashes()

    def stats(self) -> wire.EngineStats:
        """Gauges and counters, as far as they are known here. Used blocks are all bytes
        that are taken, in blocks, cached ones included."""
        counters, ledger = self._counters, self._memory.ledger
        unit_bytes = self._config.unit_bytes
        total = (ledger.limit_bytes - self._config.row_bytes) // unit_bytes
        used = -(-ledger.used_bytes // unit_bytes)
        return wire.EngineStats(
            running=self._roster.holders,
            waiting=len(self._roster.waiting) + len(self._roster.loading),
            total_blocks=total,
            used_blocks=used,
            free_blocks=total - used,
            limit_bytes=ledger.limit_bytes,
            unevictable_bytes=self._memory.unevictable_bytes,
            steps_total=counters.steps,
            step_seconds_total=counters.step_seconds,
            batch_rows_total=counters.batch_rows,
            prompt_tokens_total=counters.prompt_tokens,
            prefill_tokens_total=counters.prefill_tokens,
            cached_ram_tokens_total=counters.cached_ram_tokens,
            cached_ssd_tokens_total=counters.cached_ssd_tokens,
            generated_tokens_total=counters.generated_tokens,
            preemptions_total=counters.preemptions,
            kept_states=len(self._memory.snapshots),
            aborts_total=counters.aborts,
        )

    def check_integrity(self) -> None:
        """Raises `IntegrityError` if the books do not agree."""
        integrity.check(self._config, self._roster, self._memory, self._in_flight)

    # -- inside --------------------------------------------------------------------

    def _make_way(self, message: wire.Submit) -> None:
        """Ends an older attempt of the same request. Raises `Refusal`."""
        if self._draining:
            raise Refusal("draining", "the engine is draining")
        live = self._roster.live
        old = live.get(message.request_id)
        if old is None and len(live) >= self._config.max_sequences:
            raise Refusal("full", f"the engine has {len(live)} requests already")
        if old is not None:
            if old.request.attempt >= message.attempt:
                raise Refusal("invalid", "this request is running already", "request_id")
            self._drop(old)

    def _advance(self, seq: Sequence, token: int, logprob: wire.TokenLogprobs | None) -> None:
        seq.tokens.append(token)
        if seq.first_token_s is None:
            seq.first_token_s = self._clock()
        self._counters.generated_tokens += 1
        self._end_where_due(seq, [token], logprob)

    def _tell_prompts(self, step: Step, result: StepResult) -> None:
        """Passes on what is new of the log-probabilities of prompts."""
        for slot, start, found in result.scored:
            seq = step.members[slot]
            # One that was set back computes some of them again.
            new = list(found[seq.scored - start :])
            if new and seq.state is not State.FINISHED and seq not in step.discarded:
                seq.scored += len(new)
                self._outputs.tell(seq, [], self._clock(), prompt_logprobs=new)

    def _end_where_due(
        self, seq: Sequence, new: list[int], logprob: wire.TokenLogprobs | None
    ) -> None:
        """Says what is ``new``, and finishes ``seq`` where its last token ends it."""
        finish: wire.FinishReason | None = None
        may_stop = seq.outputs > seq.request.min_tokens
        complete = seq.outputs > 0 and (
            seq.request.grammar is not None and seq.tokens[-1] in self._config.eos_token_ids
        )
        if complete or (may_stop and seq.tokens[-1] in seq.request.stop_token_ids):
            finish = "stop"
        elif seq.outputs >= seq.max_tokens:
            finish = "length"
        if new or finish:
            self._outputs.tell(seq, new, self._clock(), logprob=logprob, finish=finish)
        if finish:
            self._drop(seq)

    def _blame(self, seq: Sequence, reason: str) -> None:
        """A step raised while ``seq`` was alone: the second time it is its own fault. Before the
        first the cache took memory too."""
        seq.failures += 1
        if seq.failures > 1:
            self._outputs.tell(seq, [], self._clock(), finish="error", error=reason)
            self._roster.finish(seq)

    def _drop(self, seq: Sequence) -> None:
        """Ends ``seq``; what it computed stays cached, its head used last."""
        if self._config.prefix_cache:
            seq.extend_hashes()
            seq.saved = self._memory.pool.refresh(seq.hashes[: seq.publishable])
            self._keeper.settle(seq)
        self._memory.give_back(seq)
        self._roster.finish(seq)

    def _fail(self, step: Step, result: StepResult) -> None:
        """Ends those whose part of the step raised, and starts those again that had
        built on it."""
        reasons = {step.members[slot]: why for slot, why in result.failed}
        for seq, block in step.condemned:
            self._memory.settle(block, exists=seq not in reasons)
        failed = reasons.keys() - step.discarded
        later = self._in_flight[0] if self._in_flight else None
        innocent = take_back(failed, step, later, self._memory)
        for seq in failed | innocent:
            seq.computed = 0
        for seq in failed:
            if seq.state is State.FINISHED:
                continue
            self._outputs.tell(seq, [], self._clock(), finish="error", error=reasons[seq])
            self._drop(seq)
        for seq in innocent:
            if seq.slot is not None and seq.state is not State.FINISHED:
                self._roster.vacate(seq)
                seq.reset()
                self._roster.enqueue(seq, State.PREEMPTED)

    def _settle_blocks(self, step: Step, result: StepResult) -> None:
        """What was saved may be evicted from now on, and what came back is stored."""
        exported = dict(result.exported)
        for blocks in reversed(step.saved.values()):
            for block in reversed(blocks):
                block.stored = block.stored or block.id in exported
                self._memory.unpin(block)
        unsaved = {block.id for _, block in step.condemned}
        for number, payload in exported.items():
            if number in step.exports and number not in unsaved:
                self._outputs.stores.append((step.exports[number], payload))

    def _measure(self, step: Step, result: StepResult) -> None:
        chunks = [(start, tokens) for _, start, tokens in step.chunks]
        prefilled = sum(tokens for _, tokens in chunks)
        if not result.scored:  # those take longer than other chunks
            self._policy.observe(
                decode_rows=len(step.decodes), chunks=chunks, elapsed_s=result.elapsed_s
            )
        self._counters.steps += 1
        self._counters.step_seconds += result.elapsed_s
        self._counters.batch_rows += len(step.decodes)
        self._counters.prefill_tokens += prefilled
        self.progress += prefilled + len(step.decodes)
