"""The generating endpoints of every API: from the body to the answer."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import time
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import asynccontextmanager
from functools import partial
from typing import Any, ClassVar, Generic, TypeVar

from msgspec.structs import replace
from starlette.datastructures import State
from starlette.requests import Request
from starlette.types import Receive, Scope, Send

from router.api.body import read_body, send_json
from router.api.history import shown_types
from router.api.images import with_images
from router.api.streaming import EventStream, StreamOpening
from router.api.translation import without_billing
from router.api.writer import OutputWriter
from router.errors import (
    ApiError,
    ClientDisconnected,
    ContextLengthExceeded,
    ErrorResponse,
    InvalidRequest,
)
from router.fleet.engines.engine import Model
from router.fleet.router import Router
from router.fleet.tasks import check_task
from router.fleet.tenants.tenant import Tenant
from router.generation.cache_debug import explain
from router.generation.choice import Choice, Echo, OutputDelta
from router.generation.generation import Generation
from router.generation.sampling import (
    MAX_SEQUENCES,
    answer_limits,
    check_prediction_length,
    check_prompt_length,
)
from router.schemas.body import RequestBody
from router.schemas.requests import ChatRequest, GenerationRequest
from router.tokens.image_prompts import Prompt
from router.tokens.model_replies import ToolCallPolicy
from router.tokens.reply_parser import PlainReplyParser, ReplyParser
from router.tokens.tokenization_cache import LengthCheck
from router.tokens.work_pool import INLINE_SIZE
from shared.wire import Grammar, ThinkingBudget

logger = logging.getLogger(__name__)
_MAX_NAMED = 16
"""Max number of types named in a header."""

_Body = TypeVar("_Body", bound=RequestBody)
_Request = TypeVar("_Request", bound=GenerationRequest)


class GenerationEndpoint(ABC, Generic[_Body, _Request]):
    """An ASGI application that answers one kind of request, streaming or not.

    The body is parsed as a ``_Body`` and translated to a ``_Request``. `Operation` documents the
    attributes that describe an endpoint in `/openapi.json`.
    """

    body_type: type[_Body]
    response_type: ClassVar[Any]
    event_type: ClassVar[Any]
    stream_media_type: ClassVar[str] = "text/event-stream"
    stream_terminator: ClassVar[str | None] = None
    error_type: ClassVar[Any] = ErrorResponse
    example: ClassVar[Mapping[str, Any]]
    prompt_field: ClassVar[str]
    """The field named in the error if the prompt is too long."""
    field_names: ClassVar[Mapping[str, str]] = {}
    """For errors: the names in ``body_type`` of fields of ``_Request``, where they differ."""

    def __init__(self, router: Router) -> None:
        self._router = router

    @abstractmethod
    def translate(self, body: _Body) -> _Request:
        """Translate ``body``. May run on any thread. Raises `InvalidRequest`."""

    def stored_bytes(self, body: _Body, tenant: Tenant) -> int:
        """Return the size of stored data that ``body`` of ``tenant`` refers to, in addition to its
        own. Raises `ApiError`."""
        return 0

    @abstractmethod
    def writer(self, body: _Body, model: str) -> OutputWriter:
        """Return the writer of the answer to ``body`` by the model called ``model``."""

    def num_prompts(self, request: _Request) -> int:
        return 1

    @abstractmethod
    def tokenize_prompts(
        self,
        request: _Request,
        model: Model,
        cache_scope: str | None = None,
        check_length: LengthCheck | None = None,
    ) -> list[Prompt]:
        """Return the tokens of each prompt in ``request``.

        With a ``cache_scope``, they continue the tokens of earlier answers known in that scope.
        Raises `InvalidRequest`, and what ``check_length`` raises.
        """

    async def prepare_images(
        self, request: _Request, generation: Generation, size: int, state: State
    ) -> tuple[_Request, int]:
        """Return ``request``, whose body has ``size`` bytes, with its images prepared for the
        model, and the number of bytes without them. Raises `ApiError`."""
        return request, size

    def reply_parser(self, request: _Request, model: Model, prompt: list[int]) -> ReplyParser:
        """Return the parser of the answer to ``prompt``."""
        return PlainReplyParser()

    def grammar(self, request: _Request, model: Model, prompt: list[int]) -> Grammar | None:
        """Return the grammar of the answer to ``prompt``, if any. Raises `InvalidRequest`."""
        return request.grammar

    def thinking(self, request: _Request, model: Model, prompt: list[int]) -> ThinkingBudget | None:
        """Return the budget for reasoning in the answer to ``prompt``, if any."""
        return None

    def prediction(self, request: _Request, model: Model) -> tuple[int, ...]:
        """Return the tokens that the answer is expected to repeat. Raises
        `ContextLengthExceeded`."""
        return ()

    def max_tokens(self, request: _Request, model: Model) -> int | None:
        return request.max_tokens

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        http = Request(scope, receive)
        try:
            body, size = await read_body(http, self._router, self.body_type)
            try:
                await self.respond_to(body, size, http, send)
            except ApiError as error:
                error.rename_fields(self.field_names)
                raise
        finally:
            # Requests of batches do not pass through the middleware.
            if (held := scope["state"].get("image_memory")) is not None:
                held.close()

    async def respond_to(self, body: _Body, size: int, http: Request, send: Send) -> None:
        """Answer ``body``, which has ``size`` bytes. Raises `ApiError` and `ClientDisconnected`."""
        router = self._router
        state = http.scope["state"]
        tenant: Tenant = state["tenant"]
        size += self.stored_bytes(body, tenant)

        def translate() -> tuple[_Request, dict[str, list[str]]]:
            left_out = {"tools": body.left_out_tools, "items": body.left_out_items}
            shown = {kind: shown_types(types) for kind, types in left_out.items()}
            return self.translate(body), shown

        request, left_out = await router.work.run_large(tenant.share, translate, size)
        name = request.model or router.model_names.wanted(None, tenant)
        writer = self.writer(body, name or "")  # without any name, no model is found below
        opening = StreamOpening(
            writer,
            send,
            partial(router.work.run_large, tenant.share),
            request_bytes=size,
            write_timeout_s=router.settings.request_timeout_s,
        )
        async with opening if request.stream else contextlib.nullcontext():
            began = time.monotonic()
            model = await loaded_model(router, request.model, http)
            check_task(model, "generate", router, tenant)
            generation = Generation(
                router, model, request, writer.id, tenant, state.get("traceparent", "")
            )
            generation.load_s = time.monotonic() - began
            state["generation"] = generation  # for logs and traces
            async with router.admit(tenant, model, state["limits_left"]):
                with generation:
                    async with watching_client(http.receive, generation.abort):
                        await self._submit(generation, request, size, http.state)
                        await generation.accepted()
                        headers = _left_out_headers(left_out)
                        headers.append((b"x-seed", str(generation.seed).encode()))
                        if http.headers.get("x-debug-cache", "") not in ("", "0"):
                            explanation = await generation.run(lambda: explain(generation), size)
                            headers.append((b"x-debug-cache", explanation))
                        if request.stream:
                            await EventStream(generation, opening).run(headers)
                            return
                        answer = await _full_response(generation, writer, size)
                    await send_json(send, answer, headers)

    async def _submit(
        self, generation: Generation, request: _Request, size: int, state: State
    ) -> None:
        """Prepare the sequences of ``request``, whose body has ``size`` bytes, and put them into
        the queue."""
        model, tenant = generation.model, state.tenant
        self._check_places(request, model, tenant)
        request, size = await self.prepare_images(request, generation, size, state)

        def prepare() -> list[Choice]:
            check_length = partial(check_prompt_length, model)
            prompts = self.tokenize_prompts(request, model, generation.cache_scope, check_length)
            limits = answer_limits(request, model, prompts, self.max_tokens(request, model))
            return list(self._choices(request, generation, prompts, limits))

        try:
            choices = await generation.run(prepare, size)
        except ContextLengthExceeded as error:
            if error.param != "prediction":
                error.param = self.prompt_field
            raise
        self._check_places(request, model, tenant)  # others may have taken the place
        firsts = {choice.prompt_logprobs_source for choice in choices}
        num_tokens = sum(sequence.num_prompt_tokens for sequence in firsts)
        await self._router.rate_limits.admit_prompt(tenant, num_tokens, state.limits_left)
        generation.submit(choices)

    def _check_places(self, request: _Request, model: Model, tenant: Tenant) -> None:
        """Raise `ApiError` if the queue cannot accept the prompts of ``request``."""
        router, num_prompts, n = self._router, self.num_prompts(request), request.n or 1
        if num_prompts * n > MAX_SEQUENCES:
            raise InvalidRequest(
                f"{num_prompts} prompts with n={n} need more than {MAX_SEQUENCES} sequences.",
                param="n" if n > 1 else "prompt",
            )
        router.admission.check_queue(
            model.replicas,
            router.dispatcher.queue_of(model.replicas),
            tenant,
            priority=tenant.priority(request.priority),
            new=num_prompts * n,
        )

    def _choices(
        self, request: _Request, generation: Generation, prompts: list[Prompt], limits: list[int]
    ) -> Iterator[Choice]:
        """Yield each choice of each prompt. Raises `InvalidRequest`."""
        model = generation.model
        prediction = self.prediction(request, model)
        echoes = request.echo_prompts or itertools.repeat(None, len(prompts))
        seen: Counter[tuple[int, ...]] = Counter()
        for prompt, limit, echoed in zip(prompts, limits, echoes, strict=True):
            tokens = prompt.token_ids
            earlier, n = seen[tuple(tokens)], request.n or 1
            seen[tuple(tokens)] += n
            yield from generation.choices_of(
                prompt,
                [self.reply_parser(request, model, tokens) for _ in range(n)],
                None if echoed is None else Echo.of(echoed, tokens, model.renderer),
                first_seed=earlier,
                max_tokens=limit,
                grammar=self.grammar(request, model, tokens),
                thinking=self.thinking(request, model, tokens),
                prediction=prediction,
            )


class ChatEndpoint(GenerationEndpoint[_Body, ChatRequest]):
    """An endpoint for conversations. Each API's body is translated to a `ChatRequest`."""

    prompt_field = "messages"

    async def prepare_images(
        self, request: ChatRequest, generation: Generation, size: int, state: State
    ) -> tuple[ChatRequest, int]:
        scope = generation.cache_salt
        preparing = with_images(
            self._router, request.messages, generation.model, state, scope, size
        )
        messages, size = await generation.wait_for(preparing)
        return replace(request, messages=messages), size

    def max_tokens(self, request: ChatRequest, model: Model) -> int | None:
        return request.max_completion_tokens or request.max_tokens

    def tokenize_prompts(
        self,
        request: ChatRequest,
        model: Model,
        cache_scope: str | None = None,
        check_length: LengthCheck | None = None,
    ) -> list[Prompt]:
        return [
            model.renderer.render_chat(
                without_billing(request.messages),
                request.prompt_tools,
                request.template_args,
                cache_scope,
                ending=request.prompt_ending,
                check_length=check_length,
            )
        ]

    def reply_parser(self, request: ChatRequest, model: Model, prompt: list[int]) -> ReplyParser:
        return model.renderer.replies.parser(prompt, _tool_call_policy(request))

    def grammar(self, request: ChatRequest, model: Model, prompt: list[int]) -> Grammar | None:
        return model.renderer.replies.grammar(prompt, _tool_call_policy(request), request.grammar)

    def thinking(
        self, request: ChatRequest, model: Model, prompt: list[int]
    ) -> ThinkingBudget | None:
        tokens = request.max_thinking_tokens
        return None if tokens is None else model.renderer.replies.thinking(prompt, tokens)

    def prediction(self, request: ChatRequest, model: Model) -> tuple[int, ...]:
        if request.prediction is None:
            return ()
        check_length = partial(check_prediction_length, model)
        text = request.prediction.joined
        tokens = model.renderer.encode(text, add_special_tokens=False, check_length=check_length)
        return tuple(tokens)


