"""`/admin/adapters`: load and unload adapters while the server runs."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta, Struct
from starlette.requests import Request
from starlette.responses import Response

from router.api.body import json_response, read_body
from router.api.operations import Operation
from router.errors import BODY_ERRORS, ModelNotFound, Unavailable
from router.fleet.adapters import ServedAdapter
from router.fleet.router import Router
from router.schemas.body import RequestBody

_Name = Annotated[str, Meta(min_length=1, max_length=512)]


class AdapterDetails(Struct, frozen=True, kw_only=True):
    id: Annotated[
        str, Meta(description="Full name for requests: the model's name and the adapter's.")
    ]
    name: Annotated[str, Meta(description="Short name for requests, if only one model has it.")]
    model: str
    path: str
    rank: Annotated[int, Meta(description="The highest rank of its layers.")]
    digest: Annotated[str, Meta(description="Digest of the content, the same for all formats.")]


class AdapterList(Struct, frozen=True, kw_only=True):
    adapters: list[AdapterDetails]


class LoadAdapterRequest(RequestBody, frozen=True, kw_only=True):
    name: Annotated[_Name, Meta(description="Letters, digits and `._-`.")]
    path: Annotated[
        str, Meta(min_length=1, max_length=4096, description="A directory where the engines are.")
    ]
    model: Annotated[_Name, Meta(description="By default that of requests without one.")] | None = (
        None
    )


class UnloadAdapterRequest(RequestBody, frozen=True, kw_only=True):
    name: Annotated[_Name, Meta(description="With or without its model's.")]


async def list_adapters(http: Request) -> Response:
    router: Router = http.app.state.router
    found = [
        _details(ServedAdapter(model, adapter))
        for model in router.registry.models.values()
        for adapter in model.adapters.values()
    ]
    return json_response(AdapterList(adapters=found))


async def load_adapter(http: Request) -> Response:
    router: Router = http.app.state.router
    body, _ = await read_body(http, router, LoadAdapterRequest)
    found = await router.adapters.load(body.name, body.path, body.model)
    return _done(http, "adapter_loaded", found)


async def unload_adapter(http: Request) -> Response:
    router: Router = http.app.state.router
    body, _ = await read_body(http, router, UnloadAdapterRequest)
    return _done(http, "adapter_unloaded", router.adapters.unload(body.name))


def _done(http: Request, what: str, found: ServedAdapter) -> Response:
    """Return an answer, and put it into the access log, which is the audit log."""
    http.scope["state"]["audit"] = {"done": what, "name": found.listed.name}
    return json_response(_details(found))


def _details(found: ServedAdapter) -> AdapterDetails:
    adapter = found.adapter
    return AdapterDetails(
        id=found.listed.name,
        name=adapter.name,
        model=found.model.id,
        path=adapter.path,
        rank=adapter.rank,
        digest=adapter.digest,
    )


OPERATIONS = (
    Operation(
        "/admin/adapters",
        list_adapters,
        "The adapters that requests may name",
        "Administration",
        access="admin key",
        response_type=AdapterList,
    ),
    Operation(
        "/admin/adapters/load",
        load_adapter,
        "Add an adapter that requests may name",
        "Administration",
        method="POST",
        access="admin key",
        body_type=LoadAdapterRequest,
        example={"name": "polite", "path": "/adapters/polite"},
        response_type=AdapterDetails,
        errors=(*BODY_ERRORS, ModelNotFound, Unavailable),
    ),
    Operation(
        "/admin/adapters/unload",
        unload_adapter,
        "Remove an adapter's name; running requests continue",
        "Administration",
        method="POST",
        access="admin key",
        body_type=UnloadAdapterRequest,
        example={"name": "polite"},
        response_type=AdapterDetails,
        errors=(*BODY_ERRORS, ModelNotFound),
    ),
)
