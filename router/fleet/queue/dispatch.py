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
from router.fleet.sequences.remote_request import RemoteRequest, RemoteRequestState
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
        self._in_flight: dict[str, RemoteRequest] = {}
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
        return {request.model.id for request in self._in_flight.values()}

    @property
    def in_flight(self) -> Iterable[RemoteRequest]:
        """All running and queued sequences, oldest first. Do not keep the result."""
        return self._in_flight.values()

    @property
    def num_in_flight(self) -> int:
        return len(self._in_flight)

    def queue_of(self, model: ModelReplicas) -> ModelQueue:
        return self._queues[model]

    # -- from the HTTP side ----------------------------------------------------

    def admit(self, model: ModelReplicas, requests: Sequence[RemoteRequest]) -> None:
        queue = self._queues[model]
        for request in requests:
            request.is_alone = len(requests) == 1
            request.model = model
            self._in_flight[request.request_id] = request
            queue.push(request)
        self.place(model)

    def stop(self, request: RemoteSequence) -> None:
        """End the text of a sequence at a stop string. The engine frees the sequence immediately.

        The sequence is done when the engine's usage has arrived or timed out.
        """
        if request.engine is None:
            self.release(request)
            return
        request.stop()
        self._send(request.engine, request.abort_message())
        if request.usage is not None:
            self._end(request, request.end)

    def release(self, request: RemoteRequest) -> None:
        """Remove a sequence from the queue or from its engine, because nothing waits for it."""
        if request.request_id not in self._in_flight:
            return
        if request.engine is not None:
            self._send(request.engine, request.abort_message())
            self._metrics.aborts.inc()
        self._end(request, request.end)

    def fail(self, request: RemoteRequest, error: ApiError) -> None:
        """End a sequence with ``error``."""
        if request.engine is not None:
            self._send(request.engine, request.abort_message())
        self._end(request, lambda: request.fail(error))

    def fail_all(self, error: Callable[[], Unavailable]) -> int:
        """End everything in flight. Return the number of sequences."""
        in_flight = list(self._in_flight.values())
        for request in in_flight:
            self.fail(request, error())
        return len(in_flight)

    # -- from engines ----------------------------------------------------------

    def on_accepted(self, engine: Engine, message: Accepted) -> None:
        request = self._find(engine, message.request_id, message.attempt)
        if request is not None:
            request.accept()

    def on_refused(self, engine: Engine, message: Refused) -> None:
        request = self._find(engine, message.request_id, message.attempt)
        if request is None:
            return
        if message.reason in ("full", "draining"):
            engine.backoff_until = time.monotonic() + _SEND_BACKOFF_S
            request.refusal = message.message
            self._requeue(request)
            return
        kind = NotSupported if message.reason == "unsupported" else InvalidRequest
        code = "request_too_large" if message.reason == "too_large" else None
        error = kind(message.message, param=message.param, code=code)
        self._end(request, lambda: request.fail(error))

    def on_tokens(self, engine: Engine, deltas: Sequence[Delta]) -> None:
        """Handle the deltas of a step. Those of older attempts are dropped."""
        now = time.monotonic()
        tenants: dict[str, Tenant] = {}
        generated: Counter[str] = Counter()
        for delta in deltas:
            request = self._find(engine, delta.request_id, delta.attempt)
            if request is not None and (count := self._on_delta(engine, request, delta, now)):
                tenant = request.tenant
                tenants[tenant.name] = tenant
                generated[tenant.name] += count
        for name, tenant in tenants.items():
            self._on_generated(tenant, generated[name])

    def _on_delta(self, engine: Engine, request: RemoteRequest, delta: Delta, now: float) -> int:
        """Return the number of new tokens of the sequence."""
        if request.state is RemoteRequestState.STOPPING:
            if delta.finish is not None or delta.usage is not None:
                self._end(request, lambda: request.end(delta.usage))
        elif delta.finish == "error":
            logger.error("engine %s failed %s: %s", engine.name, delta.request_id, delta.error)
            self._end(request, lambda: request.fail(failure(delta)))
        elif delta.finish == "abort":
            planned = engine.phase == "draining"
            self._retry_or_fail(request, f"engine {engine.name} aborted it", planned=planned)
        else:
            return self._apply(engine, request, delta, now)
        return 0

    def on_encoded(self, engine: Engine, message: Encoded) -> None:
        request = self._find(engine, message.request_id, message.attempt)
        if not isinstance(texts := request, RemoteTexts):
            return
        error = message.error
        if error is None and (rows := texts.rows_in(message)) is None:
            error = f"{len(message.rows)} bytes of rows, which is a wrong size"
        if error is not None:
            logger.error("engine %s failed %s: %s", engine.name, message.request_id, error)
            self._end(texts, lambda: texts.fail(InternalError()))
            return
        self._metrics.encode_time.labels(texts.model.id).observe(message.compute_s)
        self._end(texts, lambda: texts.finish(rows))

    def reconcile(self, engine: Engine, live: list[LiveRequest]) -> None:
        """Compare the sequences listed by the engine with those placed there."""
        mentioned = {(one.request_id, one.attempt): one for one in live}
        settled = time.monotonic() - _SETTLE_S
        for request in self._placed_on(engine):
            found = mentioned.get((request.request_id, request.attempt))
            if found is not None:
                request.missed_heartbeats = 0
                request.take_progress(found)
                if found.accepted:
                    request.accept()
            # An engine's main thread does not see new messages while it computes.
            elif request.placed_at < settled and engine.stalled_s < _BUSY_S:
                request.missed_heartbeats += 1
                if request.missed_heartbeats >= _MISSED_HEARTBEATS:
                    self._retry_or_fail(request, f"engine {engine.name} does not know it")
        for request_id, attempt in mentioned:
            if self._find(engine, request_id, attempt) is None:
                self._send(engine, Abort(request_id=request_id, attempt=attempt))

    def on_engine_lost(self, engine: Engine, reason: str, *, planned: bool) -> None:
        """Resubmit the sequences of ``engine``. A ``planned`` restart does not count
        against them."""
        for request in self._placed_on(engine):
            gone = engine.hello.incarnation
            self._retry_or_fail(
                request, f"engine {engine.name} {reason}", planned=planned, gone=gone
            )

    def on_engine_back(self, engine: Engine) -> None:
        """Forgive the loss of an engine that was only silent."""
        for request in self._in_flight.values():
            request.losses.on_return(engine.hello.incarnation)

    def on_model_replaced(self, model: ModelReplicas) -> None:
        """Move the queued sequences of ``model`` to its successor, if they can continue there."""
        for request in list(self._in_flight.values()):
            if request.model is model:
                self._change_version(request, request.next_version(prefer_successor=True))
        if model.successor is not None:
            self.place(model.successor)

    # -- time ------------------------------------------------------------------

    def exclude(self, suspended_s: float) -> None:
        for request in self._in_flight.values():
            request.exclude(suspended_s)

    def tick(self) -> None:
        now = time.monotonic()
        for model, queue in list(self._queues.items()):
            if not model.engines and not len(queue):
                del self._queues[model]  # it may be gone for good, with its tokenizer
        for request in list(self._in_flight.values()):
            self._change_version(request, request.next_version())  # if its engines have left
            self._check_timeouts(request, now)

    def place(self, model: ModelReplicas) -> None:
        """Send as many queued sequences to engines as these accept now."""
        queue = self._queues.get(model)
        while queue:
            open_engines = [engine for engine in model.ready_engines if engine.free_capacity]
            request = queue.pop(model, open_engines) if open_engines else None
            spare = [engine for engine in open_engines if engine.spare_rows]
            if request is None and spare:
                request, open_engines = queue.pop_background(spare), spare
            if request is None:
                if queue.runs_background:
                    self._take_back(queue, model)
                return
            engine = choose_engine(open_engines, request)
            request.place()
            message = request.message(queue.engine_priority(request))
            if not self._send(engine, message, *request.payload):
                engine.backoff_until = time.monotonic() + _SEND_BACKOFF_S
                request.requeue()
                queue.push(request)
                continue
            request.engine = engine
            engine.request_ids[request.request_id] = None
            queue.on_placed(request)
            if not request.tenant.background:
                waited_s = request.placed_at - request.queued_at
                self._metrics.queue_time.labels(model.id).observe(waited_s)

    def _take_back(self, queue: ModelQueue, model: ModelReplicas) -> None:
        """Replace the newest line of a batch with a waiting sequence, if there is one for its
        engine. The line is queued again with its tokens; its prefix stays in the engine's cache."""
        full = [engine for engine in model.ready_engines if engine.is_full]
        full = [engine for engine in full if queue.has_next(model, [engine])]
        ids = [request_id for engine in full for request_id in engine.request_ids]
        placed = [self._in_flight[request_id] for request_id in ids]
        taken = [one for one in placed if one.tenant.background]
        if taken:
            request = max(taken, key=lambda one: one.placed_at)
            assert request.engine is not None
            self._send(request.engine, request.abort_message())
            self._metrics.batch_places_returned.inc()
            self._requeue(request)

    # -- inside ----------------------------------------------------------------

    def _find(self, engine: Engine, request_id: str, attempt: int) -> RemoteRequest | None:
        request = self._in_flight.get(request_id)
        if request is None or request.engine is not engine or request.attempt != attempt:
            return None
        return request

    def _placed_on(self, engine: Engine) -> list[RemoteRequest]:
        return [self._in_flight[request_id] for request_id in engine.request_ids]

    def _apply(self, engine: Engine, request: RemoteRequest, delta: Delta, now: float) -> int:
        if not isinstance(request, RemoteSequence):
            return 0
        previous, model_id = request.last_token_at, request.model.id
        try:
            request.apply(delta, now)
        except MissingTokensError as error:
            logger.warning("%s on engine %s: %s", delta.request_id, engine.name, error)
            self._send(engine, Abort(request_id=delta.request_id, attempt=delta.attempt))
            self._retry_or_fail(request, f"engine {engine.name} lost some of its tokens")
            return 0
        if delta.token_ids and not request.tenant.background:
            self._metrics.on_tokens(model_id, now, previous, request.arrived_at)
        if delta.finish is not None:
            if request.usage is not None and not request.tenant.background:
                self._metrics.prefill_time.labels(model_id).observe(request.usage.prefill_s)
                self._metrics.decode_time.labels(model_id).observe(request.usage.decode_s)
            self._end(request, lambda: None)
        return len(delta.token_ids)

    def _check_timeouts(self, request: RemoteRequest, now: float) -> None:
        if request.state is RemoteRequestState.STOPPING:
            if now - request.stopping_at > _STOP_WAIT_S:
                self._end(request, request.end)
            return
        error = overdue(request, now, loaded_on_demand=self._is_loaded_on_demand(request.model))
        if error is not None:
            self._metrics.timeouts.inc(isinstance(error, GenerationTimeout))
            self.fail(request, error)

    def _retry_or_fail(
        self, request: RemoteRequest, reason: str, *, planned: bool = False, gone: str | None = None
    ) -> None:
        """Retry a sequence that the engine did not finish, or end it with an error. ``gone`` is
        the engine's incarnation if it has lost all its sequences."""
        if request.state is RemoteRequestState.STOPPING:
            self._requeue(request)  # which ends it
            return
        request.losses.add(gone, request.num_output_tokens, planned=planned)
        if request.losses.are_too_many:
            logger.warning("%s failed: %s", request.request_id, reason)
            wait_s = self._settings.restart_wait_s
            self._end(request, lambda: request.fail(engine_lost(wait_s)))
            return
        logger.info(
            "%s is resubmitted after %d tokens: %s",
            request.request_id,
            request.num_output_tokens,
            reason,
        )
        self._metrics.resumed.inc()
        self._requeue(request)

    def _requeue(self, request: RemoteRequest) -> None:
        if request.state is RemoteRequestState.STOPPING:  # nobody reads on
            self._end(request, request.end)
            return
        self._detach(request)
        request.requeue()
        request.model = request.next_version()
        self._queues[request.model].push(request)
        self.place(request.model)

    def _change_version(self, request: RemoteRequest, version: ModelReplicas) -> None:
        """Move ``request`` to the queue of ``version``, if it waits in that of another."""
        waits = request.state is RemoteRequestState.WAITING
        if waits and request.model is not version:
            self._queues[request.model].discard(request)
            request.model = version
            self._queues[version].push(request)

    def _end(self, request: RemoteRequest, mark: Callable[[], None]) -> None:
        self._in_flight.pop(request.request_id, None)
        self._queues[request.model].discard(request)
        placed = request.engine is not None
        self._detach(request)
        mark()
        if placed:
            if not request.tenant.background:
                self.departure_rate.record()
                self._queues[request.model].on_departure()
            self.place(request.model)
        if all(queue.is_idle for queue in self._queues.values()):
            self.departure_rate.clear()  # it would take the idle time for slowness

    def _detach(self, request: RemoteRequest) -> None:
        if request.engine is not None:
            request.engine.request_ids.pop(request.request_id, None)
            request.engine = None
            self._queues[request.model].on_removed(request)
