"""The generation for one request: its sequences, from the validated body to their texts."""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Sequence

from msgspec import UNSET, UnsetType

from router.errors import ClientDisconnected, InvalidRequest
from router.fleet.engines import Model
from router.fleet.remote_sequence import RemoteSequence
from router.fleet.router import Router
from router.generation.choice import Choice, OutputDelta
from router.generation.sampling import (
    MAX_SEQUENCES,
    SequenceSpec,
    check_lengths,
    check_vocabulary,
    submit_message,
)
from router.schemas.completions import (
    CompletionTokensDetails,
    CompletionUsage,
    PromptLogprobs,
    PromptTokensDetails,
)
from router.schemas.requests import GenerationRequest
from router.tokens.detokenizer import IncrementalDetokenizer
from router.tokens.logprobs import LogprobsContext, TokenAligner, prompt_logprobs

_TAIL_TOKENS = 64
"""The length of the end of a prompt that the detokenizer sees before an answer that continues it.
A detokenizer may drop a space at the beginning of a text."""


class Generation:
    """All sequences of one request. Leaving the context frees those that still run."""

    def __init__(
        self, router: Router, model: Model, request: GenerationRequest, request_id: str, key: str
    ) -> None:
        self._router = router
        self._request = request
        self._request_id = request_id
        self._key = key
        self.model = model
        self.cache_scope = f"{key}/{request.cache_salt or ''}"
        """Conversations of one scope may continue each other's tokens
        (`router.tokens.tokenization_cache`)."""
        self.choices: list[Choice] = []
        self.seed = request.seed if request.seed is not None else secrets.randbits(53)
        self._changed = asyncio.Event()
        self._client_gone = False
        self._started_at = time.monotonic()

    def check(self, prompts: Sequence[list[int]], max_tokens: int | None) -> list[int]:
        """Return the max_tokens of each prompt.

        Raises `ApiError` if the model or the queue cannot take the request.
        """
        router, replicas, n = self._router, self.model.replicas, self._request.n or 1
        if len(prompts) * n > MAX_SEQUENCES:
            raise InvalidRequest(
                f"{len(prompts)} prompts with n={n} are more than {MAX_SEQUENCES} sequences.",
                param="n" if n > 1 else "prompt",
            )
        waiting = router.dispatcher.num_waiting(replicas.id)
        router.admission.check_queue(replicas, waiting, len(prompts) * n)
        check_vocabulary(self._request, self.model)
        return [check_lengths(router.settings, self.model, each, max_tokens) for each in prompts]

    def submit(self, specs: Sequence[SequenceSpec]) -> None:
        """Admit a sequence for each of ``specs``."""
        router, request, renderer = self._router, self._request, self.model.renderer
        for index, spec in enumerate(specs):
            message = submit_message(
                f"{self._request_id}:{index}", spec, request, self.model, router.settings, self.seed
            )
            sequence = RemoteSequence(message, self._key, self.notify)
            detokenizer = IncrementalDetokenizer(
                renderer.detokenizer(), request.stop_strings, request.min_tokens or 0
            )
            if request.continues_prompt:
                detokenizer.prime(spec.prompt_token_ids[-_TAIL_TOKENS:])
            source = self.choices[-1].prompt_logprobs_source if spec.choice else sequence
            aligned = request.num_logprobs is not None
            self.choices.append(
                Choice(
                    index,
                    sequence,
                    detokenizer,
                    spec.reply_parser,
                    stop=router.dispatcher.stop,
                    prompt_logprobs_source=source,
                    aligner=TokenAligner(renderer.vocabulary) if aligned else None,
                    echo=spec.echo,
                )
            )
        router.dispatcher.admit(self.model.replicas, [choice.sequence for choice in self.choices])

    async def accepted(self) -> None:
        """Return once an engine has accepted one of the sequences. Raises a refusal."""
        while True:
            self._changed.clear()
            self._check_connected()
            for choice in self.choices:
                if choice.sequence.error is not None:
                    raise choice.sequence.error
            if any(choice.sequence.started for choice in self.choices):
                return
            await self._changed.wait()

    async def changed(self) -> None:
        """Wait until a sequence has changed, or until `notify`. Raises `ClientDisconnected`."""
        await self._changed.wait()
        self._changed.clear()
        self._check_connected()

    def notify(self) -> None:
        """Wake every waiter of `changed`."""
        self._changed.set()

    def advance(self, choice: Choice) -> OutputDelta:
        """Return what has become certain of ``choice``. Raises the error of its sequence."""
        running = choice.finish_reason is None
        delta = choice.advance()
        if running and choice.finish_reason is not None:
            self.model.renderer.remember_reply(
                self.cache_scope, choice.sequence.submit.token_ids, choice.output_token_ids
            )
        return delta

    @property
    def logprobs_context(self) -> LogprobsContext:
        """For the log-probabilities of generated tokens."""
        return self._logprobs_context(self._request.num_logprobs or 0)

    def prompt_logprobs(self, choice: Choice) -> PromptLogprobs | UnsetType:
        """Return those of the prompt of ``choice``, if they are asked for."""
        count = self._request.prompt_logprobs
        if count is None:
            return UNSET
        source = choice.prompt_logprobs_source
        return prompt_logprobs(
            source.submit.token_ids, source.prompt_logprobs, self._logprobs_context(count)
        )

    @property
    def finished(self) -> bool:
        return all(choice.finish_reason is not None for choice in self.choices)

    def abort(self) -> None:
        """Free everything at once: the client has gone. Waiters get `ClientDisconnected`."""
        self._client_gone = True
        self._release()
        self.notify()

    def usage(self) -> CompletionUsage:
        """Return the usage, which is exact once all choices have finished."""
        # A prompt counts once, however many choices it has; so does what was cached of it.
        firsts = {choice.prompt_logprobs_source for choice in self.choices}
        prompt_tokens = sum(len(sequence.submit.token_ids) for sequence in firsts)
        cached_tokens = sum(sequence.cached_tokens for sequence in firsts)
        completion_tokens = sum(choice.completion_tokens for choice in self.choices)
        reasoning_tokens = sum(choice.reasoning_tokens for choice in self.choices)
        return CompletionUsage(
            prompt_tokens=prompt_tokens,
            completion_tokens=completion_tokens,
            total_tokens=prompt_tokens + completion_tokens,
            prompt_tokens_details=PromptTokensDetails(cached_tokens),
            completion_tokens_details=CompletionTokensDetails(reasoning_tokens),
        )

    def __enter__(self) -> Generation:
        return self

    def __exit__(self, *_: object) -> None:
        self._release()
        if self.finished and self.choices:
            self._router.metrics.end_to_end.observe(time.monotonic() - self._started_at)

    def _release(self) -> None:
        for choice in self.choices:
            self._router.dispatcher.release(choice.sequence)

    def _check_connected(self) -> None:
        if self._client_gone:
            raise ClientDisconnected

    def _logprobs_context(self, count: int) -> LogprobsContext:
        return LogprobsContext(self.model.renderer.vocabulary, count)
