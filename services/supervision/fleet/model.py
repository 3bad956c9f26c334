"""One model of the fleet, with its engines."""

from __future__ import annotations

import re
import time
from typing import Any, Literal

from services.supervision.fleet.memory import known_files
from services.supervision.fleet.scaling import Scaling
from services.supervision.managed_child import ManagedChild
from shared.exits import EXIT_CONFIG
from shared.settings import ModelEntry, adapters_of

ModelState = Literal["unloaded", "loading", "ready", "broken"]


class FleetModel:
    """A configured model, loaded or not. Times are from ``time.monotonic``."""

    def __init__(self, entry: ModelEntry, weights_bytes: int | None) -> None:
        self.entry = entry
        self.scaling = Scaling(entry.settings.engines)
        self.weights_bytes = weights_bytes
        self._known_files: tuple[str, dict[str, Any]] = "", {}
        self.budget_bytes = 0
        self.engines: list[ManagedChild] = []
        """The engines meant to serve it, without retired ones."""
        self.waiting = 0
        """Number of requests that wait for it to load."""
        self.waiting_since: float | None = None
        self.awaits_memory = False
        """Whether to load it, without a request, as soon as others have freed memory."""
        self.put_away = False
        """Whether it was unloaded, for idleness or for another model: only a request loads it."""
        self.idle_s = 0.0
        """Time since its last request, or since the start; 0 while it has requests."""
        self.kept_s: float | None = None
        """The value that a request has set in place of --idle-unload-s; negative: forever."""
        self.kept_since = 0.0
        self.given_up = 0
        """Engines that cannot start next to other running ones. A restart tries them again."""
        self.trouble: str | None = None
        """The reason why it cannot be loaded, in words."""
        self.exit_code = EXIT_CONFIG
        """The exit code of a server that has no other model."""
        self.loading_since: float | None = None
        self.load_s: float | None = None
        """Duration of the last load."""
        self.ready_since: float | None = None

    @property
    def id(self) -> str:
        return self.entry.id

    @property
    def prefix(self) -> str:
        """Prefix of the names of its engines."""
        return "engine" if self.entry.alone else re.sub(r"[^\w.-]+", "-", self.id).strip("-.")

    @property
    def state(self) -> ModelState:
        if any(child.is_ready for child in self.engines):
            return "ready"
        if self.trouble is not None:
            return "broken"
        return "loading" if self.engines else "unloaded"

    @property
    def is_due(self) -> bool:
        """Whether it has been loaded and idle for as long as it is kept loaded."""
        if self.kept_s is None:
            loaded_s = 0.0 if self.ready_since is None else time.monotonic() - self.ready_since
            return 0 < self.entry.settings.idle_unload_s <= min(self.idle_s, loaded_s)
        # The last usage report may be older than the request.
        kept_s = min(self.idle_s, time.monotonic() - self.kept_since)
        return 0 <= self.kept_s <= kept_s and self.idle_s > 0

    def keep(self, kept_s: float | None) -> None:
        """Unload it after ``kept_s`` without a request from now on, as `kept_s`."""
        self.kept_s, self.kept_since = kept_s, time.monotonic()

    def describe(self) -> dict[str, Any]:
        """Return the state reported to the router."""
        return {
            "names": list(self.entry.names),
            "state": self.state,
            "reason": self.trouble or self._loading_trouble,
            "pinned": self.entry.pinned,
            "adapters": list(adapters_of(self.entry.settings)),
            "engines": [child.joins_as for child in self.engines],
            "load_s": self.load_s,
            "weights_bytes": self.weights_bytes,
            **self._files(),
            "fim_layout": self.entry.settings.fim_layout,
            "idle_unload_s": self.entry.settings.idle_unload_s,
            "kept_s": self.kept_s,
        }

    @property
    def _loading_trouble(self) -> str | None:
        """The reason why it is not loaded yet, in words. An engine that has failed exits, and is
        counted then."""
        if self.state != "loading":
            return None
        running = [child.process.state for child in self.engines if child.process is not None]
        return next(
            (each.reason for each in running if each.phase != "failed" and each.reason), None
        )

    def _files(self) -> dict[str, Any]:
        """Return what the router is told about the model's files, once they are here."""
        settings = self.entry.settings
        if self.weights_bytes is not None and self._known_files[0] != settings.model:
            self._known_files = settings.model, known_files(settings)
        return self._known_files[1]

    def retry(self) -> None:
        """Try engines again that could not start."""
        self.trouble, self.exit_code, self.given_up = None, EXIT_CONFIG, 0

    def note_demand(self, waiting: int, idle_s: float, now: float) -> None:
        self.waiting, self.idle_s = waiting, idle_s
        if not waiting:
            self.waiting_since = None
        elif self.waiting_since is None:
            self.waiting_since = now

    def follow_engines(self) -> str | None:
        """Record engines that cannot start, and the duration of a load. Return a line
        for the log."""
        for child in list(self.engines):
            if child.gave_up is not None:
                self.engines.remove(child)
                self.given_up += 1
                if not self.engines:
                    self.trouble, self.exit_code = child.gave_up, child.exit_code
        if self.state != "ready":
            self.ready_since = None
        elif self.ready_since is None:
            self.ready_since = now = time.monotonic()
            if self.loading_since is not None:
                self.load_s, self.loading_since = round(now - self.loading_since, 3), None
                return f"model {self.id} was loaded in {self.load_s:.1f} s"
        return None


def free_name(prefix: str, children: list[ManagedChild]) -> str:
    """Return the first unused name that begins with ``prefix``."""
    taken = {child.name for child in children}
    number = 0
    while f"{prefix}-{number}" in taken:
        number += 1
    return f"{prefix}-{number}"
