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
class Order:
    """What is to be generated. The same in every attempt. ``logprobs``,
    ``prompt_logprobs`` and ``grammar`` as in `shared.wire.Submit`."""

    request_id: str
    prompt: list[int]
    sampling: Sampling
    max_tokens: int
    stop_token_ids: list[int]
    min_tokens: int = 0
    cache_salt: str = ""
    priority: int = 0
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    grammar: Grammar | None = None


class FlightState(enum.Enum):
    WAITING = "waiting"
    """In the queue."""
    PLACED = "placed"
    """Sent to an engine, which has not answered."""
    ACCEPTED = "accepted"
    STOPPING = "stopping"
    """Cut by a stop string; its engine's final count is awaited."""
    DONE = "done"


class BrokenFlight(Exception):
    """Tokens are missing: this attempt cannot be continued."""


class Flight:
    """The router's half of a sequence. Whoever consumes it is called through
    ``on_change`` and reads ``tokens``, ``finish`` and ``error``. ``logprobs`` run parallel to
    ``tokens`` where they are asked for, ``prompt_logprobs`` to the prompt without its first.
    """

    def __init__(self, order: Order, model: Model, key: str, on_change: Callable[[], None]) -> None:
        self.order = order
        self.model = model
        self.key = key
        self._on_change = on_change
        self.state = FlightState.WAITING
        self.attempt = 0
        self.losses = 0
        self.engine: Engine | None = None
        self.tokens: list[int] = []
        self.logprobs: list[TokenLogprobs] = []
        self.prompt_logprobs: list[TokenLogprobs] = []
        self.stop_token: int | None = None
        self.usage: Usage | None = None
        self.finish: str | None = None
        self.error: ApiError | None = None
        self.missed_beats = 0
        self.arrived = self.waiting_since = time.monotonic()
        self.placed_at = self.stopping_since = 0.0
        self.first_token_at: float | None = None
        self.last_token_at = 0.0

    @property
    def done(self) -> bool:
        return self.state is FlightState.DONE

    @property
    def started(self) -> bool:
        """An engine has taken it, or it is over."""
        return self.state in (FlightState.ACCEPTED, FlightState.STOPPING, FlightState.DONE)

    @property
    def prompt_scored(self) -> bool:
        """Whether all log-probabilities of the prompt that are asked for are here."""
        order = self.order
        return order.prompt_logprobs is None or (len(self.prompt_logprobs) == len(order.prompt) - 1)

    @property
    def cached_tokens(self) -> int:
        return self.usage.cached_ram_tokens + self.usage.cached_ssd_tokens if self.usage else 0

    def submission(self) -> Submit:
        order = self.order
        return Submit(
            request_id=order.request_id,
            attempt=self.attempt,
            token_ids=order.prompt,
            sampling=order.sampling,
            max_tokens=order.max_tokens,
            stop_token_ids=order.stop_token_ids,
            min_tokens=order.min_tokens,
            generated=self.tokens,
            cache_salt=order.cache_salt,
            priority=order.priority,
            logprobs=order.logprobs,
            prompt_logprobs=None if self.prompt_scored else order.prompt_logprobs,
            grammar=order.grammar,
        )

    def place(self, engine: Engine) -> None:
        self.engine = engine
        self.state = FlightState.PLACED
        self.placed_at = time.monotonic()
        self.missed_beats = 0

    def wait_again(self) -> None:
        """Back to the queue, as a new attempt: what the old one still says is void."""
        self.engine = None
        self.state = FlightState.WAITING
        self.attempt += 1
        self.waiting_since = time.monotonic()
        if not self.prompt_scored:
            self.prompt_logprobs.clear()

    def accept(self) -> None:
        if self.state is FlightState.PLACED:
            self.state = FlightState.ACCEPTED
            self._on_change()

    def add(self, delta: Delta) -> None:
        """Raises `BrokenFlight` when something between the last delta and this one is missing."""
        if delta.index != len(self.tokens):
            raise BrokenFlight(f"token {delta.index} came after {len(self.tokens)} tokens")
        self.prompt_logprobs += delta.prompt_logprobs or ()
        if delta.token_ids and not self.prompt_scored:
            raise BrokenFlight("tokens came before the log-probabilities of the prompt")
        if self.order.logprobs is not None:
            if len(delta.logprobs or ()) != len(delta.token_ids):
                raise BrokenFlight("tokens came without their log-probabilities")
            self.logprobs += delta.logprobs or ()
        if delta.token_ids:
            now = time.monotonic()
            if self.first_token_at is None:
                self.first_token_at = now
            self.last_token_at = now
            self.tokens += delta.token_ids
        if self.state is FlightState.PLACED:
            self.state = FlightState.ACCEPTED
        if delta.usage is not None:
            self.usage = delta.usage
        if delta.finish is not None:
            self.stop_token = delta.stop_token
            self.finish = delta.finish
            self.state = FlightState.DONE
        self._on_change()

    def stop(self) -> None:
        self.state = FlightState.STOPPING
        self.stopping_since = time.monotonic()
        self.finish = "stop"

    def end(self, usage: Usage | None = None) -> None:
        """Ends a stopped flight, or one that nobody wants any more."""
        self.usage = usage or self.usage
        self.state = FlightState.DONE
        self._on_change()

    def fail(self, error: ApiError) -> None:
        self.error = error
        self.finish = None
        self.state = FlightState.DONE
        self._on_change()
