"""`/v1/responses` and its stored responses."""

from __future__ import annotations

import uuid
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any, ClassVar

import msgspec
from msgspec.structs import replace
from starlette.datastructures import State
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from router.api.body import json_response
from router.api.endpoints import ChatEndpoint
from router.api.operations import Operation, generation_operation
from router.api.pages import newest_first, page_limit
from router.api.truncation import truncate_to_fit
from router.errors import (
    BODY_ERRORS,
    MODEL_ERRORS,
    ContextLengthExceeded,
    GenerationTimeout,
    InvalidRequest,
    NotFound,
    NotSupported,
)
from router.fleet.engines.engine import Model
from router.fleet.router import Router
from router.fleet.tenants.tenant import Tenant
from router.generation.generation import Generation
from router.responses.archive import ResponseArchive
from router.responses.compaction import (
    CONTEXT_SHARE,
    MAX_SUMMARY_TOKENS,
    Capsule,
    CompactionBuilder,
    SummaryRequest,
    divided,
    extract,
    last_turn,
    num_system,
    summary_request,
    with_summary,
)
from router.responses.objects import (
    CompactedResponse,
    DeletedResponse,
    ItemList,
    ResponseObject,
    ResponseStreamEvent,
)
from router.responses.schemas import CompactRequest, InputItem, ResponsesRequest
from router.responses.sealing import ReasoningSeal
from router.responses.store import ItemReferences, ResponseStore, StoredResponse
from router.responses.tools import ClientTool, client_tools
from router.responses.translation import chat_request, known_tools, resolve_input, with_notes
from router.responses.writer import CompactedWriter, ResponseWriter
from router.schemas.conversation import ChatMessage
from router.schemas.requests import ChatRequest
from router.tokens.image_prompts import Prompt
from router.tokens.tokenization_cache import LengthCheck

_MB = 1_000_000
_MAX_PARTS = 32
"""Max parts in which a conversation is summarized; of the rest only an extract is kept."""
_CHARS_PER_TOKEN = 4
_LEAST_CHARS = 200
_MAX_PAGE_ITEMS = 100
_UNLIMITED_TOKENS = 16_384
_BYTES_PER_TOKEN = 64
"""Max bytes of stored JSON per token of the longest prompt; a longer conversation is rejected or
truncated before it is read. Text has about four bytes per token, and reasoning is not rendered
again."""
_IMAGE_CHARS_PER_BYTE = 2
"""The same limit for its images in base64, plus some for the JSON around each."""
_TAG = "OpenAI Responses"
_PATH = "/v1/responses/{response_id}"


def operations(router: Router) -> list[Operation]:
    responses = Responses(router)
    return [
        generation_operation(
            "/v1/responses", responses, "Answer a conversation", _TAG, _CreateResponse
        ),
        Operation(
            "/v1/responses/compact",
            _Application(responses.compact),
            "Compact a conversation",
            _TAG,
            method="POST",
            body_type=CompactRequest,
            example=_Compact.example,
            response_type=CompactedResponse,
            errors=(*BODY_ERRORS, *MODEL_ERRORS, GenerationTimeout),
        ),
        Operation(
            path=_PATH,
            endpoint=responses.retrieve,
            summary="Get a stored response",
            tag=_TAG,
            query={"stream": {"enum": ["false"]}},
            response_type=ResponseObject,
            errors=(InvalidRequest, NotFound),
        ),
        Operation(
            path=_PATH,
            endpoint=responses.delete,
            summary="Delete a stored response",
            tag=_TAG,
            method="DELETE",
            response_type=DeletedResponse,
            errors=(NotFound,),
        ),
        Operation(
            path=_PATH + "/cancel",
            endpoint=responses.cancel,
            summary="Always rejected: no response runs in the background",
            tag=_TAG,
            method="POST",
            statuses=(),
            errors=(InvalidRequest, NotFound),
        ),
        Operation(
            path=_PATH + "/input_items",
            endpoint=responses.list_input_items,
            summary="List the input items of a stored response",
            tag=_TAG,
            query={
                "order": {"enum": ["asc", "desc"]},
                "after": {"type": "string"},
                "limit": {"type": "integer", "minimum": 1, "maximum": _MAX_PAGE_ITEMS},
            },
            response_type=ItemList,
            errors=(InvalidRequest, NotFound),
        ),
    ]


