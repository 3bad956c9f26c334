"""`/v1/models`: what is served, in the shapes of OpenAI's and Anthropic's lists at once."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Literal

from msgspec import Struct

from router.errors import ModelNotFound
from router.fleet.engines import Model, Registry


class ModelCard(Struct, frozen=True, kw_only=True):
    """A name that a model answers to. ``root`` is the name it was loaded by;
    ``max_model_len`` and ``context_length`` are the same, in tokens; ``kv_bits`` is 16 for a
    KV cache in the model's own type; ``replicas`` counts engines, ``ready_replicas`` those
    that take requests now. ``type``, ``display_name`` and ``created_at`` are what
    Anthropic's clients read."""

    id: str
    object: Literal["model"] = "model"
    created: int
    owned_by: Literal["mlx-lm-server"] = "mlx-lm-server"
    root: str
    parent: None = None
    max_model_len: int
    context_length: int
    capabilities: list[str]
    kv_bits: int
    replicas: int
    ready_replicas: int
    type: Literal["model"] = "model"
    display_name: str
    created_at: str


class ModelList(Struct, frozen=True, kw_only=True):
    """All of them; there are no further pages."""

    object: Literal["list"] = "list"
    data: list[ModelCard]
    has_more: bool = False
    first_id: str | None
    last_id: str | None


def all_models(registry: Registry) -> ModelList:
    data = [_card(model, name) for model in registry.models.values() for name in model.names]
    return ModelList(
        data=data,
        first_id=data[0].id if data else None,
        last_id=data[-1].id if data else None,
    )


def one_model(registry: Registry, name: str) -> ModelCard:
    """Raises `ModelNotFound`."""
    model = registry.find_model(name)
    if model is None:
        raise ModelNotFound(f"The model '{name}' is not served here.", param="model")
    return _card(model, name)


def _card(model: Model, name: str) -> ModelCard:
    hello = model.hello
    return ModelCard(
        id=name,
        created=model.created,
        root=model.id,
        max_model_len=hello.context_length,
        context_length=hello.context_length,
        capabilities=[
            *(model.renderer.capabilities if model.renderer else ()),
            *hello.capabilities,
        ],
        kv_bits=hello.kv_bits,
        replicas=len(model.engines),
        ready_replicas=len(model.ready_engines),
        display_name=name,
        created_at=datetime.fromtimestamp(model.created, UTC).isoformat(),
    )
