"""Decides how many drafts to request from a `BatchSource`, for all sequences of a step."""

from __future__ import annotations

from collections.abc import Sequence
from time import perf_counter, thread_time
from typing import NamedTuple

from engine.speculation.accounts import SourceTotals
from engine.speculation.batch_costs import BatchCosts
from engine.speculation.costs import WORTH_IT, StepCosts
from engine.speculation.source import BatchSource, DraftRequest, Proposal

LIKELY = 0.6
"""The assumed acceptance rate of its drafts."""
CALLS_WITHOUT = 64
"""If drafts were not worth while, sequences wait for them again once in this many times that one
might."""


class BatchRow(NamedTuple):
    """A sequence for which the source may be asked."""

    request: DraftRequest  # its limit is the max number of drafts
    other: Proposal | None  # drafts of another source
    other_gain: float  # expected number of accepted tokens among them
    gains: Sequence[float]  # chances that each draft and all before it are accepted


class BatchDrafting:
    """Asks a source, and learns how long it takes. The source computes token by token, so its
    time grows with the length of drafts, and little with the number of sequences."""

    def __init__(self, source: BatchSource, adapts: bool, totals: SourceTotals) -> None:
        """``adapts``: whether times and chances decide; otherwise it always requests the
        maximum."""
        self._source = source
        self._totals = totals
        self._adapts = adapts
        self._token_s = StepCosts()  # seconds per token of each sequence, by number of sequences
        self.pays = True
        """Whether its drafts were worth while when this was last considered."""
        self.last_s = 0.0
        """Each requested sequence's share of the time of the last call."""
        self._calls_without = 0
        self._waited_s = 0.0

    @property
    def name(self) -> str:
        return self._source.NAME

    def of_unknown(self, count: int) -> Proposal:
        """Return a placeholder for a proposal of ``count`` tokens."""
        return Proposal((0,) * count, self.name, likely=(LIKELY,))

    def waits(self) -> bool:
        """Return whether sequences should wait for their token in flight, to get drafts
        afterwards."""
        self._calls_without = 0 if self.pays else (self._calls_without + 1) % CALLS_WITHOUT
        return self._calls_without == 0 and self._source.is_usable

    def propose(
        self, num_rows: int, rows: Sequence[BatchRow], steps: BatchCosts, room_s: float
    ) -> list[Proposal | None]:
        """Return the drafts to verify for each of ``rows``, in a step of ``num_rows`` sequences
        with the costs ``steps``: drafts of this source if they are worth while and take at most
        ``room_s``, for which all sequences of the step wait, else those of others."""
        found = [row.other for row in rows]
        if not rows or not self._source.is_usable:
            return found
        length = self._best_length(num_rows, rows, steps, room_s) if self._adapts else None
        self.pays = length != 0
        chosen = [number for number, row in enumerate(rows) if self._prefers(row, length)]
        chosen = chosen[: self._source.max_sequences]
        if not chosen:
            return found
        requests = [rows[number].request for number in chosen]
        if length is not None:
            requests = [each._replace(limit=min(each.limit, length)) for each in requests]
        self._source.prepare()
        began, computing_began = perf_counter(), thread_time()
        drafts = self._source.propose(requests)
        elapsed_s, computing_s = perf_counter() - began, thread_time() - computing_began
        self._waited_s += max(0.0, elapsed_s - computing_s)
        self._totals.spent(self.name, elapsed_s)
        self.last_s = elapsed_s / len(requests)
        if longest := max(map(len, drafts)):
            self._token_s.observe(len(requests), elapsed_s / longest)
        for number, tokens in zip(chosen, drafts, strict=True):
            if tokens:
                found[number] = Proposal(tokens, self.name, likely=(LIKELY,))
        return found

    def _prefers(self, row: BatchRow, length: int | None) -> bool:
        """Return whether ``length`` drafts of ``row`` are better than those of another source.
        None: the max length, if there is no other source."""
        if length is None:
            return row.other is None
        return sum(row.gains[:length]) > row.other_gain

    def take_waited_s(self) -> float:
        """Return how long calls have waited for the source since the last call of this, without
        the time that they computed in this thread."""
        waited_s, self._waited_s = self._waited_s, 0.0
        return waited_s

    def _best_length(
        self, num_rows: int, rows: Sequence[BatchRow], steps: BatchCosts, room_s: float
    ) -> int:
        """Return the length of drafts with the most tokens per second, 0 for none."""

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
            if draft_s > room_s:
                return 0.0
            return expected / (steps.predict_s(num_rows, drafted) + draft_s or 1.0)

        lengths = range(1, 1 + max(len(row.gains) for row in rows))
        best = max(lengths, key=rate, default=0)
        return best if best and rate(best) > WORTH_IT * rate(0) else 0