def _left_out_headers(left_out: Mapping[str, list[str]]) -> list[tuple[bytes, bytes]]:
    """Return headers that name the types of what was ``left_out``, by kind, and log them."""
    headers = []
    for kind, types in left_out.items():
        if types:
            named = ", ".join(types[:_MAX_NAMED])
            logger.info("ignored %s that this server cannot run: %s", kind, named)
            headers.append((f"x-left-out-{kind}".encode(), named.encode()))
    return headers


def _tool_call_policy(request: ChatRequest) -> ToolCallPolicy:
    return ToolCallPolicy(
        request.callable_tools,
        required=request.requires_call,
        # A tool that `tool_choice` names is called only once.
        parallel=request.parallel_tool_calls is not False and not request.names_tool,
    )


async def _full_response(generation: Generation, writer: OutputWriter, size: int) -> list[bytes]:
    deltas: list[list[OutputDelta]] = [[] for _ in generation.choices]
    while True:
        await generation.begin_echoes()
        for choice in generation.choices:
            deltas[choice.index].append(await generation.advance(choice))
        if generation.finished:
            break
        await generation.changed()

    def write() -> list[bytes]:
        return writer.full_response(generation, [OutputDelta.join(each) for each in deltas])

    if writer.repeats_request and size > INLINE_SIZE:
        return await generation.run(write, size)
    return await generation.format(write, generation.num_entries)


