"""Gives waiting sequences to engines, and follows them until they end."""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable

from router.errors import (
    ApiError,
    EngineLost,
    GenerationTimeout,
    InternalError,
    InvalidRequest,
    NotSupported,
    Unavailable,
)
from router.fleet.admission import DepartureRate
from router.fleet.engines import Engine, Model
from router.fleet.fair_queue import FairQueue
from router.fleet.metrics import Metrics
from router.fleet.placement import choose_engine
from router.fleet.remote_sequence import MissingTokensError, RemoteSequence, RemoteSequenceState
from shared.settings import Settings
from shared.wire import Abort, Accepted, Delta, LiveRequest, Message, Refused, Usage

logger = logging.getLogger(__name__)

MAX_LOSSES = 2
"""Engines that may be lost with one request: what killed two is not given to a third."""

_MISSED_BEATS = 2
_SETTLE_S = 2.0
_BUSY_S = 1.0
_STOP_WAIT_S = 1.0
_SEND_BACKOFF_S = 0.25


class Dispatcher:
    """Owns every sequence from its admission to its end. All on the event loop."""

    def __init__(
        self,
        settings: Settings,
        send: Callable[[Engine, Message], bool],
        metrics: Metrics,
    ) -> None:
        self._settings = settings
        self._send = send
        self._metrics = metrics
        self._sequences: dict[str, RemoteSequence] = {}
        self._queues: dict[str, FairQueue] = {}
        self._running_by_key: Counter[str] = Counter()
        self.departure_rate = DepartureRate()

    @property
    def num_active(self) -> int:
        return len(self._sequences)

    def num_waiting(self, model_id: str) -> int:
        queue = self._queues.get(model_id)
        return len(queue) if queue is not None else 0

    # -- from the HTTP side ----------------------------------------------------

    def admit(self, model: Model, sequences: list[RemoteSequence]) -> None:
        queue = self._queues.setdefault(model.id, FairQueue())
        for sequence in sequences:
            self._sequences[sequence.spec.request_id] = sequence
            queue.push(sequence)
        self.place(model)

    def stop(self, sequence: RemoteSequence) -> None:
        """A stop string has ended its text. The engine frees it at once; the sequence is done
        when the engine's figures are there, or are late."""
        if sequence.done or sequence.engine is None:
            self.release(sequence)
            return
        sequence.stop()
        self._send(sequence.engine, _abort_message(sequence))
        if sequence.usage is not None:
            self._end(sequence, sequence.end)

    def release(self, sequence: RemoteSequence) -> None:
        """Nobody waits for it any more: its place in queue and engine is freed."""
        if sequence.done:
            return
        if sequence.engine is not None:
            self._send(sequence.engine, _abort_message(sequence))
            self._metrics.aborts.inc()
        self._end(sequence, sequence.end)

    def fail_all(self, error: Callable[[], Unavailable]) -> int:
        """Ends everything in flight; returns how many that were."""
        sequences = list(self._sequences.values())
        for sequence in sequences:
            self._fail(sequence, error())
        return len(sequences)

    # -- from engines ----------------------------------------------------------

    def on_accepted(self, engine: Engine, message: Accepted) -> None:
        sequence = self._find(engine, message.request_id, message.attempt)
        if sequence is not None:
            sequence.accept()

    def on_refused(self, engine: Engine, message: Refused) -> None:
        sequence = self._find(engine, message.request_id, message.attempt)
        if sequence is None:
            return
        if message.reason in ("full", "draining"):
            engine.backoff_until = time.monotonic() + _SEND_BACKOFF_S
            self._requeue(sequence)
            return
        kind = NotSupported if message.reason == "unsupported" else InvalidRequest
        code = "request_too_large" if message.reason == "too_large" else None
        self._end(
            sequence,
            lambda: sequence.fail(kind(message.message, param=message.param, code=code)),
        )

    def on_delta(self, engine: Engine, delta: Delta) -> None:
        """A delta of a step. Whatever belongs to an older attempt is dropped."""
        sequence = self._find(engine, delta.request_id, delta.attempt)
        if sequence is None:
            return
        if sequence.state is RemoteSequenceState.STOPPING:
            if delta.finish is not None or delta.usage is not None:
                self._end(sequence, lambda: sequence.end(delta.usage))
            return
        if delta.finish == "error":
            logger.error("engine %s failed %s: %s", engine.name, delta.request_id, delta.error)
            self._end(sequence, lambda: sequence.fail(InternalError()))
        elif delta.finish == "abort":
            self._retry_or_fail(sequence, f"engine {engine.name} gave it up")
        else:
            self._apply(engine, sequence, delta)

    def reconcile(self, engine: Engine, live: list[LiveRequest]) -> None:
        """Compares what the engine says it has with what it was given."""
        mentioned = {(each.request_id, each.attempt): each.accepted for each in live}
        settled = time.monotonic() - _SETTLE_S
        for sequence in list(engine.sequences.values()):
            accepted = mentioned.get((sequence.spec.request_id, sequence.attempt))
            if accepted is not None:
                sequence.missed_beats = 0
                if accepted:
                    sequence.accept()
            # While the engine's main thread computes, it has not seen what has just come.
            elif sequence.placed_at < settled and engine.stalled_s < _BUSY_S:
                sequence.missed_beats += 1
                if sequence.missed_beats >= _MISSED_BEATS:
                    self._retry_or_fail(sequence, f"engine {engine.name} does not know it")
        for request_id, attempt in mentioned:
            if self._find(engine, request_id, attempt) is None:
                self._send(engine, Abort(request_id=request_id, attempt=attempt))

    def on_engine_lost(self, engine: Engine, reason: str) -> None:
        for sequence in list(engine.sequences.values()):
            self._retry_or_fail(sequence, f"engine {engine.name} {reason}")

    # -- time ------------------------------------------------------------------

    def tick(self) -> None:
        now = time.monotonic()
        for sequence in list(self._sequences.values()):
            self._check_timeouts(sequence, now)

    def place(self, model: Model) -> None:
        """Gives as many waiting sequences to engines as these take now."""
        queue = self._queues.get(model.id)
        while queue:
            open_engines = [engine for engine in model.ready_engines if engine.free_capacity]
            sequence = queue.pop(self._running_by_key) if open_engines else None
            if sequence is None:
                return
            if sequence.model is not model:  # its tokens are of a version that is gone
                self._fail(sequence, _no_engine(self._settings.restart_wait_s))
                continue
            engine = choose_engine(open_engines, sequence)
            sequence.place(engine)
            if not self._send(engine, sequence.submit_message()):
                engine.backoff_until = time.monotonic() + _SEND_BACKOFF_S
                sequence.requeue()
                queue.push(sequence)
                continue
            engine.sequences[sequence.spec.request_id] = sequence
            self._running_by_key[sequence.key] += 1
            self._metrics.queue_time.observe(sequence.placed_at - sequence.queued_at)

    # -- inside ----------------------------------------------------------------

    def _find(self, engine: Engine, request_id: str, attempt: int) -> RemoteSequence | None:
        sequence = engine.sequences.get(request_id)
        return sequence if sequence is not None and sequence.attempt == attempt else None

    def _apply(self, engine: Engine, sequence: RemoteSequence, delta: Delta) -> None:
        previous = sequence.last_token_at
        try:
            sequence.apply(delta)
        except MissingTokensError as error:
            logger.warning("%s on engine %s: %s", delta.request_id, engine.name, error)
            self._send(engine, Abort(request_id=delta.request_id, attempt=delta.attempt))
            self._retry_or_fail(sequence, f"engine {engine.name} lost some of its tokens")
            return
        if delta.token_ids:
            if previous:
                self._metrics.inter_token.observe(sequence.last_token_at - previous)
            else:
                self._metrics.first_token.observe(sequence.last_token_at - sequence.arrived_at)
        if sequence.done:
            self._observe_usage(sequence.usage)
            self._end(sequence, lambda: None)

    def _observe_usage(self, usage: Usage | None) -> None:
        if usage is not None:
            self._metrics.prefill_time.observe(usage.prefill_s)
            self._metrics.decode_time.observe(usage.decode_s)

    def _check_timeouts(self, sequence: RemoteSequence, now: float) -> None:
        settings = self._settings
        if sequence.state is RemoteSequenceState.STOPPING:
            if now - sequence.stopping_at > _STOP_WAIT_S:
                self._end(sequence, sequence.end)
            return
        if sequence.first_token_at is None:
            limit_s = settings.first_token_timeout_s
            if now - sequence.arrived_at > limit_s:
                self._time_out(sequence, f"No token came within {limit_s:g} s.")
                return
        elif sequence.state is not RemoteSequenceState.WAITING or sequence.model.ready_engines:
            limit_s = settings.request_timeout_s
            if now - max(sequence.last_token_at, sequence.placed_at, sequence.queued_at) > limit_s:
                self._time_out(sequence, f"The generation was silent for {limit_s:g} s.")
                return
        if sequence.state is RemoteSequenceState.WAITING:
            waited_s = min(now - sequence.queued_at, sequence.model.unready_for_s(now))
            if waited_s > settings.restart_wait_s:
                waited = _engine_lost if sequence.losses else _no_engine
                self._fail(sequence, waited(settings.restart_wait_s))

    def _time_out(self, sequence: RemoteSequence, message: str) -> None:
        self._metrics.timeouts.inc()
        self._fail(sequence, GenerationTimeout(message))

    def _retry_or_fail(self, sequence: RemoteSequence, reason: str) -> None:
        """The attempt is over without its doing: another one, or a clean error."""
        if sequence.state is RemoteSequenceState.STOPPING:
            self._end(sequence, sequence.end)
            return
        sequence.losses += 1
        if sequence.losses >= MAX_LOSSES:
            logger.warning("%s ended with an error: %s", sequence.spec.request_id, reason)
            wait_s = self._settings.restart_wait_s
            self._end(sequence, lambda: sequence.fail(_engine_lost(wait_s)))
            return
        logger.info(
            "%s is submitted once more, after %d tokens: %s",
            sequence.spec.request_id,
            len(sequence.output_token_ids),
            reason,
        )
        self._metrics.resumed.inc()
        self._requeue(sequence)

    def _requeue(self, sequence: RemoteSequence) -> None:
        self._detach(sequence)
        sequence.requeue()
        self._queues[sequence.model.id].push(sequence)
        self.place(sequence.model)

    def _fail(self, sequence: RemoteSequence, error: ApiError) -> None:
        if sequence.engine is not None:
            self._send(sequence.engine, _abort_message(sequence))
        self._end(sequence, lambda: sequence.fail(error))

    def _end(self, sequence: RemoteSequence, mark: Callable[[], None]) -> None:
        self._sequences.pop(sequence.spec.request_id, None)
        self._queues[sequence.model.id].discard(sequence)
        placed = sequence.engine is not None
        self._detach(sequence)
        mark()
        if placed:
            self.departure_rate.record()
            self.place(sequence.model)

    def _detach(self, sequence: RemoteSequence) -> None:
        if sequence.engine is not None:
            sequence.engine.sequences.pop(sequence.spec.request_id, None)
            sequence.engine = None
            self._running_by_key[sequence.key] -= 1
            if self._running_by_key[sequence.key] <= 0:
                del self._running_by_key[sequence.key]


def _abort_message(sequence: RemoteSequence) -> Abort:
    return Abort(request_id=sequence.spec.request_id, attempt=sequence.attempt)


def _engine_lost(wait_s: float) -> EngineLost:
    return EngineLost("The engine that served this request was lost.", retry_after_s=wait_s)


def _no_engine(waited_s: float) -> Unavailable:
    return Unavailable(
        f"No engine of this model became ready within {waited_s:g} s.",
        code="no_engine_ready",
        retry_after_s=waited_s,
    )
