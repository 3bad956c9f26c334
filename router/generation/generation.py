"""The generation of one request: its sequences, from the validated body to their texts."""

from __future__ import annotations

import asyncio
import secrets
import threading
import time
from collections.abc import Callable, Coroutine, Iterator, Sequence
from typing import Any, TypeVar

from router.errors import ApiError, ClientDisconnected
from router.fleet.engines.engine import Model
from router.fleet.queue.placement import prompt_blocks
from router.fleet.router import Router
from router.fleet.sequences.remote_sequence import RemoteSequence
from router.fleet.tenants.tenant import Tenant
from router.generation.choice import Choice, Echo, OutputDelta
from router.generation.sampling import (
    count_entries,
    image_frames,
    numbered_seed,
    salt_of,
    submit_message,
)
from router.generation.signal import Signal
from router.schemas.completions import (
    CompletionTokensDetails,
    CompletionUsage,
    PromptTokensDetails,
)
from router.schemas.requests import GenerationRequest
from router.tokens.detokenizer import IncrementalDetokenizer
from router.tokens.image_prompts import Prompt
from router.tokens.logprobs import LogprobsContext, TokenAligner, encoded_prompt_logprobs
from router.tokens.reply_parser import ReplyParser
from router.tokens.work_pool import INLINE_SIZE, SMALL_SIZE
from shared.wire import Grammar, ThinkingBudget

_TAIL_TOKENS = 64
"""Length of the end of a prompt that is searched for text."""
_INLINE_ENTRIES = 256
"""Max entries formatted on the event loop: each takes some microseconds."""
_CHARS_PER_ENTRY = 4
"""Number of characters whose tokenization costs as much as formatting one entry."""

_Result = TypeVar("_Result")


