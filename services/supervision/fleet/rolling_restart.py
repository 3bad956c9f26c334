"""Rolling restarts: engines are replaced one at a time."""

from __future__ import annotations

import logging
from collections import deque

from services.supervision.fleet.engine_pool import EnginePool
from services.supervision.fleet.model import FleetModel
from services.supervision.managed_child import ManagedChild

logger = logging.getLogger(__name__)


class RollingRestart:
    """Replaces engines with new ones that have the current settings of their model.

    If both fit into memory, the new engine is started first, and the old one drains once it is
    ready. Otherwise the old one drains first; meanwhile requests go to other engines, or wait.
    """

    def __init__(self, pool: EnginePool) -> None:
        self._pool = pool
        self._queue: deque[tuple[FleetModel, ManagedChild]] = deque()
        self._old: ManagedChild | None = None
        self._new: ManagedChild | None = None
        self._model: FleetModel | None = None

    def add(self, model: FleetModel) -> None:
        """Replace all engines of ``model``."""
        for child in model.engines:
            self.add_engine(model, child)

    def add_engine(self, model: FleetModel, child: ManagedChild) -> None:
        """Replace ``child``, even if it is still starting: its settings may be outdated."""
        if (model, child) not in self._queue:
            self._queue.append((model, child))

    def forget(self, model: FleetModel) -> None:
        """Do not replace any more engines of ``model``."""
        self._queue = deque(each for each in self._queue if each[0] is not model)
        if self._model is model:
            self._model = self._old = self._new = None

    def concerns(self, model: FleetModel) -> bool:
        return model is self._model or any(each is model for each, _ in self._queue)

    @property
    def is_idle(self) -> bool:
        return self._model is None and not self._queue

    def update(self) -> None:
        """Proceed as far as possible without waiting."""
        if self._model is None:
            self._begin_next()
        elif self._new is not None and self._new not in self._model.engines:
            self._stop("the new engine cannot start, so the others are kept")
        elif self._new is not None and self._new.is_ready:
            self._finish(self._model)
        elif self._new is None and self._old is not None and self._pool.has_ended(self._old):
            self._start(self._model, self._old)

    def _begin_next(self) -> None:
        while self._queue:
            model, old = self._queue.popleft()
            if old not in model.engines:
                continue
            self._model, self._old = model, old
            if self._pool.fits_for_a_while(model) and self._pool.fits_instead_of(model, old):
                self._new = self._pool.start(model)
            else:
                self._pool.retire(model, [old])
            return

    def _start(self, model: FleetModel, old: ManagedChild) -> None:
        """Start the new engine once there is room: its model may need more memory than before."""
        if self._pool.fits(model):
            self._new = self._pool.start(model)
        elif not self._pool.fits_instead_of(model, old):
            model.awaits_memory = True
            self._stop("there is no memory for its new settings, so it is loaded on demand")

    def _finish(self, model: FleetModel) -> None:
        """Drain the old engine once the new one is ready. The next replacement begins when it has
        exited."""
        assert self._old is not None and self._new is not None
        if self._old in model.engines:
            self._pool.retire(model, [self._old])
        if self._pool.has_ended(self._old):
            logger.info("%s was replaced with %s", self._old.name, self._new.name)
            self._model = self._old = self._new = None

    def _stop(self, reason: str) -> None:
        assert self._model is not None
        logger.error("restart of model %s: %s", self._model.id, reason)
        self.forget(self._model)
