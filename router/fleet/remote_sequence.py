"""One sequence on its way: from the queue to an engine, perhaps to another one, to its end."""

from __future__ import annotations

import enum
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from router.errors import ApiError
from shared.wire import Delta, Grammar, Sampling, Submit, TokenLogprobs, Usage

if TYPE_CHECKING:
    from router.fleet.engines import Engine, Model


@dataclass(frozen=True)
class SequenceSpec:
    """What is to be generated. The same in every attempt. ``logprobs``,
    ``prompt_logprobs`` and ``grammar`` as in `shared.wire.Submit`."""

    request_id: str
    prompt_token_ids: list[int]
    sampling: Sampling
    max_tokens: int
    stop_token_ids: list[int]
    min_tokens: int = 0
    cache_salt: str = ""
    priority: int = 0
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    grammar: Grammar | None = None


class RemoteSequenceState(enum.Enum):
    WAITING = "waiting"
    """In the queue."""
    PLACED = "placed"
    """Sent to an engine, which has not answered."""
    ACCEPTED = "accepted"
    STOPPING = "stopping"
    """Cut by a stop string; its engine's final count is awaited."""
    DONE = "done"


class MissingTokensError(Exception):
    """Tokens are missing: this attempt cannot be continued."""


class RemoteSequence:
    """The router's half of a sequence. Whoever consumes it is called through ``on_change`` and
    reads ``output_token_ids``, ``finish_reason`` and ``error``. ``logprobs`` run parallel to
    ``output_token_ids`` where they are asked for, ``prompt_logprobs`` to the prompt without its
    first.
    """

    def __init__(
        self, spec: SequenceSpec, model: Model, key: str, on_change: Callable[[], None]
    ) -> None:
        self.spec = spec
        self.model = model
        self.key = key
        self._on_change = on_change
        self.state = RemoteSequenceState.WAITING
        self.attempt = 0
        self.losses = 0
        self.engine: Engine | None = None
        self.output_token_ids: list[int] = []
        self.logprobs: list[TokenLogprobs] = []
        self.prompt_logprobs: list[TokenLogprobs] = []
        self.stop_token: int | None = None
        self.usage: Usage | None = None
        self.finish_reason: str | None = None
        self.error: ApiError | None = None
        self.missed_beats = 0
        self.arrived_at = self.queued_at = time.monotonic()
        self.placed_at = self.stopping_at = 0.0
        self.first_token_at: float | None = None
        self.last_token_at = 0.0

    @property
    def done(self) -> bool:
        return self.state is RemoteSequenceState.DONE

    @property
    def started(self) -> bool:
        """An engine has taken it, or it is over."""
        return self.state in (
            RemoteSequenceState.ACCEPTED,
            RemoteSequenceState.STOPPING,
            RemoteSequenceState.DONE,
        )

    @property
    def has_prompt_logprobs(self) -> bool:
        """Whether all log-probabilities of the prompt that are asked for are here."""
        spec = self.spec
        return spec.prompt_logprobs is None or (
            len(self.prompt_logprobs) == len(spec.prompt_token_ids) - 1
        )

    @property
    def cached_tokens(self) -> int:
        return self.usage.cached_ram_tokens + self.usage.cached_ssd_tokens if self.usage else 0

    def submit_message(self) -> Submit:
        spec = self.spec
        return Submit(
            request_id=spec.request_id,
            attempt=self.attempt,
            token_ids=spec.prompt_token_ids,
            sampling=spec.sampling,
            max_tokens=spec.max_tokens,
            stop_token_ids=spec.stop_token_ids,
            min_tokens=spec.min_tokens,
            generated=self.output_token_ids,
            cache_salt=spec.cache_salt,
            priority=spec.priority,
            logprobs=spec.logprobs,
            prompt_logprobs=None if self.has_prompt_logprobs else spec.prompt_logprobs,
            grammar=spec.grammar,
        )

    def place(self, engine: Engine) -> None:
        self.engine = engine
        self.state = RemoteSequenceState.PLACED
        self.placed_at = time.monotonic()
        self.missed_beats = 0

    def requeue(self) -> None:
        """Back to the queue, as a new attempt: what the old one still says is void."""
        self.engine = None
        self.state = RemoteSequenceState.WAITING
        self.attempt += 1
        self.queued_at = time.monotonic()
        if not self.has_prompt_logprobs:
            self.prompt_logprobs.clear()

    def accept(self) -> None:
        if self.state is RemoteSequenceState.PLACED:
            self.state = RemoteSequenceState.ACCEPTED
            self._on_change()

    def apply(self, delta: Delta) -> None:
        """Raises `MissingTokensError` when something between the last delta and this one is
        missing."""
        if delta.index != len(self.output_token_ids):
            raise MissingTokensError(
                f"token {delta.index} came after {len(self.output_token_ids)} tokens"
            )
        self.prompt_logprobs += delta.prompt_logprobs or ()
        if delta.token_ids and not self.has_prompt_logprobs:
            raise MissingTokensError("tokens came before the log-probabilities of the prompt")
        if self.spec.logprobs is not None:
            if len(delta.logprobs or ()) != len(delta.token_ids):
                raise MissingTokensError("tokens came without their log-probabilities")
            self.logprobs += delta.logprobs or ()
        if delta.token_ids:
            now = time.monotonic()
            if self.first_token_at is None:
                self.first_token_at = now
            self.last_token_at = now
            self.output_token_ids += delta.token_ids
        if self.state is RemoteSequenceState.PLACED:
            self.state = RemoteSequenceState.ACCEPTED
        if delta.usage is not None:
            self.usage = delta.usage
        if delta.finish is not None:
            self.stop_token = delta.stop_token
            self.finish_reason = delta.finish
            self.state = RemoteSequenceState.DONE
        self._on_change()

    def stop(self) -> None:
        self.state = RemoteSequenceState.STOPPING
        self.stopping_at = time.monotonic()
        self.finish_reason = "stop"

    def end(self, usage: Usage | None = None) -> None:
        """Ends a stopped sequence, or one that nobody wants any more."""
        self.usage = usage or self.usage
        self.state = RemoteSequenceState.DONE
        self._on_change()

    def fail(self, error: ApiError) -> None:
        self.error = error
        self.finish_reason = None
        self.state = RemoteSequenceState.DONE
        self._on_change()
