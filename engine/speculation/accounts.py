"""Costs and savings of drafts, by source."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import astuple, dataclass

from shared.wire import DraftCounts


@dataclass(slots=True)
class _Account:
    """The fields of `DraftCounts`."""

    proposals: int = 0
    drafted: int = 0
    accepted: int = 0
    saved_s: float = 0.0
    spent_s: float = 0.0


class DraftAccounts:
    """An account for each source. A step with drafts takes longer than one without: each of its
    drafts bears an equal share, and each accepted draft saves one row of a step without drafts."""

    def __init__(self) -> None:
        self._accounts: dict[str, _Account] = defaultdict(_Account)
        self._gain_s = self._cost_s = 0.0

    def begin_step(self, rows: int, drafted: int, plain_s: float, elapsed_s: float) -> None:
        """Record a step of ``rows`` sequences with ``drafted`` tokens that took ``elapsed_s``, and
        would have taken ``plain_s`` without them; its drafts are verified next."""
        self._gain_s = plain_s / rows
        self._cost_s = (elapsed_s - plain_s) / drafted if drafted else 0.0

    def skip_step(self) -> None:
        """Record a step whose drafts have unknown costs."""
        self._gain_s = self._cost_s = 0.0

    def verified(self, source: str, drafted: int, accepted: int) -> None:
        """Record that ``accepted`` of ``drafted`` tokens in the most recent step were accepted."""
        account = self._accounts[source]
        account.proposals += 1
        account.drafted += drafted
        account.accepted += accepted
        account.saved_s += accepted * self._gain_s - drafted * self._cost_s

    def spent(self, source: str, seconds: float) -> None:
        """Record the time taken to ask ``source`` for drafts."""
        account = self._accounts[source]
        account.spent_s += seconds
        account.saved_s -= seconds

    def counts(self) -> dict[str, DraftCounts]:
        return {name: DraftCounts(*astuple(each)) for name, each in self._accounts.items()}
