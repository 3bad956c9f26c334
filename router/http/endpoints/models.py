"""`/v1/models`: a list that clients of OpenAI and Anthropic can read."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Annotated, Literal

from msgspec import Meta, Struct
from msgspec.structs import replace
from starlette.requests import Request
from starlette.responses import Response

from router.api.body import json_response
from router.api.operations import Operation
from router.errors import ModelForbidden, ModelNotFound
from router.fleet.adapters import ListedAdapter
from router.fleet.engines.engine import ModelReplicas
from router.fleet.models.supervised import ConfiguredState
from router.fleet.router import Router
from router.fleet.tenants.tenant import Tenant


class ModelCard(Struct, frozen=True, kw_only=True):
    """One name of a model."""

    id: str
    object: Literal["model"] = "model"
    created: int
    owned_by: Literal["mlx-lm-server"] = "mlx-lm-server"
    root: Annotated[str, Meta(description="The name that the model was loaded by.")]
    parent: Annotated[str | None, Meta(description="The model that an adapter is added to.")] = None
    max_model_len: Annotated[
        int | None,
        Meta(
            description="The context, in tokens; null until the model is loaded for the first time."
        ),
    ]
    context_length: Annotated[int | None, Meta(description="Same as `max_model_len`.")]
    max_prompt_tokens: Annotated[int | None, Meta(description="Max length of a prompt.")]
    capabilities: list[str]
    kv_bits: Annotated[int | None, Meta(description="16: the KV cache has the model's own type.")]
    draft_saved_s: Annotated[
        float | None,
        Meta(
            description="Seconds of decode time that drafts have saved since the engines "
            "started; null without speculation."
        ),
    ]
    replicas: Annotated[int, Meta(description="Engines that serve the model.")]
    ready_replicas: Annotated[int, Meta(description="Engines that accept requests now.")]
    state: Annotated[
        ConfiguredState,
        Meta(description="An unloaded model is loaded on demand; a broken one failed to load."),
    ]
    # Anthropic's clients read these.
    type: Literal["model"] = "model"
    display_name: str
    description: str
    created_at: str


class DecisionModel(Struct, frozen=True, kw_only=True):
    """A model that answers typed questions, as TypeSafe's clients read it."""

    name: str
    description: str
    release_date: Annotated[str, Meta(description="The day on which it was first served here.")]


class ModelList(Struct, frozen=True, kw_only=True):
    """All models; there are no further pages."""

    object: Literal["list"] = "list"
    data: list[ModelCard]
    models: Annotated[
        list[DecisionModel], Meta(description="Those of `data` that answer typed questions.")
    ]
    has_more: bool = False
    first_id: str | None
    last_id: str | None


async def list_models(http: Request) -> Response:
    router: Router = http.app.state.router
    tenant: Tenant = http.state.tenant
    data = [
        _card(router, model_id, name, names)
        for model_id, names in router.model_names.all.items()
        if tenant.may_use(names)
        for name in names
    ]
    adapters = router.adapters.listed
    data += [_adapter_card(router, each) for each in adapters if tenant.may_use(each.names)]
    first_id, last_id = (data[0].id, data[-1].id) if data else (None, None)
    models = [
        DecisionModel(name=card.id, description=card.description, release_date=card.created_at[:10])
        for card in data
        if "chat" in card.capabilities
    ]
    return json_response(ModelList(data=data, models=models, first_id=first_id, last_id=last_id))


async def show_model(http: Request) -> Response:
    router: Router = http.app.state.router
    name = router.model_names.served(http.path_params["model"])
    for model_id, names in router.model_names.all.items():
        if name in names:
            if not http.state.tenant.may_use(names):
                raise ModelForbidden(f"This API key may not use {name}.", param="model")
            return json_response(_card(router, model_id, name, names))
    if (found := router.adapters.find_listed(name, http.state.tenant.may_use)) is not None:
        if not http.state.tenant.may_use(found.names):
            raise ModelForbidden(f"The API key may not use {name}.", param="model")
        return json_response(_adapter_card(router, found))
    raise ModelNotFound(f"The model '{name}' is not served here.", param="model")


def _adapter_card(router: Router, found: ListedAdapter) -> ModelCard:
    card = _card(router, found.model_id, found.name, found.model_names)
    return replace(card, root=found.own_name, parent=found.model_id)


def _card(router: Router, model_id: str, name: str, names: list[str]) -> ModelCard:
    model = router.registry.models.get(model_id)
    configured = router.supervised.models.get(model_id)
    hello = None if model is None else model.hello
    ready = 0 if model is None else len(model.ready_engines)
    created = router.started if model is None else model.created
    capabilities = [] if model is None else model.capabilities
    settings = router.settings if model is None else model.settings
    context = None if hello is None else hello.context_length
    limits = [each for each in (settings.max_prompt_tokens, context and context - 1) if each]
    return ModelCard(
        id=name,
        created=created,
        root=model_id,
        max_model_len=context,
        context_length=context,
        max_prompt_tokens=min(limits, default=None),
        capabilities=[*capabilities, *(hello.capabilities if hello else ())],
        kv_bits=None if hello is None else hello.kv_bits,
        draft_saved_s=None if model is None else _saved_s(model),
        replicas=0 if model is None else len(model.engines),
        ready_replicas=ready,
        state="ready" if ready else configured.state if configured else "loading",
        display_name=name,
        description=f"{model_id} on this server",
        created_at=datetime.fromtimestamp(created, UTC).isoformat(),
    )


def _saved_s(model: ModelReplicas) -> float | None:
    """Return the time saved by drafts; None if no engine of ``model`` speculates."""
    drafts = [each.stats.drafts for each in model.engines if each.stats.drafts is not None]
    if not drafts:
        return None
    return round(sum(c.saved_s for stats in drafts for c in stats.sources.values()), 1)


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
