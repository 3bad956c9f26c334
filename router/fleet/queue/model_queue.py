"""The sequences of one model: those queued, and how many of each tenant are in engines."""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Callable, Sequence

from router.fleet.engines.engine import Engine, ModelReplicas
from router.fleet.queue.fair_queue import FairQueue
from router.fleet.sequences.remote_request import RemoteRequest
from router.fleet.tenants.tenant import Tenant
from shared.wire import BACKGROUND_PRIORITY

_ROWS_PER_RESERVED_ROW = 8
_ENOUGH_DEPARTURES = 8
_RETRY_AFTER_S = 2.0
_LONGEST_RETRY_AFTER_S = 120.0


class DepartureRate:
    """The rate at which sequences leave engines, estimated from the last departures."""

    def __init__(self, window: int = 32, clock: Callable[[], float] = time.monotonic) -> None:
        self._departures: deque[float] = deque(maxlen=window)
        self._clock = clock

    def record(self) -> None:
        self._departures.append(self._clock())

    def clear(self) -> None:
        self._departures.clear()

    def estimate_s(self, ahead: int, enough: int = 2) -> float | None:
        """Estimate the time until ``ahead`` sequences have left and another can be placed.

        None if fewer than ``enough`` departures are known.
        """
        if len(self._departures) < enough:
            return None
        # Measured until now; otherwise a stalled queue would look fast.
        elapsed_s = self._clock() - self._departures[0]
        return (ahead + 1) * elapsed_s / (len(self._departures) - 1)

    def wait_s(self, ahead: int) -> float:
        """Return the estimate as a time after which a client should retry."""
        estimate_s = self.estimate_s(ahead)
        if estimate_s is None:
            return _RETRY_AFTER_S
        return min(max(estimate_s, 1.0), _LONGEST_RETRY_AFTER_S)


class ModelQueue:
    """The queue of one model, with the data that decides the order."""

    def __init__(self) -> None:
        self._waiting = FairQueue()
        self._running: Counter[str] = Counter()
        self._background = FairQueue()
        """Lines of batches. They go only when nothing else waits, so age does not matter."""
        self._running_background: Counter[str] = Counter()
        self._departures_while_waiting = DepartureRate()

    def __len__(self) -> int:
        return len(self._waiting) + len(self._background)

    @property
    def num_waiting(self) -> int:
        """Without lines of batches."""
        return len(self._waiting)

    @property
    def is_idle(self) -> bool:
        """Whether no sequences wait or are in engines, except lines of batches."""
        return not self._waiting and not self._running

    def num_waiting_of(self, tenant: Tenant) -> int:
        return self._waiting.num_waiting_of(tenant.share)

    def push(self, sequence: RemoteRequest) -> None:
        self._queue_of(sequence).push(sequence)

    def discard(self, sequence: RemoteRequest) -> None:
        self._queue_of(sequence).discard(sequence)

    def pop(self, model: ModelReplicas, engines: Sequence[Engine]) -> RemoteRequest | None:
        """Return the next sequence that may be placed on one of ``engines``, of ``model``, if
        any. A sequence with an adapter needs an engine that supports adapters; others overtake
        it.

        With several tenants, none gets the last eighth of the decode rows. A new tenant then
        finds a free row, and does not wait for the end of another tenant's long answer."""
        return self._waiting.pop(self._running, self._holds_back(model, engines))

    def has_next(self, model: ModelReplicas, engines: Sequence[Engine]) -> bool:
        """Return whether `pop` would return one."""
        return self._waiting.has_next(self._holds_back(model, engines))

    def _holds_back(
        self, model: ModelReplicas, engines: Sequence[Engine]
    ) -> Callable[[RemoteRequest], bool]:
        ready = model.ready_engines
        rows = sum(min(each.hello.max_batch_size, each.hello.max_sequences) for each in ready)
        most = max(1, rows - max(1, rows // _ROWS_PER_RESERVED_ROW))
        lacks_engine = _lacks_engine(engines)
        return lambda one: (
            lacks_engine(one) or (not one.tenant.alone and self._running[one.key] >= most)
        )

    def pop_background(self, engines: Sequence[Engine]) -> RemoteRequest | None:
        """Return the next line of a batch that may be placed on one of ``engines``, if any."""
        return self._background.pop(self._running_background, _lacks_engine(engines))

    @property
    def runs_background(self) -> bool:
        """Whether engines run lines of batches."""
        return bool(self._running_background)

    def _queue_of(self, sequence: RemoteRequest) -> FairQueue:
        return self._background if sequence.tenant.background else self._waiting

    def _running_of(self, sequence: RemoteRequest) -> Counter[str]:
        return self._running_background if sequence.tenant.background else self._running

    def engine_priority(self, sequence: RemoteRequest) -> int:
        """Return the priority of ``sequence`` in an engine, before it is placed.

        With several tenants, the first sequence of each goes before further sequences of others,
        which are one priority lower: engines compute prompts one after the other, and the long
        prompts of one tenant would delay the first token of the next.
        """
        if sequence.tenant.background or sequence.tenant.alone or not self._running[sequence.key]:
            return sequence.priority
        return max(sequence.priority - 1, BACKGROUND_PRIORITY + 1)

    def on_placed(self, sequence: RemoteRequest) -> None:
        self._running_of(sequence)[sequence.key] += 1

    def on_removed(self, sequence: RemoteRequest) -> None:
        """Count ``sequence`` out: an engine no longer has it."""
        running = self._running_of(sequence)
        running[sequence.key] -= 1
        if running[sequence.key] <= 0:
            del running[sequence.key]

    def on_departure(self) -> None:
        """Record the end of a sequence. Only a nonempty queue shows how fast it moves."""
        if self._waiting:
            self._departures_while_waiting.record()
        else:
            self._departures_while_waiting.clear()

    def predicted_wait_s(self, tenant: Tenant, priority: int) -> float:
        """Estimate how long a new sequence will wait for an engine; 0 if unknown.

        The estimate is a lower bound: later sequences that overtake it are not counted.
        """
        if not self._waiting:
            return 0.0
        ahead = self._waiting.num_ahead(tenant.share, priority, self._running)
        return self._departures_while_waiting.estimate_s(ahead, _ENOUGH_DEPARTURES) or 0.0


def _lacks_engine(engines: Sequence[Engine]) -> Callable[[RemoteRequest], bool]:
    """Return whether none of ``engines`` can take a sequence."""
    takes_adapters = any(engine.takes_adapters for engine in engines)
    return lambda one: one.names_adapter and not takes_adapters
