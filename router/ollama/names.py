"""Model names as Ollama writes them: ``model:tag``, where ``:latest`` may be omitted."""

from __future__ import annotations

from router.fleet.model_names import LATEST
from router.fleet.router import Router

_HUBS = ("hf.co/", "huggingface.co/")
"""In Ollama, these come before the names of models on the Hugging Face hub."""


def served_name(router: Router, name: str) -> str:
    """Return the name under which the model called ``name`` is served; if there is none, ``name``
    without the address of the hub and the tag."""
    bare = name
    for hub in _HUBS:
        bare = bare.removeprefix(hub)
    names = router.model_names
    served = names.served(name)
    return served if names.is_known(served) else names.served(bare)


def with_tag(name: str) -> str:
    return name if ":" in name.rpartition("/")[2] else name + LATEST


def listed_names(router: Router) -> dict[str, list[str]]:
    """Return the names of each model, by its own name. Models that were just deleted, or whose
    engines have left, are omitted."""
    found = router.registry.models
    return {
        model_id: names
        for model_id, names in router.model_names.all.items()
        if model_id in router.supervised.models or found[model_id].engines
    }
