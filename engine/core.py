"""The main loop: messages in, plans, steps, tokens out."""

from __future__ import annotations

import logging
import time
from typing import NamedTuple

import mlx.core as mx
import msgspec

from engine.executor.base import Executor, PendingStep, is_allocation_failure
from engine.grammar.gate import Gate, Passed, Verdict
from engine.io.inbox import Compiled, Fetched, Inbox, Item, NewRouter
from engine.io.link import Link
from engine.io.status import Status
from engine.io.store_client import StoreClient
from engine.plan import Plan, StepResult
from engine.scheduler import Scheduler
from shared import wire

logger = logging.getLogger(__name__)

REPORT_S = 0.2
IDLE_WAIT_S = 0.5
"""How long to sleep at most when there is nothing to do; what arrives wakes."""


class _Failure(NamedTuple):
    reason: str
    no_memory: bool


class Core:
    """Runs until it is drained. Everything here happens on the main thread."""

    def __init__(
        self,
        *,
        scheduler: Scheduler,
        executor: Executor,
        inbox: Inbox,
        link: Link,
        status: Status,
        store: StoreClient | None,
        gate: Gate,
        check_integrity: bool = False,
    ) -> None:
        self._scheduler, self._executor = scheduler, executor
        self._inbox, self._link, self._status = inbox, link, status
        self._store = store
        self._gate = gate
        self._refused: list[wire.Refused] = []
        self._check = check_integrity
        self._draining = False
        self._pending: PendingStep | None = None
        self._reported_at = 0.0
        self._event_number = 0
        self._schedule_s = self._build_s = self._sample_s = self._emit_s = 0.0
        self._step_s = 0.0

    def run(self) -> None:
        """Serves until told to drain and done with what was there."""
        worked = True
        while not (self._draining and self._scheduler.idle and self._pending is None):
            worked = self.turn(0 if worked else IDLE_WAIT_S)

    def turn(self, wait_s: float = 0) -> bool:
        """Takes what has come, for which it waits up to ``wait_s``, runs a step, and says what
        came of it. False when there was nothing to run."""
        self._take(self._inbox.take(wait_s))
        worked = self._step()
        self._give()
        self._report(worked)
        return worked

    def _take(self, items: list[Item]) -> None:
        for item in items:
            if isinstance(item, wire.Submit):
                self._admit(self._gate.enter(item))
            elif isinstance(item, Compiled):
                for verdict in self._gate.compiled(item.grammar, item.outcome):
                    self._admit(verdict)
            elif isinstance(item, wire.Abort):
                self._gate.abort(item.request_id, item.attempt)
                self._scheduler.abort(item.request_id, item.attempt)
            elif isinstance(item, Fetched):
                self._scheduler.fetched(item.ticket, item.payloads)
            elif isinstance(item, NewRouter):
                self._gate.clear()
                self._refused.clear()
                self._scheduler.drop_all()
                self._tell_all_hashes()
            elif isinstance(item, wire.Drain):
                self._draining = True
                self._status.enter("draining")
                self._refused += self._gate.drain()
                self._scheduler.drain()
        if items:  # not only after a step: the router misses what no beat mentions for long
            self._tell_live()

    def _tell_live(self) -> None:
        self._status.live = [*self._scheduler.live(), *self._gate.live()]

    def _admit(self, verdict: Verdict | None) -> None:
        if isinstance(verdict, Passed):
            self._scheduler.submit(verdict.request, verdict.grammar)
        elif verdict is not None:
            self._refused.append(verdict)

    def _step(self) -> bool:
        """Runs what is to be done now; False when there was nothing."""
        started = time.perf_counter()
        plan = self._scheduler.schedule()
        self._schedule_s += time.perf_counter() - started
        failure: _Failure | None = None
        try:
            result = self._run(plan)
        except Exception as error:  # MLX's own: no memory, most of all
            logger.exception("a step failed: what was running begins again")
            failure = _Failure(f"{type(error).__name__}: {error}", is_allocation_failure(error))
        if failure is not None:  # only now: a traceback keeps arrays alive
            self._start_over(failure)
            return True
        if result is not None:
            self._apply(result)
        return plan is not None or result is not None

    def _run(self, plan: Plan | None) -> StepResult | None:
        step = None if plan is None else self._executor.dispatch(plan)
        if self._executor.look_ahead:
            step, self._pending = self._pending, step
        return None if step is None else step.read()

    def _start_over(self, failure: _Failure) -> None:
        self._pending = None
        self._executor.reset()
        if not self._scheduler.start_over(failure.reason, less_memory=failure.no_memory):
            raise RuntimeError(f"a step failed that had no sequence in it: {failure.reason}")

    def _apply(self, result: StepResult) -> None:
        started = time.perf_counter()
        self._scheduler.apply(result)
        self._schedule_s += time.perf_counter() - started
        self._step_s += result.elapsed_s
        self._build_s += result.build_s
        self._sample_s += result.sample_s
        if self._check:
            self._scheduler.check_integrity()

    def _give(self) -> None:
        started = time.perf_counter()
        self._emit()
        self._emit_s += time.perf_counter() - started

    def _emit(self) -> None:
        outputs = self._scheduler.take_outputs()
        messages: list[wire.Message] = [*outputs.messages, *self._refused]
        self._refused.clear()
        if outputs.deltas:
            messages.append(wire.Tokens(deltas=outputs.deltas))
        if outputs.cached or outputs.uncached:
            messages.append(self._event(outputs.cached, outputs.uncached))
        if messages:
            self._link.send(messages)
        for ticket, hashes in outputs.fetches:
            self._link.fetch(ticket, hashes)
        if self._store is not None:
            for block_hash, payload in outputs.stores:
                self._store.store(block_hash, payload)
            if outputs.touches:
                self._link.touch(outputs.touches)

    def _event(
        self, added: list[bytes], removed: list[bytes], snapshot: bool = False
    ) -> wire.CacheEvents:
        self._event_number += 1
        return wire.CacheEvents(
            number=self._event_number, added=added, removed=removed, snapshot=snapshot
        )

    def _tell_all_hashes(self) -> None:
        self._link.send([self._event(self._scheduler.cached_hashes(), [], snapshot=True)])

    def _report(self, busy: bool) -> None:
        """Leaves the figures for the next beat; live requests at once, as they matter."""
        self._tell_live()
        self._status.progress = self._scheduler.progress
        now = time.monotonic()
        if busy and now - self._reported_at < REPORT_S:
            return
        self._reported_at = now
        self._status.stats = msgspec.structs.replace(
            self._scheduler.stats(),
            active_memory_bytes=mx.get_active_memory(),
            step_seconds_total=self._step_s,
            schedule_seconds_total=self._schedule_s,
            build_seconds_total=self._build_s,
            sample_seconds_total=self._sample_s,
            emit_seconds_total=self._emit_s,
        )
