"""One request's generation: its sequences, from the validated body to their texts."""

from __future__ import annotations

import asyncio
import itertools
import secrets
import time
from collections.abc import Callable, Sequence
from hashlib import blake2b
from types import TracebackType

from msgspec import UNSET, UnsetType

from router.errors import ClientDisconnected, ContextLengthExceeded, InvalidRequest
from router.fleet.engines import Model
from router.fleet.remote_sequence import RemoteSequence, SequenceSpec
from router.fleet.router import Router
from router.generation.choice import Choice, Echo, OutputDelta
from router.schemas.completions import (
    CompletionTokensDetails,
    CompletionUsage,
    PromptLogprobs,
    PromptTokensDetails,
)
from router.schemas.requests import GenerationRequest
from router.tokens.detokenizer import IncrementalDetokenizer
from router.tokens.logprobs import LogprobsContext, TokenAligner, prompt_logprobs
from router.tokens.rendering import Renderer
from router.tokens.reply_parser import ReplyParser
from shared.settings import Settings
from shared.wire import Grammar, Sampling

MAX_SEQUENCES = 128
TAIL_TOKENS = 64
"""Of a prompt whose text goes on: what the detokenizer sees of it, for a space that it would leave
out at a beginning."""
REPETITION_CONTEXT_SIZE = 20
"""mlx-lm's default of ``repetition_context_size``."""


