"""The names of models, and who may use them."""

from __future__ import annotations

from router.errors import ModelForbidden
from router.fleet.adapters import SEPARATOR, Adapters, ListedAdapter
from router.fleet.engines.registry import Registry
from router.fleet.models.supervised import Supervised
from router.fleet.tenants.tenant import Tenant

LATEST = ":latest"
"""Ollama's tag, which may be omitted."""


class ModelNames:
    """The names of the models and adapters that are configured or have joined."""

    def __init__(self, registry: Registry, supervised: Supervised, adapters: Adapters) -> None:
        self._registry, self._supervised, self._adapters = registry, supervised, adapters

    @property
    def all(self) -> dict[str, list[str]]:
        """The names of each configured or joined model, by its own name."""
        configured = {each.names[0]: each.names for each in self._supervised.models.values()}
        joined = {model.id: model.names for model in self._registry.models.values()}
        return {**configured, **joined}

    def wanted(self, name: str | None, tenant: Tenant) -> str | None:
        """Return the name of what a request of ``tenant`` means by ``name``: without one, the first
        model that it may use; None if there is no model at all. Of an adapter, it is the whole
        name, with its model's.

        Raises `ModelForbidden` if ``tenant`` may not use it, loaded or not, and `ModelNotFound` if
        several adapters that it may use are called ``name``.
        """
        if name is None:
            return self._default(tenant)
        name = self.served(name)
        names = next((names for names in self.all.values() if name in names), None)
        meant = name
        if names is None:
            adapter = self._adapters.find_listed(name, tenant.may_use)
            if adapter is not None:
                meant, names = adapter.name, adapter.names
            elif (model := self._adapters.find_configured(name)) is not None:
                own = name.rpartition(SEPARATOR)[2]  # its engines do not have it now
                names = ListedAdapter(model.names[0], model.names, own).names
        if names and not tenant.may_use(names):
            raise ModelForbidden(f"The API key may not use {name}.", param="model")
        return meant

    def served(self, name: str) -> str:
        """Return the name under which ``name`` is known: clients take names from one API to
        another, and so with or without `LATEST`. If it is not, it is without."""
        bare = name.removesuffix(LATEST)
        return next(filter(self.is_known, (name, bare, bare + LATEST)), bare)

    def is_known(self, name: str) -> bool:
        if any(name in names for names in self.all.values()) or self._adapters.is_known(name):
            return True
        return self._adapters.find_configured(name) is not None

    def _default(self, tenant: Tenant) -> str | None:
        for model in self._supervised.models.values():
            if tenant.may_use(model.names):
                return model.names[0]
        if (joined := self._registry.default_model(tenant.may_use)) is not None:
            return joined.id
        if self.all:  # their names are not for this tenant
            raise ModelForbidden("The API key may not use the default model.", param="model")
        return None
