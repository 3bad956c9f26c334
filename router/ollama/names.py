"""Names of models as Ollama writes them: ``model:tag``, where ``latest`` may be left out."""

from __future__ import annotations

from router.fleet.router import Router

_LATEST = ":latest"


def served_name(router: Router, name: str) -> str:
    """Return the name under which the model called ``name`` is served; ``name`` if none is."""
    for each in (name, name.removesuffix(_LATEST), name + _LATEST):
        if router.supervised.find(each) or router.registry.find_model(each):
            return each
    return name


def with_tag(name: str) -> str:
    return name if ":" in name.rpartition("/")[2] else name + _LATEST
