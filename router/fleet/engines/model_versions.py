"""The models by name, and their versions: engines of one name with different weights, tokenizer
files or settings. One version is current and gets all new requests."""

from __future__ import annotations

import logging
from collections.abc import Callable

from router.fleet.engines.engine import ModelReplicas
from shared.settings import Settings
from shared.wire import Hello

logger = logging.getLogger(__name__)


class ModelVersions:
    """A version that joins next to others becomes current as soon as it is ready, and the previous
    one finishes its requests. If all engines of the current version are lost while an earlier one
    is ready, the earlier one becomes current again."""

    def __init__(self, on_replaced: Callable[[ModelReplicas], None]) -> None:
        """``on_replaced`` is called with a version that is no longer the current one."""
        self._on_replaced = on_replaced
        self.current: dict[str, ModelReplicas] = {}
        self._others: list[ModelReplicas] = []
        self.left_names: set[str] = set()
        """Names of models whose engines have all left once."""

    @property
    def all(self) -> list[ModelReplicas]:
        """All versions of all models, current ones first."""
        return [*self.current.values(), *self._others]

    def find(self, hello: Hello, settings: Settings) -> ModelReplicas:
        """Return the version that an engine with ``hello`` and these settings serves."""
        for version in self.all:
            if version.id == hello.model and version.matches(hello, settings):
                version.hello = hello
                return version
        new = ModelReplicas(hello, settings)
        for version in self.all:
            if version.id == new.id and version.hello.fingerprint == hello.fingerprint:
                new.apply(version.decisions.all)
        current = self.current.get(new.id)
        if current is None:
            self.current[new.id] = new
        elif any(engine.lost_reason is None for engine in current.engines):
            logger.info(
                "another version of model %s joins and will be used once it is ready", new.id
            )
            self._others.append(new)
        else:
            self._make_current(new)
        return new

    def other_owner(self, hello: Hello) -> tuple[str, str] | None:
        """Return a name of ``hello`` that belongs to another model, and that model, if there is
        one."""
        for model in self.current.values():
            for name in (hello.model, *hello.aliases):
                if model.id != hello.model and model.engines and name in model.names:
                    return name, model.id
        return None

    def on_ready(self, version: ModelReplicas) -> None:
        """Record that ``version`` has a ready engine."""
        current = self.current.get(version.id)
        if current is version:
            return
        is_new = version.successor is None
        if is_new or current is None or not current.ready_engines:
            self._make_current(version)

    def drop(self, version: ModelReplicas) -> None:
        """Forget a version without engines."""
        self.left_names.update(version.names)
        if self.current.get(version.id) is version:
            del self.current[version.id]
        else:
            self._others.remove(version)

    def _make_current(self, version: ModelReplicas) -> None:
        before = self.current.get(version.id)
        self.current[version.id] = version
        if version in self._others:
            self._others.remove(version)
        version.successor = None
        for other in self._others:
            if other.id == version.id and other.successor is not None:
                other.successor = version
        if before is not None:
            before.successor = version
            self._others.append(before)
            logger.info("model %s has a new version", version.id)
            self._on_replaced(before)
