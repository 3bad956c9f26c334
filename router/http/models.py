"""`/v1/models`: a list that clients of OpenAI and of Anthropic can read."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Annotated, Literal

from msgspec import Meta, Struct
from starlette.requests import Request
from starlette.responses import Response

from router.api.body import json_response
from router.api.operations import Operation
from router.errors import ModelForbidden, ModelNotFound
from router.fleet.engines import ModelReplicas
from router.fleet.tenants import Tenant


class ModelCard(Struct, frozen=True, kw_only=True):
    """One name of a model."""

    id: str
    object: Literal["model"] = "model"
    created: int
    owned_by: Literal["mlx-lm-server"] = "mlx-lm-server"
    root: Annotated[str, Meta(description="The name that the model was loaded by.")]
    parent: None = None
    max_model_len: Annotated[int, Meta(description="The context, in tokens.")]
    context_length: Annotated[int, Meta(description="The same as `max_model_len`.")]
    capabilities: list[str]
    kv_bits: Annotated[int, Meta(description="16 for a KV cache in the model's own type.")]
    replicas: Annotated[int, Meta(description="Engines that serve the model.")]
    ready_replicas: Annotated[int, Meta(description="Engines that take requests now.")]
    # Anthropic's clients read these.
    type: Literal["model"] = "model"
    display_name: str
    created_at: str


class ModelList(Struct, frozen=True, kw_only=True):
    """All models; there are no further pages."""

    object: Literal["list"] = "list"
    data: list[ModelCard]
    has_more: bool = False
    first_id: str | None
    last_id: str | None


async def list_models(http: Request) -> Response:
    models = http.app.state.router.registry.models.values()
    tenant: Tenant = http.state.tenant
    usable = [model for model in models if tenant.may_use(model.names)]
    data = [_card(model, name) for model in usable for name in model.names]
    first_id, last_id = (data[0].id, data[-1].id) if data else (None, None)
    return json_response(ModelList(data=data, first_id=first_id, last_id=last_id))


async def show_model(http: Request) -> Response:
    name = http.path_params["model"]
    model = http.app.state.router.registry.find_model(name)
    if model is None:
        raise ModelNotFound(f"The model '{name}' is not served here.", param="model")
    if not http.state.tenant.may_use(model.names):
        raise ModelForbidden(f"The API key may not use {name}.", param="model")
    return json_response(_card(model, name))


def _card(model: ModelReplicas, name: str) -> ModelCard:
    hello = model.hello
    capabilities = model.renderer.capabilities if model.renderer else ()
    return ModelCard(
        id=name,
        created=model.created,
        root=model.id,
        max_model_len=hello.context_length,
        context_length=hello.context_length,
        capabilities=[*capabilities, *hello.capabilities],
        kv_bits=hello.kv_bits,
        replicas=len(model.engines),
        ready_replicas=len(model.ready_engines),
        display_name=name,
        created_at=datetime.fromtimestamp(model.created, UTC).isoformat(),
    )


OPERATIONS = (
    Operation("/v1/models", list_models, "List the models", "OpenAI", response_type=ModelList),
    Operation(
        "/v1/models/{model:path}",
        show_model,
        "Show one model",
        "OpenAI",
        response_type=ModelCard,
        errors=(ModelForbidden, ModelNotFound),
    ),
)