class Generation:
    """All sequences of one request. Leaving the context frees what is still running."""

    def __init__(self, router: Router, model: Model, key: str) -> None:
        self._router = router
        self.key = key
        self.model = model
        self.cache_scope = key
        """Within which conversations may be known to each other
        (`router.tokens.tokenization_cache`)."""
        self.choices: list[Choice] = []
        self.prompts: Sequence[Sequence[int]] = ()
        self.seed = 0
        self._num_logprobs = 0
        self._num_prompt_logprobs: int | None = None
        self._changed = asyncio.Event()
        self._client_gone = False
        self._started_at = time.monotonic()

    def submit(
        self,
        request: GenerationRequest,
        prompts: Sequence[list[int]],
        max_tokens: int | None,
        request_id: str,
        *,
        reply_parser: Callable[[list[int]], ReplyParser],
        grammar: Callable[[list[int]], Grammar | None],
    ) -> None:
        """Admits ``request.n`` sequences for each of ``prompts``; each is bound to the ``grammar``
        of its prompt, and taken apart by a ``reply_parser`` of its own. Raises `ApiError`."""
        router, model = self._router, self.model
        n = request.n or 1
        if len(prompts) * n > MAX_SEQUENCES:
            raise InvalidRequest(
                f"{len(prompts)} prompts with n={n} are more than {MAX_SEQUENCES} sequences.",
                param="n" if n > 1 else "prompt",
            )
        router.admission.check_queue(
            model, router.dispatcher.num_waiting(model.id), len(prompts) * n
        )
        self.prompts = prompts
        self.seed = request.seed if request.seed is not None else secrets.randbits(53)
        stop_ids = _stop_token_ids(request, model)
        renderer = model.renderer
        assert renderer is not None  # `Router.model_for` has seen an engine ready
        _check_vocabulary(request, model)
        self._num_logprobs = request.num_logprobs or 0
        self._num_prompt_logprobs = request.prompt_logprobs
        echoed = request.echo_prompts or itertools.repeat(None, len(prompts))
        for prompt, echo in zip(prompts, echoed, strict=True):
            limit = check_lengths(router.settings, model, prompt, max_tokens)
            bound = grammar(prompt)
            prompt_logprobs_source: RemoteSequence | None = None
            for choice in range(n):
                index = len(self.choices)
                spec = SequenceSpec(
                    request_id=f"{request_id}:{index}",
                    prompt_token_ids=prompt,
                    sampling=_sampling(request, model, router.settings, self.seed, choice),
                    max_tokens=limit,
                    stop_token_ids=stop_ids,
                    min_tokens=min(request.min_tokens or 0, limit),
                    cache_salt=request.cache_salt or "",
                    priority=request.priority or 0,
                    logprobs=request.num_logprobs,
                    # A prompt is the same in all its choices.
                    prompt_logprobs=_prompt_logprobs(request) if choice == 0 else None,
                    grammar=bound,
                )
                sequence = RemoteSequence(spec, model, self.key, self.notify)
                prompt_logprobs_source = prompt_logprobs_source or sequence
                detokenizer = IncrementalDetokenizer(
                    renderer.detokenizer(), request.stop_strings, request.min_tokens or 0
                )
                if request.continues_prompt:
                    detokenizer.prime(prompt[-TAIL_TOKENS:])
                aligned = request.num_logprobs is not None
                self.choices.append(
                    Choice(
                        index,
                        sequence,
                        detokenizer,
                        reply_parser(prompt),
                        prompt_logprobs_source=prompt_logprobs_source,
                        aligner=TokenAligner(renderer.vocabulary) if aligned else None,
                        echo=None if echo is None else _echo(echo, prompt, renderer),
                    )
                )
        router.dispatcher.admit(model, [choice.sequence for choice in self.choices])

    async def accepted(self) -> None:
        """Returns when an engine has taken one of the sequences. Raises a refusal."""
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
        """Waits until a sequence has moved, or until `notify`. Raises `ClientDisconnected`."""
        await self._changed.wait()
        self._changed.clear()
        self._check_connected()

    def notify(self) -> None:
        """Lets who waits for `changed` look again."""
        self._changed.set()

    def advance(self, choice: Choice) -> OutputDelta:
        running = choice.finish_reason is None
        delta = choice.advance(self._router)
        if running and choice.finish_reason is not None:
            assert self.model.renderer is not None
            self.model.renderer.remember_reply(
                self.cache_scope, choice.sequence.spec.prompt_token_ids, choice.output_token_ids
            )
        return delta

    @property
    def logprobs_context(self) -> LogprobsContext:
        """For the log-probabilities of what is generated."""
        assert self.model.renderer is not None
        return LogprobsContext(self.model.renderer.vocabulary, self._num_logprobs)

    def prompt_logprobs(self, choice: Choice) -> PromptLogprobs | UnsetType:
        """Those of the prompt of ``choice``, where they are asked for."""
        if self._num_prompt_logprobs is None:
            return UNSET
        context = LogprobsContext(self.logprobs_context.vocabulary, self._num_prompt_logprobs)
        return prompt_logprobs(
            choice.sequence.spec.prompt_token_ids,
            choice.prompt_logprobs_source.prompt_logprobs,
            context,
        )

    @property
    def finished(self) -> bool:
        return all(choice.finish_reason is not None for choice in self.choices)

    def abort(self) -> None:
        """The client is gone: everything is freed at once, and whoever waits is told."""
        self._client_gone = True
        self._release()
        self.notify()

    def usage(self) -> CompletionUsage:
        """Exact once all choices have finished."""
        prompt_tokens = sum(len(prompt) for prompt in self.prompts)
        completion_tokens = sum(choice.completion_tokens for choice in self.choices)
        per_prompt = max(1, len(self.choices) // max(1, len(self.prompts)))
        # A prompt counts once, however many choices it has; so does what was cached of it.
        cached = sum(choice.sequence.cached_tokens for choice in self.choices[::per_prompt])
        return CompletionUsage(
            prompt_tokens=prompt_tokens,
            completion_tokens=completion_tokens,
            total_tokens=prompt_tokens + completion_tokens,
            prompt_tokens_details=PromptTokensDetails(cached),
            completion_tokens_details=CompletionTokensDetails(
                sum(choice.reasoning_tokens for choice in self.choices)
            ),
        )

    def __enter__(self) -> Generation:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._release()
        if self.finished and self.choices:
            self._router.metrics.end_to_end.observe(time.monotonic() - self._started_at)

    def _release(self) -> None:
        for choice in self.choices:
            self._router.dispatcher.release(choice.sequence)

    def _check_connected(self) -> None:
        if self._client_gone:
            raise ClientDisconnected


def check_lengths(
    settings: Settings, model: Model, prompt: Sequence[int], max_tokens: int | None
) -> int:
    """The max_tokens that holds for ``prompt``: what was asked for, cut to what the context
    leaves. Raises `ContextLengthExceeded` and `InvalidRequest`."""
    context = model.hello.context_length
    if not prompt:
        raise InvalidRequest("The prompt is empty.", param="prompt")
    if len(prompt) >= context:
        raise ContextLengthExceeded(
            f"The prompt has {len(prompt)} tokens; with one more to generate that is over the"
            f" model's context of {context}.",
            param="prompt",
        )
    if len(prompt) > settings.max_prompt_tokens:
        raise ContextLengthExceeded(
            f"The prompt has {len(prompt)} tokens, over the limit of {settings.max_prompt_tokens}.",
            param="prompt",
        )
    if max_tokens is not None and max_tokens > settings.max_generation_tokens:
        raise InvalidRequest(
            f"'max_tokens' is {max_tokens}, over the limit of {settings.max_generation_tokens}.",
            param="max_tokens",
            code="invalid_value",
        )
    return min(max_tokens or settings.default_max_tokens, context - len(prompt))


def _check_vocabulary(request: GenerationRequest, model: Model) -> None:
    most = model.hello.vocab_size - 1
    for token in request.logit_bias or ():
        if token > most:
            raise InvalidRequest(
                f"'logit_bias' has the token id {token}, which is over {most}.",
                param="logit_bias",
                code="invalid_value",
            )


def _prompt_logprobs(request: GenerationRequest) -> int | None:
    """How many alternatives are needed for the prompt, for itself or to be echoed."""
    wanted = [request.prompt_logprobs]
    if request.echo_prompts is not None:
        wanted.append(request.num_logprobs)
    return max((count for count in wanted if count is not None), default=None)


def _echo(prompt: str | list[int], tokens: list[int], renderer: Renderer) -> Echo:
    if isinstance(prompt, str):
        return Echo(prompt, renderer.without_bos(prompt, tokens))
    return Echo(renderer.vocabulary.decode(tokens), tokens)


def _stop_token_ids(request: GenerationRequest, model: Model) -> list[int]:
    ids = set(request.stop_token_ids or ())
    if not request.ignore_eos:
        ids.update(model.hello.eos_token_ids)
        if model.renderer is not None:
            ids.update(model.renderer.eos_token_ids)
    return sorted(ids)


def _sampling(
    request: GenerationRequest, model: Model, settings: Settings, seed: int, choice: int
) -> Sampling:
    """The request's word, else the flag's, else the model's."""
    assert model.renderer is not None
    renderer = model.renderer
    defaults = renderer.sampling_defaults

    def pick(asked: float | None, flag: float | None, default: float) -> float:
        return asked if asked is not None else flag if flag is not None else default

    return Sampling(
        seed=_choice_seed(seed, choice),
        temperature=pick(request.temperature, settings.temperature, defaults.temperature),
        top_p=pick(request.top_p, settings.top_p, defaults.top_p),
        top_k=max(0, int(pick(request.top_k, settings.top_k, defaults.top_k))),
        min_p=pick(request.min_p, settings.min_p, defaults.min_p),
        xtc_probability=request.xtc_probability or 0.0,
        xtc_threshold=0.1 if request.xtc_threshold is None else request.xtc_threshold,
        xtc_special_ids=renderer.xtc_special_ids if request.xtc_probability else [],
        repetition_penalty=request.repetition_penalty or 1.0,
        repetition_context_size=(
            REPETITION_CONTEXT_SIZE
            if request.repetition_context_size is None
            else request.repetition_context_size
        ),
        presence_penalty=request.presence_penalty or 0.0,
        frequency_penalty=request.frequency_penalty or 0.0,
        logit_bias=list((request.logit_bias or {}).items()),
    )


def _choice_seed(seed: int, choice: int) -> int:
    """63 bits; the first choice of a small seed keeps it, so that ``n`` only adds choices."""
    if choice == 0:
        return seed & (2**63 - 1)
    digest = blake2b(f"{seed}/{choice}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") & (2**63 - 1)