async def loaded_model(router: Router, name: str | None, http: Request) -> Model:
    """Return the model called ``name`` once it is loaded. Raises what `Router.loaded_model` raises,
    and `ClientDisconnected`."""
    tenant: Tenant = http.state.tenant
    if router.unloaded_model(name, tenant) is None:
        return router.model_for(name, tenant)
    async with cancel_on_disconnect(http.receive):
        return await router.loaded_model(name, tenant)


@asynccontextmanager
async def cancel_on_disconnect(receive: Receive) -> AsyncIterator[None]:
    """Raise `ClientDisconnected` inside this context when the client closes the connection."""
    waiting = asyncio.current_task()
    gone = False

    def cancel() -> None:
        nonlocal gone
        gone = True
        if waiting is not None:
            waiting.cancel()

    try:
        async with watching_client(receive, cancel):
            yield
    except asyncio.CancelledError:
        if gone and waiting is not None and not waiting.uncancel():
            raise ClientDisconnected from None
        raise


@asynccontextmanager
async def watching_client(receive: Receive, on_gone: Callable[[], None]) -> AsyncIterator[None]:
    """Call ``on_gone`` when the client closes the connection."""

    async def watch() -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        on_gone()

    task = asyncio.create_task(watch())
    try:
        yield
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)  # also raises if this task is cancelled
