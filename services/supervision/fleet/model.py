"""One model of the fleet, with its engines."""

from __future__ import annotations

import re
import time
from typing import Any, Literal

from services.supervision.fleet.scaling import Scaling
from services.supervision.managed_child import ManagedChild
from shared.settings import ModelEntry, adapters_of

ModelState = Literal["unloaded", "loading", "ready", "broken"]


class FleetModel:
    """A model that is configured, whether it is loaded or not. Times are of ``time.monotonic``."""

    def __init__(self, entry: ModelEntry, weights_bytes: int | None) -> None:
        self.entry = entry
        self.scaling = Scaling(entry.settings.engines)
        self.weights_bytes = weights_bytes
        self.budget_bytes = 0
        self.engines: list[ManagedChild] = []
        """Those that are to serve it. Retired ones are not among them."""
        self.waiting = 0
        """Requests that wait for it to be loaded."""
        self.waiting_since: float | None = None
        self.awaits_memory = False
        """Whether it is loaded, unasked, as soon as others have given memory back."""
        self.idle_s = 0.0
        """The time since its last request; 0 while there are any."""
        self.kept_s: float | None = None
        """What a request has asked for in the place of --idle-unload-s; below 0: for ever."""
        self.kept_since = 0.0
        self.given_up = 0
        """Engines that cannot start beside others that run. They are tried again by a restart."""
        self.trouble: str | None = None
        """Why it cannot be loaded, in words."""
        self.loading_since: float | None = None
        self.load_s: float | None = None
        """How long the last load took."""
        self.ready_since: float | None = None

    @property
    def id(self) -> str:
        return self.entry.id

    @property
    def prefix(self) -> str:
        """What the names of its engines begin with."""
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
        """Whether it has been without a request for as long as it is kept."""
        if self.kept_s is None:
            limit_s = self.entry.settings.idle_unload_s
            return 0 < limit_s <= self.idle_s
        # What was told of its use may be older than the request.
        kept_s = min(self.idle_s, time.monotonic() - self.kept_since)
        return 0 <= self.kept_s <= kept_s and self.idle_s > 0

    def keep(self, kept_s: float | None) -> None:
        """Unload it after ``kept_s`` without a request from now on, as `kept_s`."""
        self.kept_s, self.kept_since = kept_s, time.monotonic()

    def describe(self) -> dict[str, Any]:
        """Return what the router is told."""
        return {
            "names": list(self.entry.names),
            "state": self.state,
            "reason": self.trouble,
            "pinned": self.entry.pinned,
            "adapters": list(adapters_of(self.entry.settings)),
            "engines": [child.joins_as for child in self.engines],
            "load_s": self.load_s,
            "weights_bytes": self.weights_bytes,
            "idle_unload_s": self.entry.settings.idle_unload_s,
            "kept_s": self.kept_s,
        }

    def mend(self) -> None:
        """Try again what could not be started."""
        self.trouble, self.given_up = None, 0

    def note_demand(self, waiting: int, idle_s: float, now: float) -> None:
        self.waiting, self.idle_s = waiting, idle_s
        if not waiting:
            self.waiting_since = None
        elif self.waiting_since is None:
            self.waiting_since = now

    def follow_engines(self) -> str | None:
        """Note engines that cannot start, and how long a load took. Return a line for the log."""
        for child in list(self.engines):
            if child.gave_up is not None:
                self.engines.remove(child)
                self.given_up += 1
                if not self.engines:
                    self.trouble = child.gave_up
        if self.state != "ready":
            self.ready_since = None
        elif self.ready_since is None:
            self.ready_since = now = time.monotonic()
            if self.loading_since is not None:
                self.load_s, self.loading_since = round(now - self.loading_since, 3), None
                return f"model {self.id} was loaded in {self.load_s:.1f} s"
        return None


def free_name(prefix: str, children: list[ManagedChild]) -> str:
    """Return the first name after ``prefix`` that no child has."""
    taken = {child.name for child in children}
    number = 0
    while f"{prefix}-{number}" in taken:
        number += 1
    return f"{prefix}-{number}"
