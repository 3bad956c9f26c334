"""The main loop: receives messages, makes plans, runs steps and sends tokens."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Generator
from typing import NamedTuple

import mlx.core as mx
import msgspec

from engine.adapters.queue import AdapterRead
from engine.backend.device_errors import is_lost_device, takes_too_long
from engine.executor.base import Executor, is_allocation_failure
from engine.executor.runner import StepRunner
from engine.intake import Intake
from engine.io.inbox import (
    BlocksFetched,
    GrammarCompiled,
    Inbox,
    InboxMessage,
    NewRouter,
    PicturedSubmit,
    StoresAnswered,
)
from engine.io.status import EngineStatus
from engine.io.store.group_store import EngineStore
from engine.io.thread import IOThread
from engine.model.errors import FilesChanged
from engine.plan import StepResult
from engine.scheduler import Scheduler
from engine.vision.pixels import PixelStore, take_pictures
from shared import wire

logger = logging.getLogger(__name__)

REPORT_INTERVAL_S = 0.2
WAIT_S, IDLE_WAIT_S = 1.0, 5.0
"""Max sleep if nothing can run: with sequences, and without. An arriving message ends it."""
FLUSH_S = 5.0
"""Max time that a shutdown waits for blocks on their way to the kvstore."""
FLUSH_WAIT_S = 0.05


MAX_FAILURES = 16
"""Max steps that may fail one after the other: a request that never fits takes fewer."""


class _Failure(NamedTuple):
    reason: str
    out_of_memory: bool
    took_too_long: bool
    lost_device: bool

    @classmethod
    def of(cls, error: Exception) -> _Failure:
        return cls(
            f"{type(error).__name__}: {error}",
            is_allocation_failure(error),
            takes_too_long(error),
            is_lost_device(error),
        )


class EngineCore:
    """Runs one replica until it is drained. All methods are called on the main thread."""

    def __init__(
        self,
        *,
        scheduler: Scheduler,
        executor: Executor,
        inbox: Inbox,
        io_thread: IOThread,
        status: EngineStatus,
        store: EngineStore | None,
        intake: Intake,
        pixels: PixelStore | None = None,
        check_integrity: bool = False,
        on_idle: Callable[[], None] = lambda: None,
    ) -> None:
        """``pixels`` holds the results of picture requests for the executor; None if it accepts
        none. ``on_idle`` is called whenever there is nothing to run."""
        self._scheduler, self._steps = scheduler, StepRunner(executor)
        self._inbox, self._io_thread, self._status = inbox, io_thread, status
        self._store = store
        self._intake = intake
        self._pixels = pixels
        self._answers: list[wire.Refused | wire.AdapterChecked] = []
        self._check_integrity = check_integrity
        self._on_idle = on_idle
        self._draining = False
        self._reported_at = 0.0
        self._failures = 0  # steps in a row
        self._event_number = 0
        self._schedule_s = self._build_s = self._sample_s = self._emit_s = 0.0
        self._step_s = 0.0

    def run(self) -> None:
        """Serve until the engine is asked to drain and has finished its requests."""
        worked = True
        while not (self._draining and self._scheduler.idle and self._steps.pending is None):
            wait_s = IDLE_WAIT_S if self._scheduler.idle else WAIT_S
            worked = self.run_once(0 if worked else wait_s)
        until = time.monotonic() + FLUSH_S
        while self._is_storing() and time.monotonic() < until:
            self.run_once(FLUSH_WAIT_S)

    def _is_storing(self) -> bool:
        """Whether blocks are on their way to a kvstore that accepts them, or wait for room."""
        if self._store is None or not self._store.is_ready:
            return False
        return bool(self._scheduler.num_unstored or self._store.num_stores_under_way)

    def run_once(self, wait_s: float = 0) -> bool:
        """Receive messages (waiting up to ``wait_s`` for the first), run a step and send its
        outputs.

        Return False if there was nothing to run.
        """
        items = self._inbox.take(wait_s)
        self._handle_messages(items)
        if items:  # the router takes a request that heartbeats do not name for lost
            self._send_outputs()
        worked = self._step()
        self._send_outputs()
        self._report_stats(worked)
        if not worked:
            self._on_idle()
        return worked

    def _handle_messages(self, items: list[InboxMessage]) -> None:
        for item in items:
            if isinstance(item, wire.Submit):
                self._intake.submit(item)
            elif isinstance(item, PicturedSubmit):
                taken = take_pictures(item.request, item.frames, self._pixels)
                if isinstance(taken, wire.Submit):
                    self._intake.submit(taken)
                else:
                    self._answers.append(taken)
            elif isinstance(item, wire.Encode):
                why = "this model generates text; it does not embed or rank"
                self._answers.append(wire.Refused.of(item, "unsupported", why))
            elif isinstance(item, GrammarCompiled):
                self._intake.on_compiled(item.grammar, item.outcome)
            elif isinstance(item, AdapterRead):
                if (checked := self._intake.on_read(item)) is not None:
                    self._answers.append(checked)
            elif isinstance(item, wire.CheckAdapter):
                if (checked := self._intake.adapters.check(item)) is not None:
                    self._answers.append(checked)
            elif isinstance(item, wire.Abort):
                self._scheduler.abort(item.request_id, item.attempt)
            elif isinstance(item, BlocksFetched):
                self._scheduler.on_fetched(item.ticket, item.payloads, item.end)
            elif isinstance(item, StoresAnswered):
                for block_hash, is_state in item.not_stored:
                    self._scheduler.on_not_stored(block_hash, is_snapshot=is_state)
            elif isinstance(item, NewRouter):
                self._scheduler.drop(item.requests)
                hashes = self._scheduler.cached_hashes()
                self._io_thread.send([self._cache_event(hashes, [], snapshot=True)])
            elif isinstance(item, wire.ClearCache):
                self._scheduler.clear_cache()
                if item.ssd and self._store is not None:
                    self._store.clear()
            elif isinstance(item, wire.Drain):
                self._draining = True
                self._status.enter_phase("draining")
                self._scheduler.drain()
        # Not only after a step: the router gives up on a request that heartbeats omit for long.
        if items:
            self._intake.grammars.cancel_abandoned()
            self._report_live()

    def _report_live(self) -> None:
        live = self._status.live = self._scheduler.live()
        if self._pixels is not None and not self._pixels.is_empty:
            self._pixels.keep_only({(one.request_id, one.attempt) for one in live})

    def _step(self) -> bool:
        """Place adapters and run the next plan. Return False if there was nothing to run."""
        work, worked = self._work(), False
        while True:
            failure: _Failure | None = None
            try:
                result = next(work)
            except StopIteration as done:
                return worked or bool(done.value)
            except FilesChanged:
                raise  # the next engine loads the current files
            except Exception as error:  # raised by MLX, most likely because it is out of memory
                logger.exception("a step failed; its sequences start again")
                failure = _Failure.of(error)
            if failure is not None:  # outside the handler, because a traceback keeps arrays alive
                self._recover(failure)
                return True
            self._apply(result)
            self._send_outputs()
            worked = True

    def _work(self) -> Generator[StepResult, None, bool]:
        """Yield the results known after the next plan is dispatched. Return False if there was
        nothing to run.

        Whatever uses the device may raise the error of the step in flight."""
        used = self._intake.place_adapters() if self._intake.adapters.is_waiting else None
        started = time.perf_counter()
        plan = self._scheduler.schedule(self._store.room() if self._store is not None else None)
        self._schedule_s += time.perf_counter() - started
        yield from self._steps.results(plan)
        # A step without a plan may have freed a place for which a request waits.
        return plan is not None or used not in (None, self._scheduler.sequences.adapters[0])

    def _recover(self, failure: _Failure) -> None:
        """Let everything start again. Raises: RuntimeError if that is of no use in this process."""
        self._failures += 1
        if failure.lost_device and self._failures > 1:
            raise RuntimeError(f"the device accepts no more work: {failure.reason}")
        if self._failures > MAX_FAILURES:
            raise RuntimeError(f"{MAX_FAILURES} steps failed in a row: {failure.reason}")
        self._steps.reset()
        if not self._scheduler.recover(
            failure.reason, out_of_memory=failure.out_of_memory, too_long=failure.took_too_long
        ):
            raise RuntimeError(f"a step without any sequence failed: {failure.reason}")

    def _apply(self, result: StepResult) -> None:
        started = time.perf_counter()
        if result.tokens or result.chunk_times:  # otherwise nothing of it may be computed yet
            self._failures = 0
        self._scheduler.apply(result)
        self._schedule_s += time.perf_counter() - started
        self._step_s += result.elapsed_s + sum(seconds for _, seconds in result.chunk_times)
        self._build_s += result.build_s
        self._sample_s += result.sample_s
        if self._check_integrity:
            self._scheduler.check_integrity()

    def _send_outputs(self) -> None:
        started = time.perf_counter()
        outputs = self._scheduler.take_outputs()
        messages: list[wire.Message] = [*outputs.messages, *self._answers]
        self._answers.clear()
        if outputs.deltas:
            has_ended = any(delta.finish for delta in outputs.deltas)
            used_bytes = self._scheduler.memory.used_bytes
            held = used_bytes(of_background=False) if has_ended else None
            messages.append(wire.Tokens(deltas=outputs.deltas, unevictable_bytes=held))
        if outputs.cache_added or outputs.cache_removed:
            messages.append(self._cache_event(outputs.cache_added, outputs.cache_removed))
        if messages:
            self._io_thread.send(messages)
        if self._store is not None:
            for fetch in outputs.fetches:
                self._store.fetch(*fetch)
            for store in outputs.stores:
                if not self._store.store(*store):
                    self._scheduler.on_not_stored(store.hash, is_snapshot=store.is_state)
            for chain in outputs.touches:
                self._store.touch(chain)
            for state in outputs.state_touches:
                self._store.touch([], [state])
        self._emit_s += time.perf_counter() - started

    def _cache_event(
        self, added: list[bytes], removed: list[bytes], snapshot: bool = False
    ) -> wire.CacheEvents:
        self._event_number += 1
        return wire.CacheEvents(
            number=self._event_number, added=added, removed=removed, snapshot=snapshot
        )

    def _report_stats(self, busy: bool) -> None:
        """Update the next heartbeat: live requests every time, statistics from time to time."""
        self._report_live()
        self._status.progress = self._scheduler.progress
        now = time.monotonic()
        if busy and now - self._reported_at < REPORT_INTERVAL_S:
            return
        self._reported_at = now
        self._status.stats = msgspec.structs.replace(
            self._scheduler.stats(),
            active_memory_bytes=mx.get_active_memory() + self._steps.executor.host_bytes,
            adapters_loaded=self._intake.adapters.num_loaded,
            adapter_swaps_total=self._intake.adapters.swaps,
            step_seconds_total=self._step_s,
            schedule_seconds_total=self._schedule_s,
            build_seconds_total=self._build_s,
            sample_seconds_total=self._sample_s,
            emit_seconds_total=self._emit_s,
        )
