"""What models are for, and the refusal of one that is for something else."""

from __future__ import annotations

from collections.abc import Mapping

from router.errors import NotSupported
from router.fleet.engines.engine import Model
from router.fleet.router import Router
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


def check_task(model: Model, task: Task, router: Router) -> None:
    """Raise `NotSupported` if ``model`` is not for ``task``: the text says which model is."""
    if (own := model.hello.task) == task:
        return
    others = models_for(task, router)
    advice = (
        f"Here {' and '.join(others)} can"
        if others
        else (f"No model that can is loaded here; one such as {_EXAMPLES[task]} has to be")
    )
    raise NotSupported(
        f"The model '{model.names[0]}' {_DOES[own]} (it is for {_PATHS[own]}), and {_PATHS[task]}"
        f" needs one that {_DOES[task]}. {advice}.",
        param="model",
        code="wrong_task",
    )


def models_for(task: Task, router: Router) -> list[str]:
    """Return the names of the models that have joined for ``task``."""
    models = router.registry.models.values()
    return sorted(each.id for each in models if each.hello.task == task)
