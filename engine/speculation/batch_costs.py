"""Costs of drafts at the current batch size, learned from steps with and without them."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median

from engine.speculation.costs import WORTH_IT, StepCosts

PLAIN_FIRST, PLAIN_EVERY = 3, 64
"""No drafts before this many steps without drafts were measured. After this many steps with
drafts, one without is measured again, because contexts grow; sooner while few were measured."""
ASSUMED_ROWS = 9
"""Assumed time of a draft while nothing is known about drafts, in rows: a tenth of a step of one
sequence."""
PROBED = 0.5
"""While nothing is known about drafts, a draft with a higher chance than this is tried to learn
its cost."""
OUTLIER, UNKNOWN_OUTLIER = 1.5, 2.0
"""A step slower than predicted by more than this factor was delayed by something else: for sizes
measured a few times, and for all other sizes."""
DOUBTFUL = 1.3
"""After a step with drafts that is slower than predicted by more than this factor, although its
size was measured a few times, one without is measured again: the machine may have become slower."""
OVERDRAWN_STEPS = 0.25
"""Sequences without budget draft together until one of them lacks this many steps."""
RECENT = 3
"""Number of recent times without drafts that decide the typical one."""


@dataclass(slots=True)
class _Typical:
    """The typical time of steps without drafts: the median of recent ones, which a single time
    does not change much."""

    seconds: float = 0.0
    times: int = 0
    since: int = 0  # steps with drafts since the last one without
    is_doubtful: bool = False  # see `DOUBTFUL`
    recent: deque[float] = field(default_factory=lambda: deque(maxlen=RECENT))

    def observe(self, elapsed_s: float) -> None:
        self.times += 1
        self.since, self.is_doubtful = 0, False
        self._follow(elapsed_s)

    def lower(self, most_s: float) -> None:
        """Learn that a step with drafts took ``most_s``: one without would take no longer."""
        if most_s < self.seconds:
            self._follow(most_s)

    def _follow(self, elapsed_s: float) -> None:
        self.recent.append(elapsed_s)  # the first one prepares others, and is slow
        is_first = self.times <= PLAIN_FIRST
        self.seconds = min(self.recent) if is_first else median(self.recent)


class BatchCosts:
    """Seconds of decode steps by number of sequences and drafts.

    Each number of sequences has its own times. Unmeasured sizes are predicted: the difference to
    a step without drafts is taken from steps of any batch with the same number of tokens, or
    else from the assumptions of `StepCosts`."""

    def __init__(self) -> None:
        self._all = StepCosts()
        self._of_rows: dict[int, StepCosts] = {}
        """By number of sequences, the times of steps by number of drafts plus one, as multiples
        of the typical time without drafts when they were measured: the speed of a machine
        changes, by its temperature and other programs."""
        self._plain: dict[int, _Typical] = {}
        self._predicted: dict[tuple[int, int], float] = {}
        self._excess: dict[tuple[int, int], float] = {}
        """Predictions since the last measurement, by number of sequences and drafts."""
        self.changes = 0
        """Number of times that something was learned."""

    def observe(self, rows: int, drafted: int, elapsed_s: float) -> None:
        """Learn from the time of a step of ``rows`` sequences with ``drafted`` drafts in total."""
        if drafted:  # one step that was delayed must not keep all others from drafts
            if self.knows(rows, drafted):
                slow_s = DOUBTFUL * self.predict_s(rows, drafted)
                self._plain[rows].is_doubtful |= elapsed_s > slow_s
            elapsed_s = self._plausible_s(rows, drafted, elapsed_s)
        if elapsed_s > 0:
            self._learn(rows, drafted, elapsed_s)

    def _learn(self, rows: int, drafted: int, elapsed_s: float) -> None:
        self.changes += 1
        self._predicted.clear()
        self._excess.clear()
        self._all.observe(rows + drafted, elapsed_s)
        plain = self._plain.setdefault(rows, _Typical())
        costs = self._of_rows.setdefault(rows, StepCosts(evenly=True))
        if not drafted:
            plain.observe(elapsed_s)
            costs.observe(1, 1.0)
            return
        plain.since += 1
        if plain.times:
            plain.lower(elapsed_s)
            costs.observe(1 + drafted, max(1.0, elapsed_s / plain.seconds))

    def plain_s(self, rows: int) -> float:
        """Return the typical seconds of a step of ``rows`` sequences without drafts; 0 if
        unmeasured."""
        return self._plain[rows].seconds if rows in self._plain else 0.0

    def needs_plain(self, rows: int) -> bool:
        """Return whether the next step should have no drafts, to be measured."""
        plain = self._plain.get(rows)
        if plain is None or plain.times < PLAIN_FIRST or plain.is_doubtful:
            return True
        return plain.since >= min(PLAIN_EVERY, 4 * plain.times)

    def predict_s(self, rows: int, drafted: int = 0) -> float:
        """Return the predicted seconds of a step; 0 if nothing is known."""
        known = self._predicted.get((rows, drafted))
        if known is None:
            known = self._predicted[rows, drafted] = self._predict_s(rows, drafted)
        return known

    def _predict_s(self, rows: int, drafted: int) -> float:
        plain_s, all_ = self.plain_s(rows), self._all
        if not plain_s:
            return all_.predict_s(rows + drafted)
        costs = self._of_rows[rows]
        beyond = 1 + drafted - costs.largest
        if beyond <= 0:
            return plain_s * costs.predict_s(1 + drafted)
        longest, known = costs.predict_s(costs.largest), rows + costs.largest - 1
        if all_.largest < known + beyond:
            assumed = longest * beyond / (rows + ASSUMED_ROWS)
            if costs.largest > 1:
                assumed = min(assumed, beyond * (longest - 1) / (costs.largest - 1))
            return plain_s * (longest + assumed)
        longer_s = all_.predict_s(known + beyond) - all_.predict_s(known)
        return plain_s * longest + max(0.0, longer_s)

    def excess_s(self, rows: int, drafted: int) -> float:
        """Return how much longer a step takes with ``drafted`` drafts than without. Errs on the
        long side."""
        known = self._excess.get((rows, drafted))
        if known is None:
            known = self._excess[rows, drafted] = self._excess_s(rows, drafted)
        return known

    def _excess_s(self, rows: int, drafted: int) -> float:
        plain_s, costs = self.predict_s(rows), self._of_rows.get(rows)
        excess_s = max(0.0, self.predict_s(rows, drafted) - plain_s)
        if costs is None or not drafted or costs.largest <= 1:
            return excess_s
        beyond = max(1.0, drafted / (costs.largest - 1))
        return max(excess_s, beyond * plain_s * (costs.at_least_s(1 + drafted) - 1))

    def measured_excess_s(self, rows: int, drafted: int, elapsed_s: float | None) -> float:
        """Return how much longer a step with drafts took than one without, as far as drafts are
        the cause. If the time is None, return the prediction."""
        if elapsed_s is None:
            return self.excess_s(rows, drafted)
        elapsed_s = self._plausible_s(rows, drafted, elapsed_s)
        return elapsed_s - self.predict_s(rows)

    def _plausible_s(self, rows: int, drafted: int, elapsed_s: float) -> float:
        """Return ``elapsed_s``, or less if something else must have delayed the step."""
        most = OUTLIER if self.knows(rows, drafted) else UNKNOWN_OUTLIER
        return min(elapsed_s, most * self.predict_s(rows, drafted) or elapsed_s)

    def knows(self, rows: int, drafted: int) -> bool:
        """Return whether steps of this size were measured a few times."""
        costs = self._of_rows.get(rows)
        return costs is not None and costs.knows(1 + drafted)

    def max_drafts(self, rows: int) -> int:
        """Return the max number of drafts of a step, so that it has at most twice the tokens of
        the largest measured one."""
        return max(1, 2 * self._all.largest - rows)

    def affordable(self, rows: int, count: int, room_s: float) -> int:
        """Return how many drafts of one sequence, at most ``count``, cost all ``rows`` of a step
        no more than ``room_s`` together: alone, or as its share if all have as many."""
        if room_s < 0:
            return 0
        count, paid = min(count, self.max_drafts(rows)), 0
        while paid < count and self._cost_s(rows, paid + 1) <= room_s:
            paid += 1
        return paid

    def _cost_s(self, rows: int, drafted: int) -> float:
        """Return what ``drafted`` drafts of one sequence cost all ``rows`` of a step together."""
        return min(rows * self.excess_s(rows, drafted), self.excess_s(rows, rows * drafted))

    def best_lengths(
        self, rows: int, gains: Sequence[Sequence[float]], max_s: float | None = None
    ) -> list[int]:
        """Return how many drafts to verify for each sequence that has some, in a step of
        ``rows`` sequences: the numbers with the most tokens per second that make the step at
        most ``max_s`` longer.

        ``gains`` are, for each sequence, the chances that each draft and all before it are
        accepted, which decrease from one draft to the next."""
        order = sorted(
            ((gain, row) for row, chances in enumerate(gains) for gain in chances), reverse=True
        )
        lengths, best = [0] * len(gains), 0
        expected = float(rows)
        best_rate = WORTH_IT * expected / (self.predict_s(rows) or 1.0)
        most = self.max_drafts(rows)
        for number, (gain, _) in enumerate(order[:most], 1):
            expected += gain
            if max_s is not None and self.excess_s(rows, number) > max_s:
                break
            rate = expected / (self.predict_s(rows, number) or 1.0)
            if rate > best_rate or (gain >= PROBED and most == number == 1):
                best, best_rate = number, rate
        for _, row in order[:best]:
            lengths[row] += 1
        return lengths

    def shared_lengths(
        self,
        rows: int,
        gains: Sequence[Sequence[float]],
        rooms: Sequence[float],
        *,
        strict: bool = False,
    ) -> list[int]:
        """Return how many drafts to verify for each sequence, like `best_lengths`, so that no
        sequence in the step loses time.

        ``rooms`` are the seconds by which drafts may make a step longer, for each sequence. If some
        have too little, only these may have drafts, within the room of the others: accepted drafts
        restore their room. A sequence with no room left may still draft alone. Otherwise one of
        eight sequences that all quote, each of which is behind at times, would keep the others from
        drafting for good. ``strict``: it may not."""
        if not any(self.best_lengths(rows, gains)):
            return [0] * len(gains)  # nor any part of them, of however few sequences
        order = sorted(range(len(rooms)), key=rooms.__getitem__)
        lengths = self.best_lengths(rows, gains, rooms[order[0]] if order else None)
        if strict:
            return lengths
        least_s = -OVERDRAWN_STEPS * self.plain_s(rows)
        for number in range(1, len(order) + 1):
            if any(lengths) or (number > 1 and rooms[order[0]] < least_s):
                break
            others_s = rooms[order[number]] if number < len(order) else self.plain_s(rows)
            behind = set(order[:number])
            own = [chances if row in behind else () for row, chances in enumerate(gains)]
            if others_s > 0 and any(own):
                lengths = self.best_lengths(rows, own, others_s)
        return lengths

    def seconds(self) -> dict[int, float]:
        """Return the known times of all steps, by number of tokens."""
        return self._all.seconds()

    def known(self) -> dict[int, dict[int, float]]:
        """Return the seconds of measured steps, by number of sequences, then by number of
        drafts."""
        return {
            rows: {tokens - 1: plain_s * times for tokens, times in costs.seconds().items()}
            for rows, costs in self._of_rows.items()
            if (plain_s := self.plain_s(rows))
        }

    def remember(self, known: Mapping[int, Mapping[int, float]]) -> None:
        """Start from an earlier result of `known`, which counts as measured once."""
        for rows, by_drafts in known.items():
            for drafted, seconds in sorted(by_drafts.items()):
                self._learn(rows, drafted, seconds)
            if rows in self._plain and self._plain[rows].times:
                self._plain[rows].times = PLAIN_FIRST
        self.changes = 0
