"""The main loop of an embedding or reranking engine: messages in, passes of texts, rows out.

A pass is computed layer by layer. Requests of other groups that arrive meanwhile are computed
between two of its layers, in their own pass, if the current pass is much longer or its group has
many texts. A stream of such requests cannot starve the current pass, which then gets half of the
time.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Generator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import msgspec
import numpy as np
from numpy.typing import NDArray

from engine.backend.device_errors import is_lost_device
from engine.embedding.texts import Job, TextQueue
from engine.io.inbox import Inbox, InboxMessage, NewRouter, PicturedSubmit
from engine.io.status import EngineStatus
from engine.io.thread import IOThread
from engine.model.encoder import Text
from engine.scheduler.timing.time_share import MUCH_SHORTER, Lead
from shared import wire

logger = logging.getLogger(__name__)

PASS_S = 1.0
"""Max duration of a pass. With fewer tokens, reading the weights is a larger part of it."""
SMALL_PASS_S = 0.05
"""Max duration of a pass shared by several groups."""
MAX_PASS_TOKENS = 8192
"""A pass keeps about ten arrays of (tokens, hidden size)."""
_MIN_PASS_TOKENS = 64
_FIRST_GUESS_S = 1e-3
"""Estimated seconds per token, until a pass has been measured."""
_IDLE_WAIT_S = 5.0
_MAX_OPEN = 2
"""Passes at once: one, and one between two of its layers."""

Rows = NDArray[np.float32]


class TextModel(Protocol):
    """Computes the rows of texts."""

    def compute(self, texts: Sequence[Text]) -> Generator[None, None, Rows]:
        """Compute (texts, width), one layer per step. May raise anything."""

    def check(self, text: Text) -> str | None:
        """Return the reason why ``text`` cannot be computed, if any."""


@dataclass(eq=False)
class _Pass:
    texts: dict[Text, str]  # with their groups
    work: Generator[None, None, Rows]
    priority: int
    seconds: float = 0.0

    @property
    def tokens(self) -> int:
        return sum(map(len, self.texts))


class EmbeddingCore:
    """Serves until it is drained. All methods are called on the main thread."""

    def __init__(
        self,
        *,
        model: TextModel,
        inbox: Inbox,
        io_thread: IOThread,
        status: EngineStatus,
        max_jobs: int,
        active_memory_bytes: Any = lambda: 0,
    ) -> None:
        self._model, self._inbox, self._io_thread = model, inbox, io_thread
        self._status, self._max_jobs = status, max_jobs
        self._active_memory_bytes = active_memory_bytes
        self._queue = TextQueue()
        self._open: list[_Pass] = []
        self._none_for: tuple[_Pass, int] | None = None
        """A pass that nothing in the queue may overtake, and the queue's `changes` at that time."""
        self._lead = Lead()
        self._token_s = _FIRST_GUESS_S
        self._draining = False
        self._lost_devices = 0  # passes in a row that a lost device did not compute
        self._stats = wire.EngineStats()

    def run(self) -> None:
        """Serve until the engine is asked to drain and has finished its jobs."""
        worked = True
        while not (self._draining and not len(self._queue) and not self._open):
            worked = self.run_once(0 if worked else _IDLE_WAIT_S)

    def run_once(self, wait_s: float = 0) -> bool:
        """Receive messages (waiting up to ``wait_s`` for the first) and compute a layer of a pass.

        Return False if there was nothing to compute.
        """
        items = self._inbox.take(wait_s)
        for item in items:
            self._handle(item)
        if items:  # a layer may take seconds; the router gives up on jobs that heartbeats omit
            self._report()
        self._drop_abandoned()
        self._begin()
        worked = bool(self._open)
        if worked:
            self._advance(self._next())
        self._report()
        return worked

    def _handle(self, item: InboxMessage) -> None:
        if isinstance(item, wire.Encode):
            if (refusal := self._refusal(item)) is not None:
                self._io_thread.send([refusal])
            else:
                self._queue.add(item)
        elif isinstance(item, wire.Submit | PicturedSubmit):
            submit = item.request if isinstance(item, PicturedSubmit) else item
            why = "this model embeds or ranks texts; it does not generate text"
            self._io_thread.send([wire.Refused.of(submit, "unsupported", why)])
        elif isinstance(item, wire.Abort):
            for key in self._queue.find(item.request_id, item.attempt):
                self._queue.drop(key)
        elif isinstance(item, NewRouter):
            for key in item.requests:
                self._queue.drop(key)
        elif isinstance(item, wire.Drain):
            self._draining = True
            self._status.enter_phase("draining")

    def _refusal(self, job: wire.Encode) -> wire.Refused | None:
        if self._draining:
            return wire.Refused.of(job, "draining", "the engine is shutting down")
        if len(self._queue) >= self._max_jobs:
            return wire.Refused.of(job, "full", f"it has {self._max_jobs} jobs")
        if (job.request_id, job.attempt) in self._queue.find(job.request_id, job.attempt):
            return wire.Refused.of(job, "invalid", "the request is already here")
        if job.second_starts and len(job.second_starts) != len(job.token_ids):
            return wire.Refused.of(job, "invalid", "second_starts and token_ids do not match")
        if not job.token_ids:
            return wire.Refused.of(job, "invalid", "there are no texts")
        starts = job.second_starts or [0] * len(job.token_ids)
        for ids, start in zip(job.token_ids, starts, strict=True):
            if not ids or not 0 <= start <= len(ids):
                return wire.Refused.of(
                    job, "invalid", "a text has no tokens, or its second part begins outside it"
                )
            if (why := self._model.check(Text(tuple(ids), start))) is not None:
                return wire.Refused.of(job, "invalid", why)
        return None

    # -- passes ----------------------------------------------------------------

    def _begin(self) -> None:
        """Start a pass if none is open, or if there are new texts that need not wait for its
        end."""
        if len(self._open) >= _MAX_OPEN:
            return
        budget = int(min(MAX_PASS_TOKENS, max(_MIN_PASS_TOKENS, PASS_S / self._token_s)))
        small = int(min(budget, max(_MIN_PASS_TOKENS, SMALL_PASS_S / self._token_s)))
        if not self._open:
            self._none_for = None
            texts = self._queue.take(budget, small)
        else:
            (outer,) = self._open
            state = outer, self._queue.changes
            if state == self._none_for:
                return  # otherwise many texts would be scanned between all layers
            groups = set(outer.texts.values())
            # Otherwise all texts are equal and go in order.
            longest = None if self._queue.has_waiting(groups) else outer.tokens // MUCH_SHORTER
            texts = self._queue.take(
                small, small, but_of=groups, at_least=outer.priority, longest=longest
            )
            self._none_for = None if texts else state
        if texts:
            self._open.append(self._pass_of(texts))

    def _drop_abandoned(self) -> None:
        """Drop the passes whose texts nobody wants any more."""
        for one in list(self._open):
            if not any(map(self._queue.is_wanted, one.texts)):
                one.work.close()
                self._open.remove(one)
                self._queue.forget(one.texts)
                self._none_for = None
                self._lead.clear()

    def _next(self) -> _Pass:
        """Return the open pass to compute next."""
        outer, inner = self._open[0], self._open[-1]
        has_turn = self._lead.is_used_up and inner.priority == outer.priority
        return outer if has_turn else inner

    def _pass_of(self, texts: dict[Text, str]) -> _Pass:
        priority = max(map(self._queue.priority_of, texts))
        return _Pass(texts, self._model.compute(list(texts)), priority)

    def _advance(self, one: _Pass) -> None:
        """Compute a layer of a pass; after the last, send the complete rows."""
        rows: Rows | None = None
        is_outer = one is self._open[0]
        started = time.perf_counter()
        try:
            next(one.work)
        except StopIteration as done:
            rows = done.value
        except Exception as error:
            logger.exception("a pass of %d texts failed", len(one.texts))
            self._open.remove(one)
            self._lost_devices = self._lost_devices + 1 if is_lost_device(error) else 0
            if self._lost_devices > 1:
                raise RuntimeError("the device accepts no more work") from error
            self._on_failed(one, f"{type(error).__name__}: {error}")
            return
        finally:
            took_s = time.perf_counter() - started
            one.seconds += took_s
            self._lead.count(took_s, of_overtaken=is_outer)
        self._status.progress += 1
        if rows is not None:
            self._open.remove(one)
            self._finish(one, rows)
        if is_outer and one not in self._open:
            self._lead.clear()

    def _finish(self, one: _Pass, rows: Rows) -> None:
        self._lost_devices = 0
        tokens = one.tokens
        new_token_s = max(one.seconds, 1e-6) / tokens
        weight = min(0.5, tokens / 512)  # a pass of few tokens takes long per token
        self._token_s += weight * (new_token_s - self._token_s)
        stats = self._stats
        self._stats = msgspec.structs.replace(
            stats,
            steps_total=stats.steps_total + 1,
            step_seconds_total=stats.step_seconds_total + one.seconds,
            batch_rows_total=stats.batch_rows_total + len(one.texts),
            prefill_tokens_total=stats.prefill_tokens_total + tokens,
        )
        complete = [
            job
            for text, row in zip(one.texts, rows, strict=True)
            for job in self._queue.done(text, row.astype("<f4").tobytes())
        ]
        self._io_thread.send([_encoded(job) for job in complete])

    def _on_failed(self, one: _Pass, reason: str) -> None:
        """Compute the texts of a failed pass one by one, to find the text at fault."""
        if len(one.texts) > 1:
            for text, group in one.texts.items():
                alone = self._pass_of({text: group})
                self._open.append(alone)
                while alone in self._open:
                    self._advance(alone)
            return
        (text,) = one.texts
        self._io_thread.send([_encoded(job, reason) for job in self._queue.fail(text)])

    def _report(self) -> None:
        queue, stats = self._queue, self._stats
        self._status.live = [
            wire.LiveRequest(
                request_id=job.message.request_id, attempt=job.message.attempt, generated=0
            )
            for job in queue.jobs
        ]
        self._status.stats = msgspec.structs.replace(
            stats,
            running=sum(len(one.texts) for one in self._open),
            waiting=queue.num_waiting,
            texts_total=queue.num_texts,
            shared_texts_total=queue.num_shared,
            active_memory_bytes=self._active_memory_bytes(),
        )


def _encoded(job: Job, error: str | None = None) -> wire.Encoded:
    now, begun = time.monotonic(), job.begun_at or job.arrived_at
    return wire.Encoded(
        request_id=job.message.request_id,
        attempt=job.message.attempt,
        rows=b"".join(row for row in job.rows if row is not None) if error is None else b"",
        error=error,
        queue_s=begun - job.arrived_at,
        compute_s=now - begun,
    )
