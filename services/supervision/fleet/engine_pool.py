"""The running engines, and the memory they use."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Protocol

from services.supervision.fleet.memory import OVERLAP_SHARE
from services.supervision.fleet.model import FleetModel, free_name
from services.supervision.launcher import ChildSpec
from services.supervision.managed_child import ManagedChild
from shared.settings import ModelEntry

SpecMaker = Callable[[ModelEntry, str, int], ChildSpec]
"""Creates the spec of an engine of a model, with its name and its budget in bytes."""


class ChildRunner(Protocol):
    """The part of `services.supervision.supervisor.Supervisor` that the pool needs."""

    children: list[ManagedChild]

    def add(self, spec: ChildSpec) -> ManagedChild:
        """Run another child."""

    def retire(self, child: ManagedChild) -> None:
        """Stop a child permanently."""

    def end(self, code: int) -> None:
        """Stop the server."""


class EnginePool:
    """Starts and retires engines within ``total_bytes``. An engine counts until it has exited."""

    def __init__(self, supervisor: ChildRunner, make_spec: SpecMaker) -> None:
        self._supervisor = supervisor
        self._make_spec = make_spec
        self._owners: dict[ManagedChild, FleetModel] = {}
        self._budgets: dict[ManagedChild, int] = {}
        """The budget with which each engine was started. It is valid until the engine exits, even
        if the model's budget has changed since."""
        self.total_bytes = 0

    def start(self, model: FleetModel) -> ManagedChild:
        """Start another engine of ``model``."""
        name = free_name(model.prefix, self._supervisor.children)
        spec = self._make_spec(model.entry, name, model.budget_bytes)
        if model.engines:  # the other engines serve, whether this one can start or not
            spec = replace(spec, essential=False)
        child = self._supervisor.add(spec)
        self._owners[child], self._budgets[child] = model, model.budget_bytes
        model.awaits_memory = False
        if not model.engines:
            model.loading_since = time.monotonic()
        model.engines.append(child)
        return child

    def retire(self, model: FleetModel, children: Iterable[ManagedChild]) -> None:
        """Let ``children`` finish their requests and exit."""
        for child in list(children):
            model.engines.remove(child)
            self._supervisor.retire(child)

    def forget_ended(self) -> None:
        for child in list(self._owners):
            if child.gave_up is not None:
                self._supervisor.retire(child)
            if self.has_ended(child):
                del self._owners[child], self._budgets[child]

    def has_ended(self, child: ManagedChild) -> bool:
        return child not in self._supervisor.children

    def fits(self, model: FleetModel) -> bool:
        """Return whether there is room for another engine of ``model`` now."""
        return self.used_bytes + model.budget_bytes <= self.total_bytes

    def fits_for_a_while(self, model: FleetModel) -> bool:
        """Return whether another engine of ``model`` fits before a retiring engine has exited.

        Budgets are mostly for caches, which grow with use. Weights are allocated at once.
        """
        sizes = [owner.weights_bytes for owner in (*self._owners.values(), model)]
        known = [size for size in sizes if size is not None]
        enough = sum(known) <= OVERLAP_SHARE * self.total_bytes
        return self.fits(model) or (len(known) == len(sizes) and enough)

    def fits_instead_of(self, model: FleetModel, old: ManagedChild) -> bool:
        """Return whether an engine of ``model`` fits once ``old`` and all retiring engines have
        exited."""
        staying = sum(
            size
            for child, size in self._budgets.items()
            if child is not old and child.retired_until is None
        )
        return staying + model.budget_bytes <= self.total_bytes

    def bytes_of(self, model: FleetModel) -> int:
        """Return the memory of the engines that serve ``model``."""
        return sum(self._budgets[child] for child in model.engines)

    def excess_bytes(self, model: FleetModel) -> int:
        """Return by how much the engines of ``model`` exceed the budget that new ones would get."""
        return max(0, self.bytes_of(model) - len(model.engines) * model.budget_bytes)

    @property
    def used_bytes(self) -> int:
        return sum(self._budgets.values())

    @property
    def leaving_bytes(self) -> int:
        """The memory of retiring engines."""
        return sum(size for child, size in self._budgets.items() if child.retired_until is not None)
