"""The web application: which path leads where, as a table of operations."""

from __future__ import annotations

import msgspec
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response

from router.anthropic.endpoints import CountTokens, Messages
from router.anthropic.schemas import CountTokensRequest, TokenCount
from router.api.operations import BODY_ERRORS, MODEL_ERRORS, Operation, generation_operation, routes
from router.errors import ModelNotFound
from router.fleet.router import Router
from router.http import openapi
from router.http.docs import show_docs
from router.http.health import Health, Liveness, Readiness, health_report, unready_reasons
from router.http.middleware import ApiKeys, RequestMiddleware, http_exception_handler
from router.http.models import ModelCard, ModelList, all_models, one_model
from router.http.tokenize import (
    DetokenizeRequest,
    DetokenizeResponse,
    TokenizeRequest,
    TokenizeResponse,
    detokenize,
    tokenize,
)
from router.http.unsupported import unsupported_routes
from router.openai.endpoints import ChatCompletions, Completions
from router.responses.endpoints import Responses


class Version(msgspec.Struct, frozen=True):
    version: str


def operations(router: Router) -> list[Operation]:
    """Everything that is served. The routes and `/openapi.json` are made of it."""
    return [
        generation_operation(
            "/v1/chat/completions", ChatCompletions(router), "Answer a conversation", "OpenAI"
        ),
        generation_operation("/v1/completions", Completions(router), "Go on with a text", "OpenAI"),
        *Responses(router).operations,
        Operation(
            path="/v1/models",
            endpoint=list_models,
            summary="The models that are served",
            tag="OpenAI",
            response_type=ModelList,
        ),
        Operation(
            path="/v1/models/{model:path}",
            endpoint=show_model,
            summary="One of them",
            tag="OpenAI",
            response_type=ModelCard,
            errors=(ModelNotFound,),
        ),
        generation_operation(
            "/v1/messages", Messages(router), "Answer a conversation", "Anthropic"
        ),
        Operation(
            path="/v1/messages/count_tokens",
            endpoint=CountTokens(router),
            summary="How many tokens a conversation has",
            tag="Anthropic",
            method="POST",
            body_type=CountTokensRequest,
            example={"messages": [{"role": "user", "content": "Say hello."}]},
            response_type=TokenCount,
            errors=(*BODY_ERRORS, *MODEL_ERRORS),
            error_type=Messages.error_type,
        ),
        Operation(
            path="/tokenize",
            endpoint=tokenize,
            summary="The token ids of a text or a conversation",
            tag="Tokens",
            method="POST",
            body_type=TokenizeRequest,
            example={"prompt": "Hello", "return_token_strs": True},
            response_type=TokenizeResponse,
            errors=(*BODY_ERRORS, *MODEL_ERRORS),
        ),
        Operation(
            path="/detokenize",
            endpoint=detokenize,
            summary="The text of token ids",
            tag="Tokens",
            method="POST",
            body_type=DetokenizeRequest,
            example={"tokens": [1, 2, 3]},
            response_type=DetokenizeResponse,
            errors=(*BODY_ERRORS, *MODEL_ERRORS),
        ),
        Operation(
            path="/health",
            endpoint=show_health,
            summary="How the server is, by model and engine",
            tag="Server",
            access="open",
            response_type=Health,
            statuses=(200, 503),
        ),
        Operation(
            path="/livez",
            endpoint=show_livez,
            summary="Whether the process runs",
            tag="Server",
            access="open",
            response_type=Liveness,
        ),
        Operation(
            path="/readyz",
            endpoint=show_readyz,
            summary="Whether every model can answer",
            tag="Server",
            access="open",
            response_type=Readiness,
            statuses=(200, 503),
        ),
        Operation(
            path="/metrics",
            endpoint=show_metrics,
            summary="Metrics for Prometheus",
            tag="Server",
            access="metrics key",
            media_type="text/plain",
        ),
        Operation(
            path="/version",
            endpoint=show_version,
            summary="The server's version",
            tag="Server",
            access="open",
            response_type=Version,
        ),
        Operation(
            path="/openapi.json",
            endpoint=show_openapi,
            summary="This description",
            tag="Server",
            access="open",
            response_type=dict,
        ),
        Operation(
            path="/docs",
            endpoint=show_docs,
            summary="A page to read and try this description",
            tag="Server",
            access="open",
            media_type="text/html",
        ),
    ]


def create_app(router: Router, keys: ApiKeys) -> Starlette:
    """The application of ``router``, whose start and stop are its owner's."""
    settings = router.settings
    table = operations(router)
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
            public_paths=frozenset(each.path for each in table if each.access == "open"),
            metrics=router.metrics,
        )
    )
    app = Starlette(
        routes=[*routes(table), *unsupported_routes()],
        middleware=middleware,
        exception_handlers={HTTPException: http_exception_handler},
    )
    app.router.redirect_slashes = False
    app.state.router = router
    app.state.openapi = openapi.document(
        table,
        version=router.version,
        server_url=settings.root_path.rstrip("/") or "/",
        keys_needed=bool(keys),
        metrics_key_needed=settings.metrics_key is not None,
    )
    return app


async def list_models(request: Request) -> Response:
    return _json(all_models(_router(request).registry))


async def show_model(request: Request) -> Response:
    return _json(one_model(_router(request).registry, request.path_params["model"]))


async def show_health(request: Request) -> Response:
    status, body = health_report(_router(request))
    return _json(body, status)


async def show_livez(request: Request) -> Response:
    return _json(Liveness())


async def show_readyz(request: Request) -> Response:
    reasons = unready_reasons(_router(request))
    status = 503 if reasons else 200
    return _json(Readiness("not ready" if reasons else "ready", reasons), status)


async def show_metrics(request: Request) -> Response:
    return PlainTextResponse(
        _router(request).metrics.exposition(),
        media_type="text/plain; version=0.0.4; charset=utf-8",
    )


async def show_version(request: Request) -> Response:
    return _json(Version(_router(request).version))


async def show_openapi(request: Request) -> Response:
    return Response(request.app.state.openapi, media_type="application/json")


def _router(request: Request) -> Router:
    router: Router = request.app.state.router
    return router


def _json(body: msgspec.Struct, status: int = 200) -> Response:
    return Response(msgspec.json.encode(body), status, media_type="application/json")
