"""`keep_alive`: how long a model stays loaded without a request.

One client's value affects all clients, so it only takes effect with ``--ollama-manage``.
"""

from __future__ import annotations

import math

from starlette.requests import Request

from router.api.endpoints import loaded_model
from router.errors import EndpointNotSupported, InvalidRequest, ManagementForbidden, ModelForbidden
from router.fleet.router import Router
from router.fleet.tenants.tenant import Tenant
from router.ollama.objects import DoneReason
from router.ollama.schemas import OllamaModelUse, OllamaRequest


async def load_or_unload(
    router: Router, body: OllamaRequest, name: str, http: Request
) -> DoneReason:
    """Load the model served as ``name``, or unload it if ``body`` requests that. Return which.

    Raises `ApiError` and `ClientDisconnected`.
    """
    if body.keep_s == 0:
        _unload(router, name, http)
        return "unload"
    await loaded_model(router, name, http)
    keep(router, body, name, http.state.tenant)
    return "load"


def keep(router: Router, body: OllamaModelUse, name: str, tenant: Tenant) -> None:
    """Keep the model served as ``name`` loaded for as long as ``body``, which has been answered,
    requests, or as configured. A ``tenant`` that may not use the model has no effect."""
    model = router.adapters.find_configured(name, tenant.may_use)
    if router.settings.ollama_manage and model is not None and tenant.may_use(model.names):
        router.supervised.keep(model, body.keep_s)


def _unload(router: Router, name: str, http: Request) -> None:
    if not router.settings.ollama_manage:
        raise ManagementForbidden(
            "A 'keep_alive' of 0 unloads a model only with --ollama-manage.",
            param="keep_alive",
        )
    model = router.supervised.find(name)
    if model is None and router.adapters.find_listed(name, http.state.tenant.may_use):
        raise InvalidRequest(f"{name} is an adapter: unload its model.", param="model")
    if model is None:
        router.model_for(name, http.state.tenant)  # raises if there is no such model
        raise EndpointNotSupported(
            f"This server does not manage the engines of {name} and cannot unload them."
        )
    if not http.state.tenant.may_use(model.names):
        raise ModelForbidden(f"This API key may not use {name}.", param="model")
    if model.pinned:
        raise InvalidRequest(f"{name} is pinned and stays loaded.", param="keep_alive")
    router.supervised.keep(model, 0.0)


def seconds_left(router: Router, name: str) -> float:
    """Return the seconds without a request until a model is unloaded; infinity: never."""
    model = router.supervised.find(name)
    if model is None or model.pinned:
        return math.inf
    limit_s = model.idle_unload_s or math.inf
    if model.kept_s is not None:
        limit_s = model.kept_s if model.kept_s >= 0 else math.inf
    return max(0.0, limit_s - router.supervised.idle_s(model))
