"""Chooses the drafts of each step: their source, and their number for each sequence."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from time import thread_time

from engine.speculation.acceptance import AcceptanceRates
from engine.speculation.accounts import EARNED_STEPS, SourceTotals, VerifiedStep
from engine.speculation.batch_costs import BatchCosts
from engine.speculation.batched import BatchDrafting, BatchRow
from engine.speculation.prediction import PredictionSource, num_common
from engine.speculation.sequence_drafts import DraftRow, SequenceDrafts
from engine.speculation.source import (
    BatchSource,
    DraftSource,
    ExecutorGuesses,
    Proposal,
    possible_part,
)
from shared.wire import DraftStats, Submit

MAX_DRAFT_TOKENS = 16
"""Max drafts of a sequence in a step, regardless of the settings."""
PROBE_TOKENS = 48
"""After this many outputs, a sequence whose drafts are rarely accepted tries again."""
SEARCHES, LONGEST_REST = 16, 3
"""After this many searches in vain, one step is left out between two searches; after twice as many,
two, and so on up to the second number. A step leaves nothing in the caches of a CPU that a search
needs, which then takes up to 0.7 % of a step: as much as drafts that fail."""
GUESS_EVERY = 2
"""Number of tokens between two guesses of a source that is idle: each takes a search."""

SourceMaker = Callable[[Submit, object], DraftSource | None]
"""Creates the source of one sequence from its request and its compiled grammar; None if it could
not propose anything."""


@dataclass(frozen=True, kw_only=True)
class SpeculationOptions:
    """Settings that decide how much is drafted; ``--help`` describes them."""

    tokens: int = 5  # max drafts of one sequence
    largest_batch: int = 8  # number of decoding sequences above which nothing is drafted
    min_rate: float = 0.3  # acceptance rate below which a sequence stops
    adapts: bool = True  # whether rates and costs decide; otherwise the maximum is drafted
    by_sequence: bool = True  # whether each sequence has its own rates
    protects: bool = False  # whether drafts of others must not slow down any sequence


class Speculator:
    """The drafts of all sequences of an engine. It is independent of slots, plans and devices."""

    def __init__(
        self,
        options: SpeculationOptions,
        sources: Sequence[SourceMaker],
        guesses: str = "",
        batch_source: BatchSource | None = None,
        costs: BatchCosts | None = None,
    ) -> None:
        """``guesses`` is `ExecutorSpec.guesses`, empty if the executor's guesses are not used.
        ``costs`` are the known times of steps."""
        self.options = options
        self.costs = BatchCosts() if costs is None else costs
        self._sources = sources
        self._guesses = guesses
        self._totals = SourceTotals()
        self._batch: BatchDrafting | None = None
        if batch_source is not None:
            self._batch = BatchDrafting(batch_source, options.adapts, self._totals)
        self._rates = AcceptanceRates(by_sequence=options.by_sequence)
        self._step = VerifiedStep(1, 0.0, 0.0, None)
        self._least_room_s = math.inf
        """By how much all sequences of the last step allowed drafts to make it longer."""
        self._looks_ahead = False
        """Whether steps are built while others run, except those with drafts, and those after."""
        self._pace = SearchPace(rests=options.adapts and not guesses and batch_source is None)

    def begin(self, request: Submit, grammar: object) -> SequenceDrafts | None:
        """Return the state of a new sequence, None if no source can propose anything for it."""
        sources = [s for make in self._sources if (s := make(request, grammar)) is not None]
        guesses = ExecutorGuesses(self._guesses) if self._guesses else None
        if guesses is not None:
            sources.append(guesses)
        if not sources and self._batch is None:
            return None
        self._pace.begin()
        return SequenceDrafts(request, sources, guesses=guesses)

    def waits(self, row: DraftRow, num_rows: int) -> bool:
        """Return whether ``row``, in a step of ``num_rows`` sequences, should wait for its token
        in flight, the first one that ``row.limit`` counts, because drafts after it are likely."""
        self._pace.begin()  # otherwise a sequence might wait for a search that is left out
        if num_rows > self.options.largest_batch or not self._may_draft(num_rows):
            return False
        plain_s = self.costs.plain_s(num_rows)
        lost_s = plain_s if num_rows > 1 else 0.0  # others run a step meanwhile
        self._looks_ahead = True
        found = self._guess(row, num_rows, max_steps=EARNED_STEPS)
        room_s = self._room_s(row, num_rows)
        if self.options.adapts and room_s < lost_s:
            return False
        if (
            (batch := self._batch) is not None
            and row.limit > 1
            and not self._has_stopped(row)
            and not row.drafts.account_of(batch.name).is_silent(len(row.tokens))
            and batch.waits()
        ):
            return True
        after, best = 0.0, None
        for proposal in found:
            rest = self._paid(row, num_rows, proposal._replace(tokens=proposal.tokens[1:])).tokens
            if not rest or self._is_idle(row, proposal.source):
                continue
            if not self.options.adapts:
                return True
            chances = self._rates.chances(row.drafts.rates, proposal)[1 : 1 + len(rest)]
            is_alone = num_rows == 1 and self.options.protects
            most_s = room_s if is_alone else self._least_room_s
            worth = self.costs.best_lengths(num_rows, [chances], most_s)[0]
            if best is None or sum(chances[:worth]) > after:
                after, best = sum(chances[:worth]), proposal
        if best is not None and not after:  # a device would lose its look-ahead for nothing
            self._rates.fade([(row.drafts.rates, best)])
        return after * plain_s > lost_s

    def waited(self, drafts: SequenceDrafts, num_rows: int) -> None:
        """Record that a sequence waits for its drafts while ``num_rows`` others run a step."""
        drafts.account.step(0.0, self.costs.plain_s(num_rows))

    def propose(self, row: DraftRow, num_rows: int = 1) -> Proposal | None:
        """Return the best guess for one sequence of a step, as far as its source's account can
        pay for it; None if there is none or its rate is too low."""
        found = self._guess(row, num_rows)
        wanted = (each for each in found if not self._is_idle(row, each.source))
        paid = [self._paid(row, num_rows, each) for each in wanted]
        proposals = [each for each in paid if each.tokens]
        if len(proposals) < 2:
            return proposals[0] if proposals else None
        return max(proposals, key=lambda p: sum(self._rates.chances(row.drafts.rates, p)))

    def _guess(self, row: DraftRow, num_rows: int, *, max_steps: float = 0.0) -> list[Proposal]:
        """Return what each source expects next, also those that are idle, and keep it to be
        compared with what comes. ``max_steps``: see `SourceAccount.guessed`."""
        limit, drafts = min(row.limit, self.options.tokens), row.drafts
        if limit < 1:
            return []
        drafts.predicted = ()
        self._check_guesses(row, num_rows, max_steps)
        asked = (source for source in drafts.sources if source.NAME not in drafts.guessed)
        # All are asked first: what is possible depends on what a grammar has seen by then.
        found = [self._ask(source, row, limit, num_rows) for source in asked]
        proposals = [possible_part(each, drafts.sources) for each in found if each is not None]
        for proposal in proposals:
            drafts.guessed.setdefault(proposal.source, (len(row.tokens), proposal))
            if proposal.source == PredictionSource.NAME:
                drafts.predicted = proposal.tokens
        return proposals

    def guesses_after(self, row: DraftRow, num_rows: int) -> int:
        """Return how many tokens the executor should guess after the next decode of ``row``,
        which may then be followed by ``row.limit`` drafts: as many as would be verified."""
        if row.drafts.guesses is None or num_rows > self.options.largest_batch:
            return 0
        if self._has_stopped(row) or not self._may_draft(num_rows):
            return 0
        most = max(0, min(row.limit, self.options.tokens))
        if not most or not self.options.adapts:
            return most
        likely = self._paid(row, num_rows, Proposal((0,) * most, self._guesses))  # of any tokens
        if not likely.tokens:
            return 0
        chances = self._rates.chances(row.drafts.rates, likely)
        worth = self.costs.best_lengths(num_rows, [chances])[0]
        if not worth:
            self._rates.fade([(row.drafts.rates, likely)])
        return worth

    def choose(self, num_rows: int, rows: Sequence[DraftRow]) -> list[Proposal | None]:
        """Return the drafts to verify for each of ``rows``, in a step of ``num_rows`` sequences.
        Rows with a limit of 0 get no drafts, but take part in the step."""
        is_known = num_rows <= self.options.largest_batch and self._may_draft(num_rows)
        if not is_known or self._pace.skips_step():
            return [None] * len(rows)
        began = thread_time()
        found = self._choose(num_rows, rows)
        self._pace.searched(found=any(found))
        waited_s = self._batch.take_waited_s() if self._batch else 0.0
        elapsed_s = thread_time() - began + waited_s
        for row in rows:
            row.drafts.account.step(0.0, elapsed_s)
        return found

    def _choose(self, num_rows: int, rows: Sequence[DraftRow]) -> list[Proposal | None]:
        proposals = [self.propose(row, num_rows) for row in rows]
        rooms = [self._room_s(row, num_rows) for row in rows]
        self._least_room_s = min(rooms, default=math.inf) if self.options.protects else math.inf
        if self._batch is not None:
            proposals = self._ask_batch_source(self._batch, num_rows, rows, proposals)
        if not self.options.adapts:
            return proposals
        gains = [
            self._rates.chances(row.drafts.rates, proposal) if proposal else []
            for row, proposal in zip(rows, proposals, strict=True)
        ]
        if self.options.protects:
            lengths = self.costs.shared_lengths(num_rows, gains, rooms, strict=self._looks_ahead)
        else:
            lengths = self.costs.best_lengths(num_rows, gains)
        chosen = zip(rows, proposals, lengths, strict=True)
        self._rates.fade(
            (row.drafts.rates, proposal)
            for row, proposal, length in chosen
            if proposal and not length
        )
        return [
            proposal._replace(tokens=proposal.tokens[:length]) if proposal and length else None
            for proposal, length in zip(proposals, lengths, strict=True)
        ]

    def verified(self, row: DraftRow, proposal: Proposal, accepted: int) -> None:
        """Record that the first ``accepted`` tokens of ``proposal``, which continue
        ``row.tokens``, were accepted."""
        drafted, drafts = len(proposal.tokens), row.drafts
        saved_s = self._step.saved_s(drafted, accepted)
        self._totals.verified(proposal.source, drafted, accepted, saved_s)
        account = drafts.account_of(proposal.source)
        self._step.verified(drafts.account, account, drafted, accepted)
        predicted = num_common(proposal.tokens, drafts.predicted)
        drafts.accepted += min(predicted, accepted)
        drafts.rejected += max(0, predicted - accepted)
        tried = min(drafted, accepted + 1)
        drafts.rate.observe(tried, accepted)
        self._rates.learn(drafts.rates, proposal, tried, accepted, verified=True)
        drafts.guessed.pop(proposal.source, None)
        if drafts.rate.rate() < self.options.min_rate:
            drafts.next_probe = len(row.tokens) + PROBE_TOKENS
            drafts.resumed.clear()

    def observe_step(
        self,
        rows: int,
        drafted: int,
        elapsed_s: float | None,
        decoded: Iterable[SequenceDrafts] = (),
        guessing: Collection[SequenceDrafts] = (),
        *,
        alone: bool = False,
        waited: Collection[SequenceDrafts] = (),
    ) -> None:
        """Record the time of a step of ``rows`` sequences with ``drafted`` drafts, before they
        are `verified`; None if the step also computed chunks. ``decoded`` are the sequences with
        sources. For those ``guessing``, the executor has guessed the next tokens in this step.
        ``alone``: see `InFlightStep.begins_alone`. That costs time, also without drafts, and is
        charged to those that had ``waited`` for theirs."""
        is_plain = not drafted and not guessing
        excess_s = 0.0 if is_plain else self.costs.measured_excess_s(rows, drafted, elapsed_s)
        if elapsed_s is not None and (drafted or (is_plain and not alone)):
            self.costs.observe(rows, drafted, elapsed_s)
        plain_s = self.costs.predict_s(rows)
        alone_s = max(0.0, min(elapsed_s, 2 * plain_s) - plain_s) if alone and elapsed_s else 0.0
        if guessing and not drafted:
            self._totals.spent(self._guesses, excess_s)
            for drafts in guessing:
                drafts.account_of(self._guesses).spend(rows * excess_s / len(guessing))
        # A single draft pays for all rows: if it paid for one step's noise too, it would silence
        # its source.
        is_known = drafted and self.costs.knows(rows, drafted)
        paid_s = self.costs.excess_s(rows, drafted) if is_known else excess_s
        shares = max(1, drafted)
        measured_s = None if elapsed_s is None else excess_s / shares
        self._step = VerifiedStep(rows, plain_s, paid_s / shares, measured_s)
        for drafts in decoded:
            stalled_s = alone_s if is_plain and drafts in waited else 0.0
            drafts.account.step(plain_s, paid_s + stalled_s)

    def stats(self) -> DraftStats:
        return DraftStats(
            sources=self._totals.counts(),
            rates=self._rates.known(),
            step_s={str(tokens): seconds for tokens, seconds in self.costs.seconds().items()},
        )

    def _check_guesses(self, row: DraftRow, num_rows: int, max_steps: float) -> None:
        """Learn from earlier guesses that were not verified, by comparing them with the tokens
        that came. This costs little, so idle sources guess too. ``max_steps``: see
        `SourceAccount.guessed`."""
        drafts, plain_s = row.drafts, self.costs.plain_s(num_rows)
        for source, (place, guess) in [*drafts.guessed.items()]:
            if self._is_idle(row, source) and len(row.tokens) < place + GUESS_EVERY:
                continue
            del drafts.guessed[source]
            came = row.tokens[place : place + len(guess.tokens)]
            right = num_common(guess.tokens, came)
            if guess.kinds:  # otherwise the first tokens would count for all
                known = min(right + 1, len(came))
                self._rates.learn(drafts.rates, guess, known, right, verified=False)
            drafts.account.guessed(right, plain_s)
            drafts.account_of(source).guessed(right, plain_s, max_steps)
            if right:
                drafts.resumed.add(source)

    def _is_idle(self, row: DraftRow, source: str) -> bool:
        """Return whether ``source`` only guesses: it is silent, or the sequence has stopped and
        none of the source's guesses was right since then."""
        is_silent = row.drafts.account_of(source).is_silent(len(row.tokens))
        return is_silent or (self._has_stopped(row) and source not in row.drafts.resumed)

    def _room_s(self, row: DraftRow, num_rows: int) -> float:
        """Return how much longer the next step may take for drafts of ``row``."""
        after_s = self.costs.excess_s(1, 1) if self._looks_ahead and num_rows == 1 else 0.0
        return row.drafts.account.room_s(self.costs.plain_s(num_rows)) - after_s

    def _may_draft(self, num_rows: int) -> bool:
        """Return whether the time of a step without drafts is known, or does not matter."""
        return not self.options.adapts or not self.costs.needs_plain(num_rows)

    def _paid(self, row: DraftRow, num_rows: int, proposal: Proposal) -> Proposal:
        """Return the part of ``proposal`` that its source's account can pay for even if nothing
        is accepted. If that is nothing, the source becomes silent for a while."""
        if not self.options.adapts or not proposal.tokens:
            return proposal
        drafts, num_tokens = row.drafts, len(row.tokens)
        account = drafts.account_of(proposal.source)
        if account.is_silent(num_tokens):
            return proposal._replace(tokens=())
        times = self.costs.plain_s(num_rows), drafts.account.without_s
        paid = self.costs.affordable(num_rows, len(proposal.tokens), account.stake_s(*times))
        if not paid:
            paid = self.costs.affordable(num_rows, 1, account.room_s(*times))
        if not paid and account.is_new:
            paid = 1  # otherwise no source would ever be tried in a large batch
        if not paid:
            account.begin_silence(num_tokens)
        return proposal._replace(tokens=proposal.tokens[:paid])

    def _ask(
        self, source: DraftSource, row: DraftRow, limit: int, num_rows: int
    ) -> Proposal | None:
        began = thread_time()
        if (proposal := source.propose(row.tokens, limit)) is not None:
            elapsed_s = thread_time() - began
            self._totals.spent(proposal.source, elapsed_s)
            if not self._is_idle(row, proposal.source):
                row.drafts.account_of(proposal.source).spend(num_rows * elapsed_s)
        return proposal

    def _ask_batch_source(
        self,
        batch: BatchDrafting,
        num_rows: int,
        rows: Sequence[DraftRow],
        proposals: Sequence[Proposal | None],
    ) -> list[Proposal | None]:
        """Return ``proposals``, some of them replaced by `BatchDrafting`, within the room of all
        rows."""
        found = list(proposals)
        asked: dict[int, BatchRow] = {}
        for number, (row, other) in enumerate(zip(rows, proposals, strict=True)):
            count = min(row.limit, self.options.tokens)
            if count < 1 or self._has_stopped(row):
                continue
            unknown = self._paid(row, num_rows, batch.of_unknown(count))
            if not unknown.tokens:
                continue
            asked[number] = BatchRow(
                row.request(len(unknown.tokens)),
                other,
                sum(self._rates.chances(row.drafts.rates, other)) if other else 0.0,
                self._rates.chances(row.drafts.rates, unknown),
            )
        chosen = batch.propose(num_rows, list(asked.values()), self.costs, self._least_room_s)
        if not batch.pays:
            self._rates.fade((rows[number].drafts.rates, batch.of_unknown(1)) for number in asked)
        for number, proposal in zip(asked, chosen, strict=True):
            drafts = rows[number].drafts
            if proposal is not None and proposal.source == batch.name:
                drafts.account_of(batch.name).spend(num_rows * batch.last_s)
            cut = proposal and possible_part(proposal, drafts.sources)
            found[number] = cut if cut and cut.tokens else None
        return found

    def _has_stopped(self, row: DraftRow) -> bool:
        if not self.options.adapts or not self.options.by_sequence:
            return False
        low = row.drafts.rate.rate() < self.options.min_rate
        return low and len(row.tokens) < row.drafts.next_probe


class SearchPace:
    """Decides in which steps drafts are looked for: fewer as long as nothing worth verifying is
    found. Drafts that begin in between are found up to three tokens later."""

    def __init__(self, *, rests: bool) -> None:
        """Without ``rests`` there is a search in each step: a model makes the drafts anyway."""
        self._rests = rests
        self._in_vain = 0  # searches since something was found, or a sequence began
        self._left = 0  # steps until the next search

    def begin(self) -> None:
        """Search in each step again: a sequence begins, and may be one that repeats itself."""
        self._in_vain = self._left = 0

    def skips_step(self) -> bool:
        """Return whether there is no search in this step. Called once a step."""
        self._left -= 1
        return self._left >= 0

    def searched(self, *, found: bool) -> None:
        """Record whether a search found drafts that are worth verifying."""
        self._in_vain = 0 if found else self._in_vain + 1
        self._left = min(self._in_vain // SEARCHES, LONGEST_REST) if self._rests else 0
