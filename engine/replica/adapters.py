"""Adapters of a replica: those in its settings, and places for others."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import mlx.nn as nn

from engine.adapters.checkpoint import AdapterError, read
from engine.adapters.layers import GraphStore, adapt, leave_uncompiled, linear_layers, shape_of
from engine.adapters.places import AdapterPlaces
from engine.adapters.queue import AdapterQueue, AdapterRead, AdapterReader
from engine.executor.base import Executor
from engine.model.errors import AdapterUnusable
from engine.scheduler.sequences.sequence import Sequence
from shared import wire
from shared.settings import Settings, adapters_of

DEFAULT_PLACES = 8
"""Max number of --adapter flags without --max-adapters."""


class NamedAdapters:
    """The adapters of a model by name, and their places."""

    def __init__(self, places: AdapterPlaces, of_settings: list[wire.AdapterRef]) -> None:
        self.places, self.of_settings = places, of_settings

    def open_queue(self, done: Callable[[AdapterRead], None]) -> AdapterQueue[Sequence]:
        """Return the queue of requests. ``done`` receives what a thread has read."""
        reader = AdapterReader(self.places.shapes, self.places.max_rank, done)
        return AdapterQueue(self.places, reader)


class Adaptable:
    """A model whose layers support adapters, before the way in which it is computed is known."""

    def __init__(self, places: AdapterPlaces, store: GraphStore, settings: Settings) -> None:
        self.places, self._store = places, store
        self._paths = adapters_of(settings)

    @property
    def reserved_bytes(self) -> int:
        return self.places.reserved_bytes

    def opened(self, executor: Executor) -> NamedAdapters:
        """Read the adapters in the settings, and assign places to the first ones. Raises:
        `AdapterUnusable`."""
        self.places.store = executor.adapter_store(self._store)
        self.places.wait = executor.wait
        found = [self._open(name, path) for name, path in self._paths.items()]
        return NamedAdapters(self.places, found)

    def _open(self, name: str, path: Path) -> wire.AdapterRef:
        try:
            weights = read(path, self.places.shapes, self.places.max_rank)
        except AdapterError as error:
            raise AdapterUnusable(f"--adapter: {name}: {error}") from error
        used = range(1, self.places.count + 1)
        if self.places.find(weights.digest) is None:
            self.places.put(weights, used)  # no effect if no place is free
        return wire.AdapterRef(
            name=name, path=str(path.absolute()), digest=weights.digest, rank=weights.rank
        )


def adaptable(model: nn.Module, settings: Settings) -> Adaptable | None:
    """Enable adapters in the layers of ``model``, if ``settings`` allow any."""
    places = places_in(model, settings)
    if places is None:
        return None
    if not places.shapes:
        raise AdapterUnusable("--adapter: this model has no linear layers to add adapters to")
    store = adapt(linear_layers(model), places.count, places.max_rank)
    leave_uncompiled(model)
    return Adaptable(places, store, settings)


def places_in(model: nn.Module, settings: Settings) -> AdapterPlaces | None:
    """Return the places for adapters of ``model``; None if ``settings`` allow none."""
    count = settings.max_adapters or min(len(settings.adapter), DEFAULT_PLACES)
    if not count:
        return None
    shapes = {name: shape_of(module) for name, module in linear_layers(model).items()}
    return AdapterPlaces(shapes, count, settings.max_adapter_rank)
