"""The tasks of models, and the error for a model with the wrong task."""

from __future__ import annotations

from collections.abc import Mapping

from router.errors import InvalidRequest, NotSupported
from router.fleet.engines.engine import Model
from router.fleet.router import Router
from router.fleet.tenants.tenant import Tenant
from shared.wire import Task

_DOES: Mapping[Task, str] = {
    "generate": "generates text",
    "embed": "embeds texts",
    "rerank": "ranks texts",
}
_PATHS: Mapping[Task, str] = {
    "generate": "/v1/chat/completions",
    "embed": "/v1/embeddings",
    "rerank": "/v1/rerank",
}
_EXAMPLES: Mapping[Task, str] = {
    "generate": "mlx-community/Qwen3-4B-4bit",
    "embed": "Qwen/Qwen3-Embedding-0.6B",
    "rerank": "BAAI/bge-reranker-v2-m3",
}


def check_task(model: Model, task: Task, router: Router, tenant: Tenant) -> None:
    """Raise `NotSupported` if ``model`` does not perform ``task``; the message names models that
    do, of those that ``tenant`` may use."""
    if (own := model.hello.task) == task:
        return
    others = models_for(task, router, tenant)
    advice = f"Use {' or '.join(others)} instead." if others else _nothing_loaded(task)
    raise NotSupported(
        f"The model '{model.names[0]}' {_DOES[own]} (use {_PATHS[own]}), but {_PATHS[task]} "
        f"needs a model that {_DOES[task]}. {advice}",
        param="model",
        code="wrong_task",
    )


def default_model(task: Task, router: Router, tenant: Tenant) -> str:
    """Return the name of the first model that performs ``task`` and that ``tenant`` may use. Raises
    `InvalidRequest`."""
    if found := models_for(task, router, tenant):
        return found[0]
    message = f"'model' is required: {_PATHS[task]} needs a model that {_DOES[task]}."
    raise InvalidRequest(f"{message} {_nothing_loaded(task)}", param="model")


def models_for(task: Task, router: Router, tenant: Tenant) -> list[str]:
    """Return the names of the models that have joined for ``task`` and that ``tenant`` may use."""
    models = router.registry.models.values()
    usable = (each for each in models if tenant.may_use(each.names))
    return sorted(each.id for each in usable if each.hello.task == task)


def _nothing_loaded(task: Task) -> str:
    return f"No such model is loaded here; load one such as {_EXAMPLES[task]}."
