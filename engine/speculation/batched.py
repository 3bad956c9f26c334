"""How many drafts of all sequences a `BatchSource` is asked for."""

from __future__ import annotations

from collections.abc import Sequence
from time import perf_counter
from typing import NamedTuple

from engine.speculation.accounts import DraftAccounts
from engine.speculation.batch_costs import BatchCosts
from engine.speculation.costs import WORTH_IT, StepCosts
from engine.speculation.source import BatchSource, DraftRequest, Proposal

LIKELY = 0.6
"""What is assumed of its drafts."""
CALLS_WITHOUT = 64
"""Sequences wait again for drafts that were not worth while, once in so many plans."""


class BatchRow(NamedTuple):
    """A sequence that may be asked for."""

    request: DraftRequest  # with the most drafts that it may have
    other: Proposal | None  # of another source
    other_gain: float  # tokens of that which are expected to be accepted
    gains: Sequence[float]  # the chances of drafts to be accepted, with all before them


class BatchDrafting:
    """Asks a source, and learns how long it takes: it computes token by token, so that its time
    grows with the length of drafts and little with the number of sequences."""

    def __init__(self, source: BatchSource, adapts: bool, accounts: DraftAccounts) -> None:
        """``adapts``: whether times and chances decide; otherwise it is asked for all it may."""
        self._source = source
        self._accounts = accounts
        self._adapts = adapts
        self._token_s = StepCosts()  # seconds for a token of each sequence, by their number
        self.pays = True
        """Whether its drafts were worth while when that was considered last."""
        self.last_s = 0.0
        """What each sequence that was asked for had its part in, of the time of the last call."""
        self._calls_without = 0

    @property
    def name(self) -> str:
        return self._source.NAME

    def of_unknown(self, count: int) -> Proposal:
        """Return a stand-in for a proposal of ``count`` tokens."""
        return Proposal((0,) * count, self.name, likely=(LIKELY,))

    def waits(self) -> bool:
        """Return whether sequences should wait for their token in flight, to get drafts then."""
        self._calls_without = 0 if self.pays else (self._calls_without + 1) % CALLS_WITHOUT
        return self._calls_without == 0

    def propose(
        self, num_rows: int, rows: Sequence[BatchRow], steps: BatchCosts
    ) -> list[Proposal | None]:
        """Return what to verify of each of ``rows``, in a step of ``num_rows`` sequences that costs
        as ``steps`` say: drafts of the source where they are worth while, or those of others."""
        found = [row.other for row in rows]
        if not rows:
            return found
        length = self._best_length(num_rows, rows, steps) if self._adapts else None
        self.pays = length != 0
        chosen = [number for number, row in enumerate(rows) if self._prefers(row, length)]
        chosen = chosen[: self._source.max_sequences]
        if not chosen:
            return found
        requests = [rows[number].request for number in chosen]
        if length is not None:
            requests = [each._replace(limit=min(each.limit, length)) for each in requests]
        began = perf_counter()
        drafts = self._source.propose(requests)
        elapsed_s = perf_counter() - began
        self._accounts.spent(self.name, elapsed_s)
        self.last_s = elapsed_s / len(requests)
        if longest := max(map(len, drafts)):
            self._token_s.observe(len(requests), elapsed_s / longest)
        for number, tokens in zip(chosen, drafts, strict=True):
            if tokens:
                found[number] = Proposal(tokens, self.name, likely=(LIKELY,))
        return found

    def _prefers(self, row: BatchRow, length: int | None) -> bool:
        """Return whether ``length`` drafts of ``row`` are better than those of another source.
        None: as many as it may have, if there are no others."""
        if length is None:
            return row.other is None
        return sum(row.gains[:length]) > row.other_gain

    def _best_length(self, num_rows: int, rows: Sequence[BatchRow], steps: BatchCosts) -> int:
        """Return the length of drafts that gives the most tokens a second, 0 for none."""

        def rate(length: int) -> float:
            expected, drafted, asked = float(num_rows), 0, 0
            for row in rows:
                if length and self._prefers(row, length):
                    expected += sum(row.gains[:length])
                    drafted += min(len(row.gains), length)
                    asked += 1
                else:
                    expected += row.other_gain
                    drafted += len(row.other.tokens) if row.other else 0
            draft_s = length * self._token_s.predict_s(asked) if asked else 0.0
            return expected / (steps.predict_s(num_rows, drafted) + draft_s or 1.0)

        lengths = range(1, 1 + max(len(row.gains) for row in rows))
        best = max(lengths, key=rate, default=0)
        return best if best and rate(best) > WORTH_IT * rate(0) else 0
