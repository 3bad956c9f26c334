"""Names of adapters, and administrators' decisions about them, as stored by routers and engines.

Each router and each engine stores all decisions and sends them to its peers. The decision with
the higher version is valid, so decisions may be merged in any order and repeatedly."""

from __future__ import annotations

import re
import time
from collections.abc import Iterable

from shared.wire import AdapterDecision, AdapterRef

MAX_NAMED_ADAPTERS = 1000
"""Adapters of one model."""
MAX_DECISIONS = 2 * MAX_NAMED_ADAPTERS
"""Beyond it the oldest removals are forgotten."""
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")
_MAX_PATH, _MAX_DIGEST = 4096, 64
_AHEAD_US = 24 * 3600 * 1_000_000
"""How far the clock of a peer may be ahead of ours."""


def is_adapter_name(name: str) -> bool:
    """Return whether an adapter may be called ``name``. It has no colon, which separates it from
    the name of its model."""
    return _NAME.fullmatch(name) is not None


class DecisionTable:
    """The decisions about the adapters of one model, by name."""

    def __init__(self) -> None:
        self._by_name: dict[str, AdapterDecision] = {}

    def __contains__(self, name: str) -> bool:
        return name in self._by_name

    @property
    def all(self) -> list[AdapterDecision]:
        return list(self._by_name.values())

    def next(self, name: str, adapter: AdapterRef | None) -> AdapterDecision:
        """Return the decision that assigns ``name`` to ``adapter``, or to none, from now on."""
        known = self._by_name.get(name)
        version = max(1 + (0 if known is None else known.version), _now_us())
        return AdapterDecision(name=name, adapter=adapter, version=version)

    def merge(self, decisions: Iterable[AdapterDecision]) -> bool:
        """Merge a peer's decisions, except those that no correct peer sends. Return whether any
        is new."""
        # A clock, such as ours at an earlier decision, may have been set back.
        known = (each.version + 1 for each in self._by_name.values())
        before, latest = dict(self._by_name), max(_now_us() + _AHEAD_US, *known, 0)
        for each in decisions:
            if not (is_sound(each) and 0 < each.version <= latest):
                continue
            own = self._by_name.get(each.name)
            if own is None or _order(each) > _order(own):
                self._by_name[each.name] = each
        self._forget()
        return self._by_name != before

    def _forget(self) -> None:
        """Drop the oldest decisions beyond the most that are kept, removals first."""
        extra = len(self._by_name) - MAX_DECISIONS
        if extra > 0:
            oldest = sorted(self.all, key=lambda one: (one.adapter is not None, _order(one)))
            for each in oldest[:extra]:
                del self._by_name[each.name]


def is_sound(decision: AdapterDecision) -> bool:
    """Return whether a correct engine may have sent ``decision``."""
    name, adapter = decision.name, decision.adapter
    if adapter is None:
        return is_adapter_name(name)
    bounded = len(adapter.path) <= _MAX_PATH and len(adapter.digest) <= _MAX_DIGEST
    return is_adapter_name(name) and adapter.name == name and bounded


def _now_us() -> int:
    """Return the time in microseconds. Versions are times, so that none can use them up."""
    return time.time_ns() // 1000


def _order(decision: AdapterDecision) -> tuple[int, str]:
    """Return a sort key: the highest decision is valid, for every process."""
    adapter = decision.adapter
    return decision.version, "" if adapter is None else f"{adapter.digest} {adapter.path}"
