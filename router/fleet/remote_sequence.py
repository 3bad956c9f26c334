"""One sequence, from the queue to an engine, perhaps to another one, to its end."""

from __future__ import annotations

import enum
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import chain
from types import MappingProxyType

from msgspec.structs import replace

from router.errors import ApiError
from router.fleet.tenants import Tenant
from shared.wire import Delta, LiveRequest, PackedLogprobs, Submit, TokenLogprobs, Usage


class RemoteSequenceState(enum.Enum):
    WAITING = "waiting"
    """In the queue."""
    PLACED = "placed"
    """Sent to an engine that has not answered."""
    ACCEPTED = "accepted"
    STOPPING = "stopping"
    """Cut by a stop string; waits for the engine's final usage."""
    DONE = "done"


class MissingTokensError(Exception):
    """Tokens are missing, so this attempt cannot be continued."""


class RemoteSequence:
    """The router's half of a sequence. Its dispatcher keeps its model and its engine."""

    def __init__(
        self,
        submit: Submit,
        tenant: Tenant,
        on_change: Callable[[], None],
        prompt_blocks: Mapping[tuple[bytes, int], Sequence[bytes]] = MappingProxyType({}),
    ) -> None:
        self.submit = submit
        """The message of the first attempt."""
        self.prompt_blocks = prompt_blocks
        """As `router.fleet.placement.prompt_blocks` returns them."""
        self.tenant = tenant
        self._on_change = on_change
        """Called after every change that a reader of the fields below may wait for."""
        self._is_scored = submit.logprobs is not None or submit.prompt_logprobs is not None
        """Whether log-probabilities come with the tokens."""
        self.state = RemoteSequenceState.WAITING
        self.attempt = 0
        self.losses = 0
        """Engines that it lost, but for those that left as planned."""
        self.tokens_at_loss = 0
        """The tokens that it had then."""
        self.output_token_ids: list[int] = []
        self.logprobs: list[TokenLogprobs] = []
        """Those of `output_token_ids`, if they are asked for."""
        self._prompt_logprobs: list[PackedLogprobs] = []
        self._num_prompt_logprobs = 0
        self.stop_token: int | None = None
        self.usage: Usage | None = None
        self.finish_reason: str | None = None
        self.error: ApiError | None = None
        self.missed_beats = 0
        self.computed_prompt_tokens: int | None = None
        """Tokens of the prompt that this attempt has computed or found, as the last beat said. All
        of them once a token has come; None as long as nothing is known."""
        self.arrived_at = self.queued_at = time.monotonic()
        self.placed_at = self.stopping_at = 0.0
        self.first_token_at: float | None = None
        self.last_token_at = 0.0

    @property
    def request_id(self) -> str:
        return self.submit.request_id

    @property
    def key(self) -> str:
        """The name of the tenant, for fairness between keys."""
        return self.tenant.name

    @property
    def done(self) -> bool:
        return self.state is RemoteSequenceState.DONE

    @property
    def started(self) -> bool:
        """Whether an engine has accepted the sequence, or it is done."""
        return self.state not in (RemoteSequenceState.WAITING, RemoteSequenceState.PLACED)

    @property
    def has_prompt_logprobs(self) -> bool:
        """Whether all log-probabilities of the prompt that are asked for have come."""
        count = self._num_prompt_logprobs
        return self.submit.prompt_logprobs is None or count == len(self.submit.token_ids) - 1

    @property
    def prompt_logprobs(self) -> Iterator[TokenLogprobs]:
        """Those of the prompt's tokens but for the first, if they are asked for."""
        return chain.from_iterable(self._prompt_logprobs)

    @property
    def cached_tokens(self) -> int:
        return self.usage.cached_ram_tokens + self.usage.cached_ssd_tokens if self.usage else 0

    @property
    def predicted(self) -> tuple[int, int]:
        """The tokens of the request's `prediction` that were drafted, and accepted or rejected, as
        far as the last engine has told."""
        usage = self.usage
        if usage is None:
            return 0, 0
        return usage.accepted_prediction_tokens, usage.rejected_prediction_tokens

    def submit_message(self, priority: int) -> Submit:
        """Return the message of the current attempt."""
        return replace(
            self.submit,
            attempt=self.attempt,
            priority=priority,
            generated=self.output_token_ids,
            prompt_logprobs=None if self.has_prompt_logprobs else self.submit.prompt_logprobs,
        )

    def place(self) -> None:
        self.state = RemoteSequenceState.PLACED
        self.placed_at = time.monotonic()
        self.missed_beats = 0
        self.computed_prompt_tokens = None

    def requeue(self) -> None:
        """Wait again, as a new attempt. Messages about the old one are void."""
        self.state = RemoteSequenceState.WAITING
        self.computed_prompt_tokens = None
        self.attempt += 1
        self.queued_at = time.monotonic()
        if not self.has_prompt_logprobs:
            self._prompt_logprobs.clear()
            self._num_prompt_logprobs = 0

    def forgive(self, asleep_s: float) -> None:
        """Do not count a time in which nothing could come."""
        self.arrived_at += asleep_s
        self.queued_at += asleep_s
        self.placed_at += asleep_s
        self.stopping_at += asleep_s
        self.last_token_at += asleep_s if self.last_token_at else 0.0

    def accept(self) -> None:
        if self.state is RemoteSequenceState.PLACED:
            self.state = RemoteSequenceState.ACCEPTED
            self._on_change()

    def take_progress(self, live: LiveRequest) -> None:
        """Take in what a beat says of the prompt, unless tokens have come since."""
        told, length = live.computed_prompt_tokens, len(self.submit.token_ids)
        if told is not None and live.generated >= len(self.output_token_ids):
            # The last token of a prompt is computed with the first output.
            most = length if self.computed_prompt_tokens == length else length - 1
            self.computed_prompt_tokens = max(0, min(told, most))

    def apply(self, delta: Delta, now: float) -> None:
        """Add a delta. Raises `MissingTokensError` if it does not continue the last one.

        ``now`` is the time of ``time.monotonic``.
        """
        if delta.index != len(self.output_token_ids):
            raise MissingTokensError(
                f"token {delta.index} came after {len(self.output_token_ids)} tokens"
            )
        if self._is_scored:
            self._add_logprobs(delta)
        if delta.token_ids:
            if self.first_token_at is None:
                self.first_token_at = now
            self.last_token_at = now
            self.computed_prompt_tokens = len(self.submit.token_ids)
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

    def _add_logprobs(self, delta: Delta) -> None:
        if delta.prompt_logprobs is not None:
            self._prompt_logprobs.append(delta.prompt_logprobs)
            self._num_prompt_logprobs += len(delta.prompt_logprobs)
        if delta.token_ids and not self.has_prompt_logprobs:
            raise MissingTokensError("tokens came before the log-probabilities of the prompt")
        if self.submit.logprobs is not None:
            if len(delta.logprobs or ()) != len(delta.token_ids):
                raise MissingTokensError("tokens came without their log-probabilities")
            self.logprobs += delta.logprobs or ()

    def stop(self) -> None:
        self.state = RemoteSequenceState.STOPPING
        self.stopping_at = time.monotonic()
        self.finish_reason = "stop"

    def end(self, usage: Usage | None = None) -> None:
        """End a stopped sequence, or one that was released."""
        self.usage = usage or self.usage
        self.state = RemoteSequenceState.DONE
        self._on_change()

    def fail(self, error: ApiError) -> None:
        self.error = error
        self.finish_reason = None
        self.state = RemoteSequenceState.DONE
        self._on_change()
