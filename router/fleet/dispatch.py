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
from router.fleet.admission import DrainRate
from router.fleet.engines import Engine, Model
from router.fleet.flight import BrokenFlight, Flight, FlightState
from router.fleet.metrics import Metrics
from router.fleet.placement import choose
from router.fleet.queue import FairQueue
from shared.settings import Settings
from shared.wire import Abort, Accepted, Delta, LiveRequest, Message, Refused, Usage

logger = logging.getLogger(__name__)

MAX_LOSSES = 2
"""Engines that may be lost with one request: what killed two is not given to a third."""

_MISSED_BEATS = 2
_SETTLE_S = 2.0
_BUSY_S = 1.0
_STOP_WAIT_S = 1.0
_HOLD_S = 0.25


class Dispatcher:
    """Owns every flight from its admission to its end. All on the event loop."""

    def __init__(
        self,
        settings: Settings,
        send: Callable[[Engine, Message], bool],
        metrics: Metrics,
    ) -> None:
        self._settings = settings
        self._send = send
        self._metrics = metrics
        self._flights: dict[str, Flight] = {}
        self._queues: dict[str, FairQueue] = {}
        self._running: Counter[str] = Counter()
        self.drain_rate = DrainRate()

    @property
    def active(self) -> int:
        return len(self._flights)

    def waiting(self, model_id: str) -> int:
        queue = self._queues.get(model_id)
        return len(queue) if queue is not None else 0

    # -- from the HTTP side ----------------------------------------------------

    def admit(self, model: Model, flights: list[Flight]) -> None:
        queue = self._queues.setdefault(model.id, FairQueue())
        for flight in flights:
            self._flights[flight.order.request_id] = flight
            queue.push(flight)
        self.place(model)

    def cut(self, flight: Flight) -> None:
        """A stop string has ended its text. The engine frees it at once; the flight is done
        when the engine's figures are there, or are late."""
        if flight.done or flight.engine is None:
            self.release(flight)
            return
        flight.stop()
        self._send(flight.engine, _abort_of(flight))
        if flight.usage is not None:
            self._end(flight, flight.end)

    def release(self, flight: Flight) -> None:
        """Nobody waits for it any more: its place in queue and engine is freed."""
        if flight.done:
            return
        if flight.engine is not None:
            self._send(flight.engine, _abort_of(flight))
            self._metrics.aborts.inc()
        self._end(flight, flight.end)

    def fail_all(self, error: Callable[[], Unavailable]) -> int:
        """Ends everything in flight; returns how many that were."""
        flights = list(self._flights.values())
        for flight in flights:
            self._fail(flight, error())
        return len(flights)

    # -- from engines ----------------------------------------------------------

    def accepted(self, engine: Engine, message: Accepted) -> None:
        flight = self._of(engine, message.request_id, message.attempt)
        if flight is not None:
            flight.accept()

    def refused(self, engine: Engine, message: Refused) -> None:
        flight = self._of(engine, message.request_id, message.attempt)
        if flight is None:
            return
        if message.reason in ("full", "draining"):
            engine.held_until = time.monotonic() + _HOLD_S
            self._requeue(flight)
            return
        kind = NotSupported if message.reason == "unsupported" else InvalidRequest
        code = "request_too_large" if message.reason == "too_large" else None
        self._end(
            flight,
            lambda: flight.fail(kind(message.message, param=message.param, code=code)),
        )

    def moved(self, engine: Engine, delta: Delta) -> None:
        """A delta of a step. Whatever belongs to an older attempt is dropped."""
        flight = self._of(engine, delta.request_id, delta.attempt)
        if flight is None:
            return
        if flight.state is FlightState.STOPPING:
            if delta.finish is not None or delta.usage is not None:
                self._end(flight, lambda: flight.end(delta.usage))
            return
        if delta.finish == "error":
            logger.error("engine %s failed %s: %s", engine.name, delta.request_id, delta.error)
            self._end(flight, lambda: flight.fail(InternalError()))
        elif delta.finish == "abort":
            self._lost(flight, f"engine {engine.name} gave it up")
        else:
            self._advance(engine, flight, delta)

    def live(self, engine: Engine, live: list[LiveRequest]) -> None:
        """Compares what the engine says it has with what it was given."""
        mentioned = {(each.request_id, each.attempt): each.accepted for each in live}
        settled = time.monotonic() - _SETTLE_S
        for flight in list(engine.flights.values()):
            accepted = mentioned.get((flight.order.request_id, flight.attempt))
            if accepted is not None:
                flight.missed_beats = 0
                if accepted:
                    flight.accept()
            # While the engine's main thread computes, it has not seen what has just come.
            elif flight.placed_at < settled and engine.stalled_s < _BUSY_S:
                flight.missed_beats += 1
                if flight.missed_beats >= _MISSED_BEATS:
                    self._lost(flight, f"engine {engine.name} does not know it")
        for request_id, attempt in mentioned:
            if self._of(engine, request_id, attempt) is None:
                self._send(engine, Abort(request_id=request_id, attempt=attempt))

    def engine_lost(self, engine: Engine, reason: str) -> None:
        for flight in list(engine.flights.values()):
            self._lost(flight, f"engine {engine.name} {reason}")

    # -- time ------------------------------------------------------------------

    def tick(self) -> None:
        now = time.monotonic()
        for flight in list(self._flights.values()):
            self._check_time(flight, now)

    def place(self, model: Model) -> None:
        """Gives as many waiting flights to engines as these take now."""
        queue = self._queues.get(model.id)
        while queue:
            open_engines = [engine for engine in model.ready_engines if engine.places]
            flight = queue.pop(self._running) if open_engines else None
            if flight is None:
                return
            if flight.model is not model:  # its tokens are of a version that is gone
                self._fail(flight, _no_engine(self._settings.restart_wait_s))
                continue
            engine = choose(open_engines, flight)
            flight.place(engine)
            if not self._send(engine, flight.submission()):
                engine.held_until = time.monotonic() + _HOLD_S
                flight.wait_again()
                queue.push(flight)
                continue
            engine.flights[flight.order.request_id] = flight
            self._running[flight.key] += 1
            self._metrics.queue_time.observe(flight.placed_at - flight.waiting_since)

    # -- inside ----------------------------------------------------------------

    def _of(self, engine: Engine, request_id: str, attempt: int) -> Flight | None:
        flight = engine.flights.get(request_id)
        return flight if flight is not None and flight.attempt == attempt else None

    def _advance(self, engine: Engine, flight: Flight, delta: Delta) -> None:
        previous = flight.last_token_at
        try:
            flight.add(delta)
        except BrokenFlight as error:
            logger.warning("%s on engine %s: %s", delta.request_id, engine.name, error)
            self._send(engine, Abort(request_id=delta.request_id, attempt=delta.attempt))
            self._lost(flight, f"engine {engine.name} lost some of its tokens")
            return
        if delta.token_ids:
            if previous:
                self._metrics.inter_token.observe(flight.last_token_at - previous)
            else:
                self._metrics.first_token.observe(flight.last_token_at - flight.arrived)
        if flight.done:
            self._count(flight.usage)
            self._end(flight, lambda: None)

    def _count(self, usage: Usage | None) -> None:
        if usage is not None:
            self._metrics.prefill_time.observe(usage.prefill_s)
            self._metrics.decode_time.observe(usage.decode_s)

    def _check_time(self, flight: Flight, now: float) -> None:
        settings = self._settings
        if flight.state is FlightState.STOPPING:
            if now - flight.stopping_since > _STOP_WAIT_S:
                self._end(flight, flight.end)
            return
        if flight.first_token_at is None:
            limit_s = settings.first_token_timeout_s
            if now - flight.arrived > limit_s:
                self._time_out(flight, f"No token came within {limit_s:g} s.")
                return
        elif flight.state is not FlightState.WAITING or flight.model.ready_engines:
            limit_s = settings.request_timeout_s
            if now - max(flight.last_token_at, flight.placed_at, flight.waiting_since) > limit_s:
                self._time_out(flight, f"The generation was silent for {limit_s:g} s.")
                return
        if flight.state is FlightState.WAITING:
            waited_s = min(now - flight.waiting_since, flight.model.unready_for_s(now))
            if waited_s > settings.restart_wait_s:
                waited = _engine_lost if flight.losses else _no_engine
                self._fail(flight, waited(settings.restart_wait_s))

    def _time_out(self, flight: Flight, message: str) -> None:
        self._metrics.timeouts.inc()
        self._fail(flight, GenerationTimeout(message))

    def _lost(self, flight: Flight, why: str) -> None:
        """The attempt is over without its doing: another one, or a clean error."""
        if flight.state is FlightState.STOPPING:
            self._end(flight, flight.end)
            return
        flight.losses += 1
        if flight.losses >= MAX_LOSSES:
            logger.warning("%s ended with an error: %s", flight.order.request_id, why)
            wait_s = self._settings.restart_wait_s
            self._end(flight, lambda: flight.fail(_engine_lost(wait_s)))
            return
        logger.info(
            "%s is submitted once more, after %d tokens: %s",
            flight.order.request_id,
            len(flight.tokens),
            why,
        )
        self._metrics.resumed.inc()
        self._requeue(flight)

    def _requeue(self, flight: Flight) -> None:
        self._leave_engine(flight)
        flight.wait_again()
        self._queues[flight.model.id].push(flight)
        self.place(flight.model)

    def _fail(self, flight: Flight, error: ApiError) -> None:
        if flight.engine is not None:
            self._send(flight.engine, _abort_of(flight))
        self._end(flight, lambda: flight.fail(error))

    def _end(self, flight: Flight, mark: Callable[[], None]) -> None:
        self._flights.pop(flight.order.request_id, None)
        self._queues[flight.model.id].discard(flight)
        placed = flight.engine is not None
        self._leave_engine(flight)
        mark()
        if placed:
            self.drain_rate.note()
            self.place(flight.model)

    def _leave_engine(self, flight: Flight) -> None:
        if flight.engine is not None:
            flight.engine.flights.pop(flight.order.request_id, None)
            flight.engine = None
            self._running[flight.key] -= 1
            if self._running[flight.key] <= 0:
                del self._running[flight.key]


def _abort_of(flight: Flight) -> Abort:
    return Abort(request_id=flight.order.request_id, attempt=flight.attempt)


def _engine_lost(wait_s: float) -> EngineLost:
    return EngineLost("The engine that served this request was lost.", retry_after_s=wait_s)


def _no_engine(waited_s: float) -> Unavailable:
    return Unavailable(
        f"No engine of this model became ready within {waited_s:g} s.",
        code="no_engine_ready",
        retry_after_s=waited_s,
    )
