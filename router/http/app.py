"""The web application: the table of operations and the middleware around them."""

from __future__ import annotations

from functools import cache, partial
from typing import cast

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp

import router.anthropic.endpoints as anthropic
import router.batches.endpoints as batches
import router.decisions.endpoints as decisions
import router.llama_cpp.endpoints as llama_cpp
import router.ollama.endpoints as ollama
import router.openai.embeddings as embeddings
import router.openai.endpoints as openai
import router.responses.endpoints as responses
from router.api.operations import Access, Operation, routes
from router.fleet.router import Router
from router.http.endpoints import (
    adapters,
    admin,
    docs,
    health,
    models,
    openapi,
    rerank,
    speculation,
    tokenize,
)
from router.http.endpoints.unsupported import unsupported_routes
from router.http.middleware.api_keys import ApiKeys
from router.http.middleware.error_responses import http_exception_handler
from router.http.middleware.request import RequestMiddleware
from router.http.status import page
from shared.tracing import Tracing


def operations(router: Router, keys: ApiKeys) -> list[Operation]:
    """Return everything that is served. The routes and `/openapi.json` are made from it."""
    administration = *admin.OPERATIONS, *adapters.OPERATIONS
    answering = [
        *openai.operations(router),
        *embeddings.operations(router),
        *responses.operations(router),
    ]
    return [
        *answering,
        *_batch_operations(router, answering, keys),
        *rerank.OPERATIONS,
        *decisions.OPERATIONS,
        *models.OPERATIONS,
        *anthropic.operations(router),
        *ollama.operations(router),
        *llama_cpp.operations(router),
        *tokenize.OPERATIONS,
        *health.OPERATIONS,
        *speculation.OPERATIONS,
        *(administration if router.settings.admin_key is not None else ()),
        *([] if router.settings.no_page else page.operations(router)),
        *docs.OPERATIONS,
    ]


def create_app(router: Router, keys: ApiKeys, tracing: Tracing | None = None) -> Starlette:
    """Return the application of ``router``. The caller starts and stops ``router``."""
    settings = router.settings
    table = operations(router, keys)
    middleware = []
    if settings.cors_origin:
        middleware.append(
            Middleware(
                CORSMiddleware,
                allow_origins=list(settings.cors_origin),
                allow_methods=["*"],
                allow_headers=["*"],
                expose_headers=["x-request-id", "x-seed", "x-debug-cache", "retry-after"],
            )
        )
    middleware.append(
        Middleware(
            RequestMiddleware,
            settings=settings,
            keys=keys,
            metric_paths=frozenset(operation.path for operation in table),
            public_paths=_paths(table, "open") | page.PATHS,
            metrics_key_paths=_paths(table, "metrics key"),
            admin_key_paths=_paths(table, "admin key"),
            metrics=router.metrics,
            loop_lag=router.loop_lag,
            tracing=tracing,
        )
    )
    app = Starlette(
        routes=[*routes(table), *unsupported_routes(batches=settings.batch_dir is not None)],
        middleware=middleware,
        exception_handlers={HTTPException: http_exception_handler},
    )
    app.router.redirect_slashes = False
    app.state.router = router
    app.state.keys = keys
    make_document = partial(  # takes a tenth of a second, and is rarely needed
        openapi.document,
        table,
        version=router.version,
        server_url=settings.root_path.rstrip("/") or "/",
        keys_needed=bool(keys),
        metrics_key_needed=settings.metrics_key is not None,
    )
    app.state.openapi = cache(make_document)
    return app


def _batch_operations(router: Router, answering: list[Operation], keys: ApiKeys) -> list[Operation]:
    """Return the operations of files and batches, whose lines are processed like requests of
    ``answering``."""
    if router.settings.batch_dir is None:
        return []
    endpoints = {
        each.path: cast(ASGIApp, each.endpoint) for each in answering if each.path in batches.PATHS
    }
    return batches.Batches(router, endpoints, keys.named).operations


def _paths(table: list[Operation], access: Access) -> frozenset[str]:
    return frozenset(each.path for each in table if each.access == access)
