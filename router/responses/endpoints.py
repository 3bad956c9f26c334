"""`/v1/responses` and its stored responses."""

from __future__ import annotations

from typing import ClassVar

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from router.api.body import json_response
from router.api.endpoints import ChatEndpoint
from router.api.operations import Operation, generation_operation
from router.api.pages import newest_first, page_limit
from router.api.truncation import truncate_to_fit
from router.errors import InvalidRequest, NotFound, NotSupported
from router.fleet.engines.engine import Model
from router.fleet.router import Router
from router.responses.archive import ResponseArchive
from router.responses.objects import DeletedResponse, ItemList, ResponseObject, ResponseStreamEvent
from router.responses.schemas import InputItem, ResponsesRequest
from router.responses.sealing import ReasoningSeal
from router.responses.store import ItemReferences, ResponseStore, StoredResponse
from router.responses.tools import ClientTool, client_tools
from router.responses.translation import chat_request, known_tools, resolve_input, with_notes
from router.responses.writer import ResponseWriter
from router.schemas.requests import ChatRequest
from router.tokens.image_prompts import Prompt
from router.tokens.tokenization_cache import LengthCheck

_MB = 1_000_000
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


class _CreateResponse(ChatEndpoint[ResponsesRequest]):
    """Answers one request made with the API key ``key``."""

    body_type = ResponsesRequest
    response_type = ResponseObject
    event_type = ResponseStreamEvent
    example: ClassVar = {"input": "Say hello.", "max_output_tokens": 32}
    prompt_field = "input"
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
        self._tools = known_tools(client_tools(body.tools or ()), items, len(earlier_items))
        return chat_request(body, items, self._tools, len(earlier_items))

    def max_tokens(self, request: ChatRequest, model: Model) -> int:
        """Return the limit on the answer's tokens. Without one, OpenAI's answers end where the
        model ends them. Agents set none, and an answer that is cut off inside a tool call is
        useless to them."""
        settings = model.settings
        unlimited = min(_UNLIMITED_TOKENS, settings.max_generation_tokens)
        return super().max_tokens(request, model) or settings.default_max_tokens or unlimited

    def stored_bytes(self, body: ResponsesRequest) -> int:
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

        return ResponseWriter(body, model, self._tools, store, self._seal.seal)

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

        key: str = request.state.api_key
        return await self._router.work.run(key, page, stored.chain_bytes)

    def _find(self, request: Request) -> StoredResponse:
        return self._store.find(request.state.api_key, request.path_params["response_id"])
