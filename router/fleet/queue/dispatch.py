"""Places queued sequences on engines, and tracks them until they end."""

from __future__ import annotations

import logging
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence

from router.errors import (
    ApiError,
    GenerationTimeout,
    InternalError,
    InvalidRequest,
    NotSupported,
    Unavailable,
)
from router.fleet.engines.engine import Engine, ModelReplicas
from router.fleet.metrics.prometheus import Metrics
from router.fleet.queue.model_queue import DepartureRate, ModelQueue
from router.fleet.queue.placement import choose_engine
from router.fleet.sequences.remote_request import InFlight, RemoteRequest, RemoteRequestState
from router.fleet.sequences.remote_sequence import MissingTokensError, RemoteSequence, failure
from router.fleet.sequences.remote_texts import RemoteTexts
from router.fleet.sequences.timeouts import engine_lost, overdue
from router.fleet.tenants.tenant import Tenant
from shared.settings import Settings
from shared.wire import Abort, Accepted, Delta, Encoded, LiveRequest, Refused

logger = logging.getLogger(__name__)

_MISSED_HEARTBEATS = 2
_SETTLE_S, _BUSY_S = 2.0, 1.0
_STOP_WAIT_S = 1.0
_SEND_BACKOFF_S = 0.25


class Dispatcher:
    """The owner of every sequence from admission to its end. Runs on the event loop."""

    def __init__(
        self,
        settings: Settings,
        send: Callable[..., bool],
        metrics: Metrics,
        on_generated: Callable[[Tenant, int], None],
        is_loaded_on_demand: Callable[[ModelReplicas], bool] = lambda model: False,
    ) -> None:
        """``send`` takes an engine, a message and its raw frames. ``on_generated`` is called with
        new tokens. ``is_loaded_on_demand`` says whether a model without engines will get one."""
        self._settings = settings
        self._send = send
        self._metrics = metrics
        self._on_generated = on_generated
        self._is_loaded_on_demand = is_loaded_on_demand
        self._in_flight: dict[str, InFlight] = {}
        self._queues: defaultdict[ModelReplicas, ModelQueue] = defaultdict(ModelQueue)
        self.departure_rate = DepartureRate()

    def num_waiting(self, model_id: str) -> int:
        """Return the number of queued sequences, without those of batches."""
        return sum(q.num_waiting for model, q in self._queues.items() if model.id == model_id)

    def wants(self, model_id: str) -> int:
        """Return the number of queued sequences, including those of batches."""
        return sum(len(queue) for model, queue in self._queues.items() if model.id == model_id)

    @property
    def models_in_use(self) -> set[str]:
        """The ids of the models that have sequences."""
        return {entry.model.id for entry in self._in_flight.values()}

    @property
    def in_flight(self) -> Iterable[InFlight]:
        """All running and queued sequences, oldest first. Do not keep the result."""
        return self._in_flight.values()

    @property
    def num_in_flight(self) -> int:
        return len(self._in_flight)

    def queue_of(self, model: ModelReplicas) -> ModelQueue:
        return self._queues[model]

    # -- from the HTTP side ----------------------------------------------------

    def admit(self, model: ModelReplicas, sequences: Sequence[RemoteRequest]) -> None:
        queue = self._queues[model]
        for sequence in sequences:
            sequence.is_alone = len(sequences) == 1
            self._in_flight[sequence.request_id] = InFlight(sequence, model)
            queue.push(sequence)
        self.place(model)

    def stop(self, sequence: RemoteSequence) -> None:
        """End the text of a sequence at a stop string. The engine frees the sequence immediately.

        The sequence is done when the engine's usage has arrived or timed out.
        """
        entry = self._in_flight.get(sequence.request_id)
        if entry is None or entry.engine is None:
            self.release(sequence)
            return
        sequence.stop()
        self._send(entry.engine, sequence.abort_message())
        if sequence.usage is not None:
            self._end(entry, sequence.end)

    def release(self, sequence: RemoteRequest) -> None:
        """Remove a sequence from the queue or from its engine, because nothing waits for it."""
        entry = self._in_flight.get(sequence.request_id)
        if entry is None:
            return
        if entry.engine is not None:
            self._send(entry.engine, sequence.abort_message())
            self._metrics.aborts.inc()
        self._end(entry, sequence.end)

    def fail(self, entry: InFlight, error: ApiError) -> None:
        """End a sequence with ``error``."""
        if entry.engine is not None:
            self._send(entry.engine, entry.sequence.abort_message())
        self._end(entry, lambda: entry.sequence.fail(error))

    def fail_all(self, error: Callable[[], Unavailable]) -> int:
        """End everything in flight. Return the number of sequences."""
        in_flight = list(self._in_flight.values())
        for entry in in_flight:
            self.fail(entry, error())
        return len(in_flight)

    # -- from engines ----------------------------------------------------------

    def on_accepted(self, engine: Engine, message: Accepted) -> None:
        entry = self._find(engine, message.request_id, message.attempt)
        if entry is not None:
            entry.sequence.accept()

    def on_refused(self, engine: Engine, message: Refused) -> None:
        entry = self._find(engine, message.request_id, message.attempt)
        if entry is None:
            return
        if message.reason in ("full", "draining"):
            engine.backoff_until = time.monotonic() + _SEND_BACKOFF_S
            entry.sequence.refusal = message.message
            self._requeue(entry)
            return
        kind = NotSupported if message.reason == "unsupported" else InvalidRequest
        code = "request_too_large" if message.reason == "too_large" else None
        error = kind(message.message, param=message.param, code=code)
        self._end(entry, lambda: entry.sequence.fail(error))

    def on_tokens(self, engine: Engine, deltas: Sequence[Delta]) -> None:
        """Handle the deltas of a step. Those of older attempts are dropped."""
        now = time.monotonic()
        tenants: dict[str, Tenant] = {}
        generated: Counter[str] = Counter()
        for delta in deltas:
            entry = self._find(engine, delta.request_id, delta.attempt)
            if entry is not None and (count := self._on_delta(engine, entry, delta, now)):
                tenant = entry.sequence.tenant
                tenants[tenant.name] = tenant
                generated[tenant.name] += count
        for name, tenant in tenants.items():
            self._on_generated(tenant, generated[name])

    def _on_delta(self, engine: Engine, entry: InFlight, delta: Delta, now: float) -> int:
        """Return the number of new tokens of the sequence."""
        if entry.sequence.state is RemoteRequestState.STOPPING:
            if delta.finish is not None or delta.usage is not None:
                self._end(entry, lambda: entry.sequence.end(delta.usage))
        elif delta.finish == "error":
            logger.error("engine %s failed %s: %s", engine.name, delta.request_id, delta.error)
            self._end(entry, lambda: entry.sequence.fail(failure(delta)))
        elif delta.finish == "abort":
            planned = engine.phase == "draining"
            self._retry_or_fail(entry, f"engine {engine.name} aborted it", planned=planned)
        else:
            return self._apply(engine, entry, delta, now)
        return 0

    def on_encoded(self, engine: Engine, message: Encoded) -> None:
        entry = self._find(engine, message.request_id, message.attempt)
        if entry is None or not isinstance(texts := entry.sequence, RemoteTexts):
            return
        error = message.error
        if error is None and (rows := texts.rows_in(message)) is None:
            error = f"{len(message.rows)} bytes of rows, which is a wrong size"
        if error is not None:
            logger.error("engine %s failed %s: %s", engine.name, message.request_id, error)
            self._end(entry, lambda: texts.fail(InternalError()))
            return
        self._metrics.encode_time.labels(entry.model.id).observe(message.compute_s)
        self._end(entry, lambda: texts.finish(rows))

    def reconcile(self, engine: Engine, live: list[LiveRequest]) -> None:
        """Compare the sequences listed by the engine with those placed there."""
        mentioned = {(one.request_id, one.attempt): one for one in live}
        settled = time.monotonic() - _SETTLE_S
        for entry in self._placed_on(engine):
            sequence = entry.sequence
            found = mentioned.get((sequence.request_id, sequence.attempt))
            if found is not None:
                sequence.missed_heartbeats = 0
                sequence.take_progress(found)
                if found.accepted:
                    sequence.accept()
            # An engine's main thread does not see new messages while it computes.
            elif sequence.placed_at < settled and engine.stalled_s < _BUSY_S:
                sequence.missed_heartbeats += 1
                if sequence.missed_heartbeats >= _MISSED_HEARTBEATS:
                    self._retry_or_fail(entry, f"engine {engine.name} does not know it")
        for request_id, attempt in mentioned:
            if self._find(engine, request_id, attempt) is None:
                self._send(engine, Abort(request_id=request_id, attempt=attempt))

    def on_engine_lost(self, engine: Engine, reason: str, *, planned: bool) -> None:
        """Resubmit the sequences of ``engine``. A ``planned`` restart does not count
        against them."""
        for entry in self._placed_on(engine):
            gone = engine.hello.incarnation
            self._retry_or_fail(entry, f"engine {engine.name} {reason}", planned=planned, gone=gone)

    def on_engine_back(self, engine: Engine) -> None:
        """Forgive the loss of an engine that was only silent."""
        for entry in self._in_flight.values():
            entry.sequence.losses.on_return(engine.hello.incarnation)

    def on_model_replaced(self, model: ModelReplicas) -> None:
        """Move the queued sequences of ``model`` to its successor, if they can continue there."""
        for entry in list(self._in_flight.values()):
            if entry.model is model:
                self._change_version(entry, entry.next_version(prefer_successor=True))
        if model.successor is not None:
            self.place(model.successor)

    # -- time ------------------------------------------------------------------

    def forgive(self, asleep_s: float) -> None:
        for entry in self._in_flight.values():
            entry.sequence.forgive(asleep_s)

    def tick(self) -> None:
        now = time.monotonic()
        for model, queue in list(self._queues.items()):
            if not model.engines and not len(queue):
                del self._queues[model]  # it may be gone for good, with its tokenizer
        for entry in list(self._in_flight.values()):
            self._change_version(entry, entry.next_version())  # if its engines have left
            self._check_timeouts(entry, now)

    def place(self, model: ModelReplicas) -> None:
        """Send as many queued sequences to engines as these accept now."""
        queue = self._queues.get(model)
        while queue:
            open_engines = [engine for engine in model.ready_engines if engine.free_capacity]
            sequence = queue.pop(model, open_engines) if open_engines else None
            spare = [engine for engine in open_engines if engine.spare_rows]
            if sequence is None and spare:
                sequence, open_engines = queue.pop_background(spare), spare
            if sequence is None:
                if queue.runs_background:
                    self._take_back(queue, model)
                return
            entry = self._in_flight[sequence.request_id]
            engine = choose_engine(open_engines, sequence)
            sequence.place()
            message = sequence.message(queue.engine_priority(sequence))
            if not self._send(engine, message, *sequence.payload):
                engine.backoff_until = time.monotonic() + _SEND_BACKOFF_S
                sequence.requeue()
                queue.push(sequence)
                continue
            entry.engine = engine
            engine.request_ids[sequence.request_id] = None
            queue.on_placed(sequence)
            if not sequence.tenant.background:
                waited_s = sequence.placed_at - sequence.queued_at
                self._metrics.queue_time.labels(model.id).observe(waited_s)

    def _take_back(self, queue: ModelQueue, model: ModelReplicas) -> None:
        """Replace the newest line of a batch with a waiting sequence, if there is one for its
        engine. The line is queued again with its tokens; its prefix stays in the engine's cache."""
        full = [engine for engine in model.ready_engines if engine.is_full]
        full = [engine for engine in full if queue.has_next(model, [engine])]
        ids = [request_id for engine in full for request_id in engine.request_ids]
        entries = [self._in_flight[request_id] for request_id in ids]
        taken = [one for one in entries if one.sequence.tenant.background]
        if taken:
            entry = max(taken, key=lambda one: one.sequence.placed_at)
            assert entry.engine is not None
            self._send(entry.engine, entry.sequence.abort_message())
            self._metrics.batch_places_returned.inc()
            self._requeue(entry)

    # -- inside ----------------------------------------------------------------

    def _find(self, engine: Engine, request_id: str, attempt: int) -> InFlight | None:
        entry = self._in_flight.get(request_id)
        if entry is None or entry.engine is not engine or entry.sequence.attempt != attempt:
            return None
        return entry

    def _placed_on(self, engine: Engine) -> list[InFlight]:
        return [self._in_flight[request_id] for request_id in engine.request_ids]

    def _apply(self, engine: Engine, entry: InFlight, delta: Delta, now: float) -> int:
        sequence = entry.sequence
        if not isinstance(sequence, RemoteSequence):
            return 0
        previous, model_id = sequence.last_token_at, entry.model.id
        try:
            sequence.apply(delta, now)
        except MissingTokensError as error:
            logger.warning("%s on engine %s: %s", delta.request_id, engine.name, error)
            self._send(engine, Abort(request_id=delta.request_id, attempt=delta.attempt))
            self._retry_or_fail(entry, f"engine {engine.name} lost some of its tokens")
            return 0
        if delta.token_ids and not sequence.tenant.background:
            self._metrics.on_tokens(model_id, now, previous, sequence.arrived_at)
        if delta.finish is not None:
            if sequence.usage is not None and not sequence.tenant.background:
                self._metrics.prefill_time.labels(model_id).observe(sequence.usage.prefill_s)
                self._metrics.decode_time.labels(model_id).observe(sequence.usage.decode_s)
            self._end(entry, lambda: None)
        return len(delta.token_ids)

    def _check_timeouts(self, entry: InFlight, now: float) -> None:
        sequence = entry.sequence
        if sequence.state is RemoteRequestState.STOPPING:
            if now - sequence.stopping_at > _STOP_WAIT_S:
                self._end(entry, sequence.end)
            return
        error = overdue(entry, now, loaded_on_demand=self._is_loaded_on_demand(entry.model))
        if error is not None:
            self._metrics.timeouts.inc(isinstance(error, GenerationTimeout))
            self.fail(entry, error)

    def _retry_or_fail(
        self, entry: InFlight, reason: str, *, planned: bool = False, gone: str | None = None
    ) -> None:
        """Retry a sequence that the engine did not finish, or end it with an error. ``gone`` is
        the engine's incarnation if it has lost all its sequences."""
        sequence = entry.sequence
        if sequence.state is RemoteRequestState.STOPPING:
            self._requeue(entry)  # which ends it
            return
        sequence.losses.add(gone, sequence.num_output_tokens, planned=planned)
        if sequence.losses.are_too_many:
            logger.warning("%s failed: %s", sequence.request_id, reason)
            wait_s = self._settings.restart_wait_s
            self._end(entry, lambda: sequence.fail(engine_lost(wait_s)))
            return
        logger.info(
            "%s is resubmitted after %d tokens: %s",
            sequence.request_id,
            sequence.num_output_tokens,
            reason,
        )
        self._metrics.resumed.inc()
        self._requeue(entry)

    def _requeue(self, entry: InFlight) -> None:
        if entry.sequence.state is RemoteRequestState.STOPPING:  # nobody reads on
            self._end(entry, entry.sequence.end)
            return
        self._detach(entry)
        entry.sequence.requeue()
        entry.model = entry.next_version()
        self._queues[entry.model].push(entry.sequence)
        self.place(entry.model)

    def _change_version(self, entry: InFlight, version: ModelReplicas) -> None:
        """Move ``entry`` to the queue of ``version``, if it waits in that of another."""
        waits = entry.sequence.state is RemoteRequestState.WAITING
        if waits and entry.model is not version:
            self._queues[entry.model].discard(entry.sequence)
            entry.model = version
            self._queues[version].push(entry.sequence)

    def _end(self, entry: InFlight, mark: Callable[[], None]) -> None:
        self._in_flight.pop(entry.sequence.request_id, None)
        self._queues[entry.model].discard(entry.sequence)
        placed = entry.engine is not None
        self._detach(entry)
        mark()
        if placed:
            if not entry.sequence.tenant.background:
                self.departure_rate.record()
                self._queues[entry.model].on_departure()
            self.place(entry.model)
        if all(queue.is_idle for queue in self._queues.values()):
            self.departure_rate.clear()  # it would take the idle time for slowness

    def _detach(self, entry: InFlight) -> None:
        if entry.engine is not None:
            entry.engine.request_ids.pop(entry.sequence.request_id, None)
            entry.engine = None
            self._queues[entry.model].on_removed(entry.sequence)
