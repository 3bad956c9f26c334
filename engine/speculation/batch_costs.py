"""What drafts cost at the batch at hand, as steps with and without them show."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from engine.speculation.costs import WORTH_IT, StepCosts

LEARNS, MOST_DIFFERENCE = 0.1, 0.3
"""How far the typical time follows a time, and by which part of itself a time may differ before it
counts as one that differs by so much: a step that something else held up says little."""
PLAIN_FIRST, PLAIN_EVERY = 3, 64
"""There are no drafts before so many steps without were measured. After so many with drafts one
without shows again what that takes, since contexts grow; sooner while few were measured."""
ASSUMED_ROWS = 9
"""Where nothing is known of drafts, one is assumed to take as long as one of so many rows more than
a step has: a tenth of a step of one sequence."""
PROBED = 0.5
"""As long as nothing is known of drafts, one that is likelier than this is tried to learn it."""
STEEPER = 1.5
"""Drafts beyond those that were measured are assumed to take longer by this factor than those."""
OUTLIER, UNKNOWN_OUTLIER = 1.5, 2.0
"""A step that takes longer than predicted by more than this factor was held up: one of a size that
was measured some times, and any other."""


@dataclass(slots=True)
class _Typical:
    """The typical time of steps without drafts: a mean in which no single one counts much."""

    seconds: float = 0.0
    times: int = 0
    since: int = 0  # steps with drafts after the last one without

    def observe(self, elapsed_s: float) -> None:
        self.times += 1
        self.since = 0
        if self.times == 1:
            self.seconds = elapsed_s
            return
        most = MOST_DIFFERENCE * self.seconds
        difference = min(max(elapsed_s - self.seconds, -most), most)
        self.seconds += max(LEARNS, 1 / self.times) * difference


class BatchCosts:
    """Seconds of decode steps by sequences and drafts.

    Each number of sequences has its own times. What was not measured there is predicted from
    what the same number of tokens took in any batch, as far as the difference to a step without
    drafts goes, and before that from what `StepCosts` assumes. No step has more than twice the
    tokens of the longest that was ever measured."""

    def __init__(self) -> None:
        self._all = StepCosts()
        self._of_rows: dict[int, StepCosts] = {}
        """By sequences, the seconds of steps by their drafts and one."""
        self._plain: dict[int, _Typical] = {}
        self._predicted: dict[tuple[int, int], float] = {}
        self._excess: dict[tuple[int, int], float] = {}
        """What was predicted since the last measurement, by sequences and drafts."""
        self.changes = 0
        """How often something was learned."""

    def observe(self, rows: int, drafted: int, elapsed_s: float) -> None:
        """Note the time of a step of ``rows`` sequences with so many drafts together."""
        if elapsed_s <= 0:
            return
        self.changes += 1
        self._predicted.clear()
        self._excess.clear()
        self._all.observe(rows + drafted, elapsed_s)
        if rows not in self._of_rows:
            self._of_rows[rows] = StepCosts()
            self._plain[rows] = _Typical()
        self._of_rows[rows].observe(1 + drafted, elapsed_s)
        if drafted:
            self._plain[rows].since += 1
        else:
            self._plain[rows].observe(elapsed_s)

    def plain_s(self, rows: int) -> float:
        """Return the typical seconds of a step of ``rows`` sequences without drafts; 0 if none
        was measured."""
        return self._plain[rows].seconds if rows in self._plain else 0.0

    def needs_plain(self, rows: int) -> bool:
        """Return whether the next step should be one without drafts, to be measured."""
        plain = self._plain.get(rows)
        if plain is None or plain.times < PLAIN_FIRST:
            return True
        return plain.since >= min(PLAIN_EVERY, 4 * plain.times)

    def predict_s(self, rows: int, drafted: int = 0) -> float:
        """Return the seconds of a step; 0 if nothing is known."""
        known = self._predicted.get((rows, drafted))
        if known is None:
            known = self._predicted[rows, drafted] = self._predict_s(rows, drafted)
        return known

    def _predict_s(self, rows: int, drafted: int) -> float:
        costs, all_ = self._of_rows.get(rows), self._all
        if costs is None:
            return all_.predict_s(rows + drafted)
        beyond = 1 + drafted - costs.largest
        if beyond <= 0:
            return costs.predict_s(1 + drafted)
        longest_s, known = costs.predict_s(costs.largest), rows + costs.largest - 1
        if all_.largest < known + beyond:
            drafts_s = longest_s - costs.predict_s(1)
            assumed_s = longest_s * beyond / (rows + ASSUMED_ROWS)
            if costs.largest > 1:
                steeper_s = STEEPER * beyond * drafts_s / (costs.largest - 1)
                assumed_s = min(assumed_s, max(0.0, steeper_s))
            return longest_s + assumed_s
        return longest_s + max(0.0, all_.predict_s(known + beyond) - all_.predict_s(known))

    def excess_s(self, rows: int, drafted: int) -> float:
        """Return how much longer a step takes with ``drafted`` tokens than without. It is rather
        too long than too short."""
        known = self._excess.get((rows, drafted))
        if known is None:
            known = self._excess[rows, drafted] = self._excess_s(rows, drafted)
        return known

    def _excess_s(self, rows: int, drafted: int) -> float:
        plain_s, costs = self.predict_s(rows), self._of_rows.get(rows)
        excess_s = max(0.0, self.predict_s(rows, drafted) - plain_s)
        if costs is None or not drafted or costs.largest == 1:
            return excess_s
        beyond = max(1.0, drafted / (costs.largest - 1))
        return max(excess_s, beyond * (costs.at_least_s(1 + drafted) - plain_s))

    def measured_excess_s(self, rows: int, drafted: int, elapsed_s: float | None) -> float:
        """Return how much longer a step with drafts took than one without, as far as they are the
        reason. With None that is what is predicted."""
        if elapsed_s is None:
            return self.excess_s(rows, drafted)
        costs = self._of_rows.get(rows)
        is_known = costs is not None and costs.knows(1 + drafted)
        most = OUTLIER if is_known else UNKNOWN_OUTLIER
        elapsed_s = min(elapsed_s, most * self.predict_s(rows, drafted) or elapsed_s)
        return elapsed_s - (self.plain_s(rows) or self.predict_s(rows))

    def most_drafts(self, rows: int) -> int:
        """Return how many drafts a step may have, by what was measured."""
        costs = self._of_rows.get(rows)
        own = 0 if costs is None else costs.largest - 1
        return max(1, 2 * own, 2 * (self._all.largest - rows))

    def affordable(self, rows: int, count: int, room_s: float) -> int:
        """Return how many drafts of one sequence, ``count`` at most, cost all ``rows`` of a step
        no more than ``room_s`` together."""
        count = min(count, self.most_drafts(rows))
        while count and rows * self.excess_s(rows, count) > room_s:
            count -= 1
        return count

    def best_lengths(
        self, rows: int, gains: Sequence[Sequence[float]], most_s: float | None = None
    ) -> list[int]:
        """Return how many drafts to verify of each of the sequences that have some, in a step of
        ``rows`` sequences: those that give the most tokens a second, and make the step no more than
        ``most_s`` longer.

        ``gains`` are for each sequence the chances that its drafts are accepted, with all before
        them: they fall from one draft to the next."""
        order = sorted(
            ((gain, row) for row, chances in enumerate(gains) for gain in chances), reverse=True
        )
        lengths, best = [0] * len(gains), 0
        expected = float(rows)
        best_rate = WORTH_IT * expected / (self.predict_s(rows) or 1.0)
        most = self.most_drafts(rows)
        for number, (gain, _) in enumerate(order[:most], 1):
            expected += gain
            if most_s is not None and self.excess_s(rows, number) > most_s:
                break
            rate = expected / (self.predict_s(rows, number) or 1.0)
            if rate > best_rate or (gain >= PROBED and most == number == 1):
                best, best_rate = number, rate
        for _, row in order[:best]:
            lengths[row] += 1
        return lengths

    def seconds(self) -> dict[int, float]:
        """Return what is known of all steps, by tokens."""
        return self._all.seconds()

    def known(self) -> dict[int, dict[int, float]]:
        """Return the seconds of measured steps, by sequences, then by drafts."""
        return {
            rows: {tokens - 1: seconds for tokens, seconds in costs.seconds().items()}
            for rows, costs in self._of_rows.items()
        }

    def remember(self, known: Mapping[int, Mapping[int, float]]) -> None:
        """Begin with what `known` said once: it counts as measured once."""
        for rows, by_drafts in known.items():
            for drafted, seconds in sorted(by_drafts.items()):
                self.observe(rows, drafted, seconds)
            if rows in self._plain and self._plain[rows].times:
                self._plain[rows].times = PLAIN_FIRST
        self.changes = 0