class _Application:
    """A method as an ASGI application. Starlette takes methods for handlers of requests."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self._app(scope, receive, send)


class _CreateResponse(ChatEndpoint[ResponsesRequest]):
    """Answers one request made with the API key ``key``."""

    body_type = ResponsesRequest
    response_type: ClassVar[Any] = ResponseObject
    event_type = ResponseStreamEvent
    example: ClassVar = {"input": "Say hello.", "max_output_tokens": 32}
    prompt_field = "input"
    writer_type: ClassVar[type[ResponseWriter]] = ResponseWriter
    field_names: ClassVar = {
        "messages": "input",
        "max_tokens": "max_output_tokens",
        "response_format.json_schema": "text.format",
    }

    def __init__(
        self,
        router: Router,
        store: ResponseStore,
        seal: ReasoningSeal,
        key: str,
        *,
        in_background: bool = False,
    ) -> None:
        super().__init__(router)
        self._in_background = in_background
        self._seal = seal
        self._store = store
        self._key = key
        self._previous: StoredResponse | None = None
        self._new_items: list[InputItem] = []
        self._input_json = b""
        self._tools: list[ClientTool] = []
        self._may_truncate = False
        self._capsule = Capsule(seal, ())
        self._compacts = False
        """Whether the answer is a summary of the conversation."""
        self._threshold: int | None = None
        """Max tokens of a prompt that is not compacted before it is answered."""
        self._conversation: list[ChatMessage] = []

    def translate(self, body: ResponsesRequest) -> ChatRequest:
        settings = self._router.settings
        limit_bytes = _BYTES_PER_TOKEN * self._router.longest_prompt
        image_chars = _IMAGE_CHARS_PER_BYTE * settings.max_image_bytes
        earlier_items: list[InputItem] = []
        if self._previous is not None:
            whole = body.truncation != "auto"
            earlier_items = self._previous.conversation(limit_bytes, image_chars, whole=whole)
        given = body.input
        if settings.skip_unsupported_content and isinstance(given, list):
            given = with_notes(given)
        references = ItemReferences(self._store, self._key, limit_bytes, image_chars)
        self._new_items = resolve_input(given, references.find, self._seal.unseal)
        self._input_json = msgspec.json.encode(self._new_items)
        self._may_truncate = body.truncation == "auto"
        items = [*earlier_items, *self._new_items]
        if items[-1].type == "compaction_trigger":
            self._compacts = True
            del items[-1]
        if any(item.type == "compaction_trigger" for item in items):
            raise InvalidRequest("'compaction_trigger' must be the last item.", param="input")
        num_earlier = len(earlier_items)
        items = self._capsule.expanded(items, num_earlier)
        num_earlier = max(0, len(items) - len(self._new_items) + self._compacts)
        self._tools = known_tools(client_tools(body.tools or ()), items, num_earlier)
        request = chat_request(body, items, self._tools, num_earlier)
        managed = body.context_management or ()
        limits = [each.compact_threshold for each in managed if each.compact_threshold]
        self._threshold = min(limits, default=None)
        self._conversation = request.messages
        return summary_request(request) if self._compacts else request

    def max_tokens(self, request: ChatRequest, model: Model) -> int:
        """Return the limit on the answer's tokens. Without one, OpenAI's answers end where the
        model ends them. Agents set none, and an answer that is cut off inside a tool call is
        useless to them."""
        if isinstance(request, SummaryRequest):
            return max(1, min(MAX_SUMMARY_TOKENS, model.hello.context_length // CONTEXT_SHARE))
        settings = model.settings
        unlimited = min(_UNLIMITED_TOKENS, settings.max_generation_tokens)
        return super().max_tokens(request, model) or settings.default_max_tokens or unlimited

    def stored_bytes(self, body: ResponsesRequest, tenant: Tenant) -> int:
        names = self._router.model_names
        wanted = names.wanted(body.model, tenant) or ""
        model_id = next((own for own, known in names.all.items() if wanted in known), wanted)
        self._capsule = Capsule(self._seal, (self._key, model_id))
        previous_id = body.previous_response_id
        if previous_id is not None:
            self._previous = self._store.find(self._key, previous_id, "previous_response_id")
        refers = not isinstance(body.input, str) and any(
            item.role is None and item.content is None for item in body.input
        )
        chain_bytes = 0 if self._previous is None else self._previous.chain_bytes
        return max(chain_bytes, self._store.size_bytes if refers else 0)

    def writer(self, body: ResponsesRequest, model: str) -> ResponseWriter:
        def store(response_id: str, response: bytes) -> None:
            # Responses of a batch would fill the store, and no client continues them.
            if body.store is not False and not self._in_background:
                stored = StoredResponse(self._key, self._previous, self._input_json, response)
                self._store.put(response_id, stored)

        builder = None
        if self._compacts:
            builder = CompactionBuilder(self._capsule, extract(self._conversation))
        kind = self.writer_type
        self._writer = kind(body, model, self._tools, store, self._seal.seal, builder)
        return self._writer

    async def _submit(
        self, generation: Generation, request: ChatRequest, size: int, state: State
    ) -> None:
        if self._threshold is not None or isinstance(request, SummaryRequest):
            request, size = await self.prepare_images(request, generation, size, state)
            request = await self._shortened(request, generation, size, state)
        await super()._submit(generation, request, size, state)

    async def _shortened(
        self, request: ChatRequest, generation: Generation, size: int, state: State
    ) -> ChatRequest:
        """Return ``request`` with a conversation that fits. Raises what a part of it raises."""
        part = partial(self._part, generation, size, state)
        if isinstance(request, SummaryRequest):
            return await self._with_parts(request, part, generation, size)
        assert self._threshold is not None
        if await self._fits(request, self._threshold, generation, size):
            return request
        begin, end = num_system(request.messages), last_turn(request.messages)
        old = request.messages[begin:end]
        if all(message.role == "user" for message in old):
            return request  # there is nothing that a summary could replace
        whole = summary_request(replace(request, messages=request.messages[:end]))
        whole = await self._with_parts(whole, part, generation, size)
        summary = await part(whole) or extract(old)
        self._writer.add(self._capsule.close(summary))
        system = [*request.messages[:begin], *(each for each in old if each.role == "user")]
        return replace(request, messages=with_summary(system, summary, request.messages[end:]))

    async def _with_parts(
        self,
        request: SummaryRequest,
        part: Callable[[SummaryRequest], Awaitable[str]],
        generation: Generation,
        size: int,
    ) -> SummaryRequest:
        """Return ``request`` with the first parts of its conversation summarized, until the rest
        fits in the context."""
        model = generation.model
        room = model.hello.context_length - self.max_tokens(request, model)
        room = min(room, model.max_prompt_tokens)
        *messages, task = request.messages
        begin = num_system(messages)
        system, rest, summary = messages[:begin], messages[begin:], ""
        num_parts = 0
        while True:
            known = with_summary(system, summary, []) if summary else system
            whole = replace(request, messages=[*known, *rest, task])
            if not rest or await self._fits(whole, room, generation, size):
                return whole
            if num_parts == _MAX_PARTS:
                summary, rest = f"{summary}\n\n{extract(rest)}", []
                continue
            chars = _CHARS_PER_TOKEN * room
            while True:
                first, later = divided(rest, chars)
                shorter = replace(request, messages=[*known, *first, task])
                if await self._fits(shorter, room, generation, size):
                    break
                chars //= 2
                if chars < _LEAST_CHARS:  # the system's messages or the tools are too long alone
                    return whole
            summary, rest = await part(shorter) or extract(first), later
            num_parts += 1

    async def _fits(
        self, request: ChatRequest, limit: int, generation: Generation, size: int
    ) -> bool:
        def check_length(num_tokens: int) -> None:
            if num_tokens > limit:
                raise ContextLengthExceeded("too long")

        model, scope = generation.model, generation.cache_scope

        def tokenize() -> None:
            render = ChatEndpoint.tokenize_prompts
            for prompt in render(self, request, model, scope, check_length):
                check_length(len(prompt.token_ids))

        try:
            await generation.run(tokenize, size)
        except ContextLengthExceeded:
            return False
        return True

    async def _part(
        self, generation: Generation, size: int, state: State, request: SummaryRequest
    ) -> str:
        """Return the summary that ``request`` asks for, while ``generation`` waits."""

        async def run() -> str:
            name = f"{generation.request_id}.{uuid.uuid4().hex[:8]}"
            inner = Generation(self._router, generation.model, request, name, state.tenant)
            with inner:
                await super(_CreateResponse, self)._submit(inner, request, size, state)
                await inner.accepted()
                (choice,), text = inner.choices, ""
                while True:
                    text += (await inner.advance(choice)).text
                    if inner.finished:
                        return text.strip()
                    await inner.changed()

        return await generation.wait_for(run())

    def tokenize_prompts(
        self,
        request: ChatRequest,
        model: Model,
        cache_scope: str | None = None,
        check_length: LengthCheck | None = None,
    ) -> list[Prompt]:
        if not self._may_truncate:
            return super().tokenize_prompts(request, model, cache_scope, check_length)
        prompts = super().tokenize_prompts(request, model, cache_scope)
        context = model.hello.context_length
        # Reserve the tokens that the answer may have, but at most half of the context.
        max_tokens = min(self.max_tokens(request, model), context // 2)
        limit = min(context - max_tokens, model.max_prompt_tokens)
        render = super().tokenize_prompts
        return truncate_to_fit(
            prompts, request, limit, lambda shorter: render(shorter, model, cache_scope)
        )


class _Compact(_CreateResponse):
    """Compacts one conversation."""

    body_type = CompactRequest
    response_type = CompactedResponse
    example: ClassVar = {"input": "Say hello."}
    writer_type = CompactedWriter

    def translate(self, body: ResponsesRequest) -> ChatRequest:
        request = super().translate(body)
        self._compacts = True
        return request if isinstance(request, SummaryRequest) else summary_request(request)

    def writer(self, body: ResponsesRequest, model: str) -> ResponseWriter:
        writer = super().writer(body, model)
        assert isinstance(writer, CompactedWriter)
        writer.kept = [item for item in self._new_items if item.role == "user"]
        return writer


class Responses:
    """The handlers, and the store that they share."""

    def __init__(self, router: Router) -> None:
        """Raises `ArchiveError`."""
        self._router = router
        directory = router.settings.response_store_dir
        archive = None if directory is None else ResponseArchive(directory.expanduser())
        self._store = ResponseStore(router.settings.response_store_mb * _MB, archive=archive)
        router.closers.append(self._store.close)
        self._seal = ReasoningSeal(router.settings.reasoning_key)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        tenant = scope["state"]["tenant"]
        create = _CreateResponse(
            self._router, self._store, self._seal, tenant.name, in_background=tenant.background
        )
        await create(scope, receive, send)

    async def compact(self, scope: Scope, receive: Receive, send: Send) -> None:
        tenant = scope["state"]["tenant"]
        await _Compact(self._router, self._store, self._seal, tenant.name)(scope, receive, send)

    async def retrieve(self, request: Request) -> Response:
        if request.query_params.get("stream", "false") != "false":
            raise NotSupported("Stored responses cannot be streamed.", param="stream")
        return Response(self._find(request).response, media_type="application/json")

    async def delete(self, request: Request) -> Response:
        response_id = request.path_params["response_id"]
        self._store.delete(request.state.api_key, response_id)
        return json_response(DeletedResponse(id=response_id))

    async def cancel(self, request: Request) -> Response:
        self._find(request)
        raise InvalidRequest(
            "Only background responses can be cancelled, and this is not one. To stop a running "
            "response, close its connection."
        )

    async def list_input_items(self, request: Request) -> Response:
        limit, is_newest_first = page_limit(request, 20, _MAX_PAGE_ITEMS), newest_first(request)
        stored, after = self._find(request), request.query_params.get("after")

        def page() -> Response:
            items, has_more = stored.input_page(after, limit, newest_first=is_newest_first)
            first_id, last_id = (items[0]["id"], items[-1]["id"]) if items else (None, None)
            return json_response(
                ItemList(data=items, first_id=first_id, last_id=last_id, has_more=has_more)
            )

        share: str = request.state.tenant.share
        return await self._router.work.run(share, page, stored.chain_bytes)

    def _find(self, request: Request) -> StoredResponse:
        return self._store.find(request.state.api_key, request.path_params["response_id"])