class Generation:
    """All sequences of one request. Leaving the context frees those still running."""

    def __init__(
        self,
        router: Router,
        model: Model,
        request: GenerationRequest,
        request_id: str,
        tenant: Tenant,
        traceparent: str = "",
    ) -> None:
        self._router = router
        self._request = request
        self.request_id = request_id
        self._tenant = tenant
        self._traceparent = traceparent
        self.model = model
        # Prefixes of other adapters have no replies of this one. The salt comes last: it may be any
        # text.
        self.cache_scope = f"{tenant.name}/{model.adapter_digest}/{request.cache_salt or ''}"
        """Conversations of one scope may continue each other's tokens
        (`router.tokens.tokenization_cache`)."""
        self.has_cache_salt = bool(request.cache_salt)
        self.cache_salt = salt_of(request, model.settings, tenant)
        """The scope that separates its cached blocks and prepared images from those of other
        tenants."""
        self.choices: list[Choice] = []
        self._num_choices = 0
        self.seed = request.seed if request.seed is not None else secrets.randbits(53)
        self._changed = Signal()
        self._client_gone = False
        self._work: asyncio.Future[Any] | None = None
        """The request's work on a thread, if there is any."""
        self._finished: set[Choice] = set()
        self._loop, self._thread = asyncio.get_running_loop(), threading.get_ident()
        self._prompt_logprobs: dict[RemoteSequence, bytes] = {}
        self.load_s = 0.0
        """How long the request waited for its model to load."""
        self.started_at = time.monotonic()
        self.stream_error: ApiError | None = None
        """The reason for the end of a stream, as given in its last event."""

    async def run(self, work: Callable[[], _Result], size: int) -> _Result:
        """Return the result of ``work``, run on a thread; ``size`` as for a `WorkPool`.

        Raises what ``work`` and `WorkPool.run` raise, and `ClientDisconnected` once the client is
        gone.
        """
        self._check_connected()
        return await self._cancelled_with_client(
            self._router.work.start(self._tenant.share, work, size)
        )

    async def wait_for(self, work: Coroutine[Any, Any, _Result]) -> _Result:
        """Return the result of ``work``. Raises `ClientDisconnected` as `run` does."""
        if self._client_gone:
            work.close()
        self._check_connected()
        return await self._cancelled_with_client(asyncio.ensure_future(work))

    async def _cancelled_with_client(self, result: asyncio.Future[_Result]) -> _Result:
        self._work = result
        try:
            return await result
        except asyncio.CancelledError:
            self._check_connected()
            raise
        finally:
            self._work = None

    async def format(self, work: Callable[[], _Result], num_entries: int) -> _Result:
        """Return the result of ``work``, which formats ``num_entries`` tokens or alternatives."""
        if num_entries <= _INLINE_ENTRIES:
            return work()
        return await self.run(work, num_entries * _CHARS_PER_ENTRY)

    def choices_of(
        self,
        prompt: Prompt,
        parsers: Sequence[ReplyParser],
        echo: Echo | None,
        *,
        first_seed: int,
        max_tokens: int,
        grammar: Grammar | None,
        thinking: ThinkingBudget | None,
        prediction: tuple[int, ...],
    ) -> Iterator[Choice]:
        """Yield a choice for each of ``parsers``. They have no text until `submit`; this may run on
        any thread.

        ``first_seed`` tells their seeds from those of other choices of the same prompt, also if the
        request repeats the prompt.
        """
        model, request, renderer = self.model, self._request, self.model.renderer
        engines = list(model.replicas.engines)
        blocks = prompt_blocks(
            engines, prompt.token_ids, self.cache_salt, prompt.pictures, model.adapter_digest
        )
        continued: list[int] = []
        if request.continues_prompt:
            before = renderer.without_bos("", prompt.token_ids[-_TAIL_TOKENS:])
            continued = renderer.vocabulary.last_text(before)
        source: RemoteSequence | None = None
        for number, parser in enumerate(parsers, first_seed):
            message = submit_message(
                request,
                model,
                self._tenant,
                prompt,
                request_id=f"{self.request_id}:{self._num_choices}",
                seed=numbered_seed(self.seed, number),
                is_first=source is None,
                traceparent=self._traceparent,
                cache_salt=self.cache_salt,
                max_tokens=max_tokens,
                grammar=grammar,
                thinking=thinking,
                prediction=prediction,
            )
            sequence = RemoteSequence(
                message, self._tenant, self.notify, blocks, image_frames(prompt)
            )
            source = source or sequence
            detokenizer = IncrementalDetokenizer(
                renderer.vocabulary.decoder(), request.stop_strings, request.min_tokens or 0
            )
            detokenizer.prime(continued)
            scored = request.num_logprobs is not None
            yield Choice(
                self._num_choices,
                sequence,
                detokenizer,
                parser,
                prompt=prompt,
                stop=self._stop,
                prompt_logprobs_source=source,
                aligner=TokenAligner(renderer.vocabulary, bool(continued)) if scored else None,
                echo=echo,
                reports_progress=request.reports_progress,
            )
            self._num_choices += 1

    def submit(self, choices: list[Choice]) -> None:
        """Put the sequences of ``choices`` into the queue."""
        router, self.choices = self._router, choices
        if (adapter := self.model.adapter) is not None:
            labels = self.model.replicas.id, adapter.name
            router.metrics.adapter_requests.labels(*labels).inc()
        # While the prompt was prepared, a new version of the model may have become the current one.
        replicas = self.model.replicas.version_for(
            has_output=False,
            has_images=any(choice.sequence.submit.images for choice in choices),
            adapter=self.model.adapter,
        )
        router.dispatcher.admit(replicas, [choice.sequence for choice in choices])

    async def accepted(self) -> None:
        """Return once an engine has accepted one of the sequences. Raises the error if all are
        refused."""
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
        if self._changed.is_set:
            await asyncio.sleep(0)  # yield to other tasks, even if there is always something new
        await self._changed.wait()
        self._check_connected()

    def notify(self) -> None:
        """Wake the waiter of `changed`."""
        self._changed.set()

    async def run_large(self, work: Callable[[], _Result], size: int) -> _Result:
        """Run ``work`` immediately if its size is at most `INLINE_SIZE`, otherwise with `run`."""
        return work() if size <= INLINE_SIZE else await self.run(work, size)

    async def advance(self, choice: Choice) -> OutputDelta:
        """Return the new final output of ``choice``, read on a thread if that is slow. Raises the
        error of its sequence."""
        if choice.is_slow:
            delta = await self.run(choice.advance, SMALL_SIZE + 1)
        else:
            delta = choice.advance()
        if choice.behind:
            self.notify()
        if choice.finish_reason is not None and choice not in self._finished:
            self._finished.add(choice)
            if not self._tenant.background:  # nothing will continue it
                self._remember_reply(choice)
        return delta

    def _stop(self, sequence: RemoteSequence) -> None:
        """End the text of ``sequence``. Called by a choice, possibly on a thread."""
        if threading.get_ident() == self._thread:
            self._router.dispatcher.stop(sequence)
        else:
            self._loop.call_soon_threadsafe(self._stop, sequence)
            self._loop.call_soon_threadsafe(self.notify)

    async def begin_echoes(self) -> None:
        """Repeat the prompts of the choices that need it, as soon as possible."""
        if not self._request.echoes:
            return
        for choice in self.choices:
            if choice.echo_is_due:
                prompt = choice.sequence.submit.token_ids
                entries = count_entries(self._request, [len(prompt)], [])
                await self.format(choice.begin_echo, entries)

    def _remember_reply(self, choice: Choice) -> None:
        renderer, scope = self.model.renderer, self.cache_scope
        prompt, output = choice.prompt.text_token_ids, choice.output_token_ids
        self._router.work.start_unattended(
            self._tenant.share, lambda: renderer.remember_reply(scope, prompt, output), len(prompt)
        )

    @property
    def num_entries(self) -> int:
        """The number of tokens and alternatives in the answer so far."""
        return count_entries(
            self._request,
            [len(choice.sequence.submit.token_ids) for choice in self.choices],
            [choice.completion_tokens for choice in self.choices],
        )

    @property
    def answer_size(self) -> int:
        """The size of the answer so far, as for `run_large`."""
        return self.num_entries * _CHARS_PER_ENTRY

    @property
    def logprobs_context(self) -> LogprobsContext:
        """Entries for the log-probabilities of generated tokens."""
        return self._logprobs_context(self._request.num_logprobs or 0)

    def prompt_logprobs(self, choice: Choice) -> bytes | None:
        """Return the log-probabilities of the prompt of ``choice`` in JSON, if requested."""
        count = self._request.prompt_logprobs
        if count is None:
            return None
        source = choice.prompt_logprobs_source
        if source not in self._prompt_logprobs:
            self._prompt_logprobs[source] = encoded_prompt_logprobs(
                source.submit.token_ids, source.prompt_logprobs, self._logprobs_context(count)
            )
        return self._prompt_logprobs[source]

    @property
    def finished(self) -> bool:
        return all(choice.finish_reason is not None for choice in self.choices)

    def abort(self) -> None:
        """Free everything at once, because the client is gone. Waiters get `ClientDisconnected`."""
        self._client_gone = True
        if self._work is not None:
            self._work.cancel()
        self._release()
        self.notify()

    def usage(self) -> CompletionUsage:
        """Return the usage, which is exact once all choices have finished."""
        # A prompt and its cached tokens count once, however many choices it has.
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
            completion_tokens_details=CompletionTokensDetails(
                reasoning_tokens,
                accepted_prediction_tokens=sum(one.sequence.predicted[0] for one in self.choices),
                rejected_prediction_tokens=sum(one.sequence.predicted[1] for one in self.choices),
            ),
        )

    def __enter__(self) -> Generation:
        return self

    def __exit__(self, *_: object) -> None:
        self._release()
        if self.finished and self.choices and not self._tenant.background:
            end_to_end = self._router.metrics.end_to_end.labels(self.model.replicas.id)
            end_to_end.observe(time.monotonic() - self.started_at)

    def _release(self) -> None:
        for choice in self.choices:
            self._router.dispatcher.release(choice.sequence)

    def _check_connected(self) -> None:
        if self._client_gone:
            raise ClientDisconnected

    def _logprobs_context(self, count: int) -> LogprobsContext:
        return LogprobsContext(self.model.renderer.vocabulary, count)
