"""The router's side of one sequence, from the queue through one or more engines to its end."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import chain
from types import MappingProxyType

from msgspec.structs import replace

from router.errors import ApiError, InternalError, InvalidRequest
from router.fleet.sequences.remote_request import RemoteRequest, RemoteRequestState
from router.fleet.tenants.tenant import Tenant
from shared.wire import Delta, LiveRequest, PackedLogprobs, Submit, TokenLogprobs, Usage


class MissingTokensError(Exception):
    """Tokens are missing, so this attempt cannot be continued."""


def failure(delta: Delta) -> ApiError:
    """Return the error for a sequence that its engine could not finish."""
    if delta.param is None:
        return InternalError()
    return InvalidRequest(f"Invalid '{delta.param}': {delta.error}.", param=delta.param)


class RemoteSequence(RemoteRequest):
    """The router's half of a sequence."""

    def __init__(
        self,
        submit: Submit,
        tenant: Tenant,
        on_change: Callable[[], None],
        prompt_blocks: Mapping[tuple[bytes, int], Sequence[bytes]] = MappingProxyType({}),
        payload: Sequence[bytes | memoryview] = (),
    ) -> None:
        super().__init__(submit.request_id, submit.priority, tenant, on_change)
        self.submit = submit
        """The message of the first attempt."""
        self.adapter = submit.adapter
        self.prompt_blocks = prompt_blocks
        self.payload = payload
        self._is_scored = submit.logprobs is not None or submit.prompt_logprobs is not None
        """Whether log-probabilities arrive with the tokens."""
        self.output_token_ids: list[int] = []
        self.num_readable_tokens = 0
        """Number of `output_token_ids` that other threads may read. Otherwise one might find the
        last token before the reason why it is the last, and take a stop token for text."""
        self.logprobs: list[TokenLogprobs] = []
        """The log-probabilities of `output_token_ids`, if requested."""
        self._prompt_logprobs: list[PackedLogprobs] = []
        self._num_prompt_logprobs = 0
        self._cached_tokens = 0  # as told by heartbeats
        self.stop_token: int | None = None
        self.finish_reason: str | None = None

    @property
    def num_prompt_tokens(self) -> int:
        return len(self.submit.token_ids)

    @property
    def num_output_tokens(self) -> int:
        return len(self.output_token_ids)

    @property
    def has_prompt_logprobs(self) -> bool:
        """Whether all requested log-probabilities of the prompt have arrived."""
        count = self._num_prompt_logprobs
        return self.submit.prompt_logprobs is None or count == len(self.submit.token_ids) - 1

    @property
    def prompt_logprobs(self) -> Iterator[TokenLogprobs]:
        """The log-probabilities of the prompt's tokens except the first, if requested."""
        return chain.from_iterable(self._prompt_logprobs)

    @property
    def cached_tokens(self) -> int:
        """Prompt tokens found in a cache, as far as known."""
        if self.usage is None:
            return self._cached_tokens
        return self.usage.cached_ram_tokens + self.usage.cached_ssd_tokens

    @property
    def predicted(self) -> tuple[int, int]:
        """The drafted tokens of the request's `prediction`, accepted or rejected, as far as the
        last engine has reported."""
        usage = self.usage
        if usage is None:
            return 0, 0
        return usage.accepted_prediction_tokens, usage.rejected_prediction_tokens

    def message(self, priority: int) -> Submit:
        """Return the message of the current attempt."""
        return replace(
            self.submit,
            attempt=self.attempt,
            priority=priority,
            generated=self.output_token_ids,
            prompt_logprobs=None if self.has_prompt_logprobs else self.submit.prompt_logprobs,
        )

    def requeue(self) -> None:
        super().requeue()
        if not self.has_prompt_logprobs:
            self._prompt_logprobs.clear()
            self._num_prompt_logprobs = 0

    def take_progress(self, live: LiveRequest) -> None:
        """Apply a heartbeat's data on the prompt, unless tokens have arrived since."""
        computed, length = live.computed_prompt_tokens, len(self.submit.token_ids)
        if computed is None or live.generated < len(self.output_token_ids):
            return
        # The last token of a prompt is computed with the first output.
        most = length if self.computed_prompt_tokens == length else length - 1
        before = self.computed_prompt_tokens
        self.computed_prompt_tokens = max(0, min(computed, most))
        cached = live.cached_prompt_tokens or 0
        self._cached_tokens = max(0, min(cached, self.computed_prompt_tokens))
        if self.computed_prompt_tokens != before:
            self._on_change()

    def apply(self, delta: Delta, now: float) -> None:
        """Add a delta. Raises `MissingTokensError` if it does not continue the last one.

        ``now`` is from ``time.monotonic``.
        """
        if delta.index != len(self.output_token_ids):
            raise MissingTokensError(
                f"token {delta.index} arrived after {len(self.output_token_ids)} tokens"
            )
        if self._is_scored:
            self._add_logprobs(delta)
        if delta.token_ids:
            if self.first_token_at is None:
                self.first_token_at = now
            self.last_token_at = now
            self.computed_prompt_tokens = len(self.submit.token_ids)
            self.output_token_ids += delta.token_ids
        if self.state is RemoteRequestState.PLACED:
            self.state = RemoteRequestState.ACCEPTED
        if delta.usage is not None:
            self.usage = self._with_first_prefix(delta.usage)
        if delta.finish is not None:
            self.stop_token = delta.stop_token
            self.finish_reason = delta.finish
            self.state = RemoteRequestState.DONE
        self.num_readable_tokens = len(self.output_token_ids)
        self._on_change()

    def _add_logprobs(self, delta: Delta) -> None:
        if delta.prompt_logprobs is not None:
            self._prompt_logprobs.append(delta.prompt_logprobs)
            self._num_prompt_logprobs += len(delta.prompt_logprobs)
        if delta.token_ids and not self.has_prompt_logprobs:
            raise MissingTokensError("tokens arrived before the log-probabilities of the prompt")
        if self.submit.logprobs is not None:
            if len(delta.logprobs or ()) != len(delta.token_ids):
                raise MissingTokensError("tokens arrived without their log-probabilities")
            self.logprobs += delta.logprobs or ()

    def _with_first_prefix(self, usage: Usage) -> Usage:
        """Return ``usage`` with the cached tokens of the first one. A request that continues, on
        any engine, finds the prefix that it has computed itself."""
        if (first := self.usage) is None:
            return usage
        ram, ssd = first.cached_ram_tokens, first.cached_ssd_tokens
        return replace(usage, cached_ram_tokens=ram, cached_ssd_tokens=ssd)

    def end(self, usage: Usage | None = None) -> None:
        super().end(None if usage is None else self._with_first_prefix(usage))

    def stop(self) -> None:
        self.state = RemoteRequestState.STOPPING
        self.stopping_at = time.monotonic()
        self.finish_reason = "stop"

    def fail(self, error: ApiError) -> None:
        self.finish_reason = None
        super().fail(error)
