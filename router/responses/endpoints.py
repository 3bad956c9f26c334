"""`/v1/responses`, and the responses stored there."""

from __future__ import annotations

from typing import Any, ClassVar

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from router.api.body import json_response
from router.api.endpoints import ChatEndpoint
from router.api.operations import Operation, generation_operation
from router.errors import InvalidRequest, NotFound, NotSupported
from router.fleet.engines import Model
from router.fleet.router import Router
from router.responses.objects import DeletedResponse, ItemList, ResponseObject, ResponseStreamEvent
from router.responses.schemas import InputItem, ResponsesRequest
from router.responses.store import ResponseStore, StoredResponse
from router.responses.translation import chat_request, resolve_input
from router.responses.truncation import truncate_to_fit
from router.responses.writer import ResponseWriter
from router.schemas.requests import ChatRequest

_MB = 1_000_000
_MAX_PAGE_ITEMS = 100
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
            summary="Refused: no response runs in the background",
            tag=_TAG,
            method="POST",
            statuses=(),
            errors=(InvalidRequest, NotFound),
        ),
        Operation(
            path=_PATH + "/input_items",
            endpoint=responses.list_input_items,
            summary="List the conversation that a stored response answers",
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
    """Answers one request of the API key ``key``."""

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

    def __init__(self, router: Router, store: ResponseStore, key: str) -> None:
        super().__init__(router)
        self._store = store
        self._key = key
        self._previous: StoredResponse | None = None
        self._new_items: list[InputItem] = []
        self._may_truncate = False

    def translate(self, body: ResponsesRequest) -> ChatRequest:
        store, key, previous_id = self._store, self._key, body.previous_response_id
        earlier_items: list[InputItem] = []
        if previous_id is not None:
            self._previous = store.find(key, previous_id, "previous_response_id")
            earlier_items = self._previous.conversation()
        self._new_items = resolve_input(body.input, lambda item_id: store.item(key, item_id))
        self._may_truncate = body.truncation == "auto"
        return chat_request(body, [*earlier_items, *self._new_items])

    def writer(self, body: ResponsesRequest, model: Model) -> ResponseWriter:
        def store(response_id: str, response: bytes) -> None:
            if body.store is not False:
                items = msgspec.json.encode(self._new_items)
                stored = StoredResponse(self._key, self._previous, items, response)
                self._store.put(response_id, stored)

        return ResponseWriter(body, model, store)

    async def tokenize_prompts(
        self, request: ChatRequest, model: Model, cache_scope: str | None = None
    ) -> list[list[int]]:
        prompts = await super().tokenize_prompts(request, model, cache_scope)
        if not self._may_truncate:
            return prompts
        settings, context = self._router.settings, model.hello.context_length
        # The answer gets the tokens it may have, but at most half of the context.
        max_tokens = self.max_tokens(request) or settings.default_max_tokens
        limit = min(context - min(max_tokens, context // 2), settings.max_prompt_tokens)
        render = super().tokenize_prompts
        return await truncate_to_fit(
            prompts, request, limit, lambda shorter: render(shorter, model, cache_scope)
        )


class Responses:
    """The handlers, and the store that they share."""

    def __init__(self, router: Router) -> None:
        self._router = router
        self._store = ResponseStore(router.settings.response_store_mb * _MB)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        key = scope["state"].get("api_key", "")
        await _CreateResponse(self._router, self._store, key)(scope, receive, send)

    async def retrieve(self, request: Request) -> Response:
        if request.query_params.get("stream", "false") != "false":
            raise NotSupported("A stored response cannot be streamed.", param="stream")
        return Response(self._find(request).response, media_type="application/json")

    async def delete(self, request: Request) -> Response:
        response_id = request.path_params["response_id"]
        self._store.delete(request.state.api_key, response_id)
        return json_response(DeletedResponse(id=response_id))

    async def cancel(self, request: Request) -> Response:
        self._find(request)
        raise InvalidRequest(
            "Only responses that run in the background can be cancelled, and this one did not."
            " To end a running response, close its connection."
        )

    async def list_input_items(self, request: Request) -> Response:
        items: list[Any] = [msgspec.json.decode(item) for item in self._find(request).full_input()]
        query = request.query_params
        order, limit = query.get("order", "desc"), query.get("limit", "20")
        if order not in ("asc", "desc"):
            raise InvalidRequest("'order' must be 'asc' or 'desc'.", param="order")
        if order == "desc":
            items.reverse()
        if (after := query.get("after")) is not None:
            ids = [item["id"] for item in items]
            if after not in ids:
                raise InvalidRequest(f"There is no item '{after}' here.", param="after")
            items = items[ids.index(after) + 1 :]
        if not limit.isdecimal() or not 1 <= int(limit) <= _MAX_PAGE_ITEMS:
            raise InvalidRequest(f"'limit' must be 1 to {_MAX_PAGE_ITEMS}.", param="limit")
        page = items[: int(limit)]
        return json_response(
            ItemList(
                data=page,
                first_id=page[0]["id"] if page else None,
                last_id=page[-1]["id"] if page else None,
                has_more=len(page) < len(items),
            )
        )

    def _find(self, request: Request) -> StoredResponse:
        return self._store.find(request.state.api_key, request.path_params["response_id"])
