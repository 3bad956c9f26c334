"""Chooses the drafts of each step: their source, and their number for each sequence."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Sequence
from time import thread_time

from engine.speculation.acceptance import AcceptanceRate
from engine.speculation.accounts import DraftAccounts
from engine.speculation.batch_costs import BatchCosts
from engine.speculation.batched import BatchDrafting, BatchRow
from engine.speculation.executor_guesses import ExecutorGuesses
from engine.speculation.options import SpeculationOptions
from engine.speculation.prediction import PredictionSource, num_common
from engine.speculation.regret import VerifiedStep
from engine.speculation.searches import SearchPace
from engine.speculation.sequence_drafts import DraftRow, SequenceDrafts
from engine.speculation.sharing import shared_lengths
from engine.speculation.source import (
    BatchSource,
    DraftSource,
    Proposal,
    possible_part,
)
from shared.wire import DraftStats, Submit

MAX_DRAFT_TOKENS = 16
"""Max drafts of a sequence in a step, regardless of the settings."""
MIN_CHANCE = 0.01
"""Drafts with a lower chance are not considered: no step is cheap enough for them."""
PROBE_TOKENS = 48
"""After this many outputs, a sequence whose drafts are rarely accepted tries again."""
GUESS_EVERY = 2
"""Number of tokens between two guesses of a source that is idle: each takes a search."""

SourceMaker = Callable[[Submit, object], DraftSource | None]
"""Creates the source of one sequence from its request and its compiled grammar; None if it could
not propose anything."""


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
        self._accounts = DraftAccounts()
        self._batch: BatchDrafting | None = None
        if batch_source is not None:
            self._batch = BatchDrafting(batch_source, options.adapts, self._accounts)
        self._rates: dict[tuple[str, int], AcceptanceRate] = {}
        self._step = VerifiedStep(1, 0.0, 0.0)
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
        if self.options.adapts and row.drafts.account.room_s(plain_s) < lost_s:
            return False
        if (
            (batch := self._batch) is not None
            and row.limit > 1
            and not self._has_stopped(row)
            and not row.drafts.account_of(batch.name).is_silent(len(row.tokens))
            and batch.waits()
        ):
            return True
        if (proposal := self.propose(row, num_rows)) is None or not self.options.adapts:
            return proposal is not None and len(proposal.tokens) > 1
        after = self._chances(row.drafts, proposal)[1:]
        worth = self.costs.best_lengths(num_rows, [after])[0]
        if not worth:  # a device would lose its look-ahead for nothing, which no account records
            self._fade([(row, proposal)])
        return sum(after[:worth]) * plain_s > lost_s

    def waited(self, drafts: SequenceDrafts, num_rows: int) -> None:
        """Record that a sequence waits for its drafts while ``num_rows`` others run a step."""
        drafts.account.step(0.0, self.costs.plain_s(num_rows))

    def propose(self, row: DraftRow, num_rows: int = 1) -> Proposal | None:
        """Return the best guess for one sequence of a step, as far as its source's account can
        pay for it; None if there is none or its rate is too low."""
        limit = min(row.limit, self.options.tokens)
        if limit < 1:
            return None
        drafts, proposals = row.drafts, []
        drafts.predicted = ()
        self._check_guesses(row, num_rows)
        asked = (source for source in drafts.sources if source.NAME not in drafts.guessed)
        # All are asked first: what is possible depends on what a grammar has seen by then.
        for found in [self._ask(source, row, limit, num_rows) for source in asked]:
            if found is None:
                continue
            possible = possible_part(found, drafts.sources)
            drafts.guessed.setdefault(found.source, (len(row.tokens), possible))
            if possible.source == PredictionSource.NAME:
                drafts.predicted = possible.tokens
            if self._is_idle(row, found.source):
                continue
            if (paid := self._paid(row, num_rows, possible)).tokens:
                proposals.append(paid)
        if len(proposals) < 2:
            return proposals[0] if proposals else None
        return max(proposals, key=lambda p: sum(self._chances(drafts, p)))

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
        worth = self.costs.best_lengths(num_rows, [self._chances(row.drafts, likely)])[0]
        if not worth:
            self._fade([(row, likely)])
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
        plain_s = self.costs.plain_s(num_rows)
        rooms = [row.drafts.account.room_s(plain_s) for row in rows]
        if self._batch is not None:
            room_s = min(rooms, default=math.inf) if self.options.protects else math.inf
            proposals = self._ask_batch_source(self._batch, num_rows, rows, proposals, room_s)
        if not self.options.adapts:
            return proposals
        gains = [
            self._chances(row.drafts, proposal) if proposal else []
            for row, proposal in zip(rows, proposals, strict=True)
        ]
        if self.options.protects:
            lengths = shared_lengths(self.costs, num_rows, gains, rooms)
        else:
            lengths = self.costs.best_lengths(num_rows, gains)
        chosen = zip(rows, proposals, lengths, strict=True)
        self._fade((row, proposal) for row, proposal, length in chosen if proposal and not length)
        return [
            proposal._replace(tokens=proposal.tokens[:length]) if proposal and length else None
            for proposal, length in zip(proposals, lengths, strict=True)
        ]

    def verified(self, row: DraftRow, proposal: Proposal, accepted: int) -> None:
        """Record that the first ``accepted`` tokens of ``proposal``, which continue
        ``row.tokens``, were accepted."""
        drafted, drafts = len(proposal.tokens), row.drafts
        self._accounts.verified(proposal.source, drafted, accepted)
        account = drafts.account_of(proposal.source)
        self._step.verified(drafts.account, account, drafted, accepted)
        predicted = num_common(proposal.tokens, drafts.predicted)
        drafts.accepted += min(predicted, accepted)
        drafts.rejected += max(0, predicted - accepted)
        tried = min(drafted, accepted + 1)
        drafts.rate.observe(tried, accepted)
        self._learn_rates(drafts, proposal, tried, accepted, verified=True)
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
    ) -> None:
        """Record the time of a step of ``rows`` sequences with ``drafted`` drafts, before they
        are `verified`; None if the step also computed chunks. ``decoded`` are the sequences with
        sources. For those ``guessing``, the executor has guessed the next tokens in this step."""
        is_plain = not drafted and not guessing
        excess_s = 0.0 if is_plain else self.costs.measured_excess_s(rows, drafted, elapsed_s)
        if elapsed_s is not None and (drafted or is_plain):
            self.costs.observe(rows, drafted, elapsed_s)
        plain_s = self.costs.predict_s(rows)
        if guessing and not drafted:
            self._accounts.spent(self._guesses, excess_s)
            for drafts in guessing:
                drafts.account_of(self._guesses).spend(rows * excess_s / len(guessing))
        # A single draft pays for all rows: if it paid for one step's noise too, it would silence
        # its source.
        is_known = drafted and self.costs.knows(rows, drafted)
        paid_s = self.costs.excess_s(rows, drafted) if is_known else excess_s
        self._step = VerifiedStep(rows, plain_s, paid_s / drafted if drafted else 0.0)
        for drafts in decoded:
            drafts.account.step(plain_s, paid_s)
        if elapsed_s is None:
            self._accounts.skip_step()
        elif drafted or is_plain:
            self._accounts.begin_step(rows, drafted, plain_s, plain_s + excess_s)

    def stats(self) -> DraftStats:
        return DraftStats(
            sources=self._accounts.counts(),
            rates={f"{source}/{kind}": rate.rate() for (source, kind), rate in self._rates.items()},
            step_s={str(tokens): seconds for tokens, seconds in self.costs.seconds().items()},
        )

    def _check_guesses(self, row: DraftRow, num_rows: int) -> None:
        """Learn from earlier guesses that were not verified, by comparing them with the tokens
        that came. This costs little, so idle sources guess too."""
        drafts, plain_s = row.drafts, self.costs.plain_s(num_rows)
        for source, (place, guess) in [*drafts.guessed.items()]:
            if self._is_idle(row, source) and len(row.tokens) < place + GUESS_EVERY:
                continue
            del drafts.guessed[source]
            came = row.tokens[place : place + len(guess.tokens)]
            right = num_common(guess.tokens, came)
            if guess.kinds:  # otherwise the first tokens would count for all
                self._learn_rates(drafts, guess, min(right + 1, len(came)), right, verified=False)
            drafts.account.guessed(right, plain_s)
            drafts.account_of(source).guessed(right, plain_s)
            if right:
                drafts.resumed.add(source)

    def _learn_rates(
        self, drafts: SequenceDrafts, proposal: Proposal, tried: int, right: int, *, verified: bool
    ) -> None:
        """Record that the first ``right`` tokens of ``proposal`` came, and the first ``tried`` are
        known. Only ``verified`` ones count for other sequences."""
        by_kind = Counter(proposal.kind(index) for index in range(tried))
        right_by_kind = Counter(proposal.kind(index) for index in range(right))
        for kind, count in by_kind.items():
            for rate in self._rates_of(drafts, proposal, kind)[: 1 + verified]:
                rate.observe(count, right_by_kind[kind])

    def _is_idle(self, row: DraftRow, source: str) -> bool:
        """Return whether ``source`` only guesses: it is silent, or the sequence has stopped and
        none of the source's guesses was right since then."""
        is_silent = row.drafts.account_of(source).is_silent(len(row.tokens))
        return is_silent or (self._has_stopped(row) and source not in row.drafts.resumed)

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
            self._accounts.spent(proposal.source, elapsed_s)
            if not self._is_idle(row, proposal.source):
                row.drafts.account_of(proposal.source).spend(num_rows * elapsed_s)
        return proposal

    def _ask_batch_source(
        self,
        batch: BatchDrafting,
        num_rows: int,
        rows: Sequence[DraftRow],
        proposals: Sequence[Proposal | None],
        room_s: float,
    ) -> list[Proposal | None]:
        """Return ``proposals``, some of them replaced by `BatchDrafting`, within ``room_s``."""
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
                sum(self._chances(row.drafts, other)) if other else 0.0,
                self._chances(row.drafts, unknown),
            )
        chosen = batch.propose(num_rows, list(asked.values()), self.costs, room_s)
        if not batch.pays:
            self._fade((rows[number], batch.of_unknown(1)) for number in asked)
        for number, proposal in zip(asked, chosen, strict=True):
            drafts = rows[number].drafts
            if proposal is not None and proposal.source == batch.name:
                drafts.account_of(batch.name).spend(num_rows * batch.last_s)
            cut = proposal and possible_part(proposal, drafts.sources)
            found[number] = cut if cut and cut.tokens else None
        return found

    def _fade(self, doubtful: Iterable[tuple[DraftRow, Proposal]]) -> None:
        """Record that these proposals were not worth while: once per shared rate, regardless of
        the number of sequences."""
        rates = {
            id(rate): rate
            for row, proposal in doubtful
            for rate in self._rates_of(row.drafts, proposal, proposal.kind(0))
        }
        for rate in rates.values():
            rate.fade()

    def _has_stopped(self, row: DraftRow) -> bool:
        if not self.options.adapts or not self.options.by_sequence:
            return False
        low = row.drafts.rate.rate() < self.options.min_rate
        return low and len(row.tokens) < row.drafts.next_probe

    def _chances(self, drafts: SequenceDrafts, proposal: Proposal) -> list[float]:
        """Return the chance that each token of ``proposal`` and all before it are accepted, down
        to `MIN_CHANCE`."""
        chances, chance = [], 1.0
        rates: dict[int, float] = {}
        for index in range(len(proposal.tokens)):
            if (kind := proposal.kind(index)) not in rates:
                own, common = self._rates_of(drafts, proposal, kind)
                by_sequence = self.options.by_sequence
                rates[kind] = own.rate(common.rate()) if by_sequence else common.rate()
            chance *= rates[kind]
            if chance < MIN_CHANCE:
                break
            chances.append(chance)
        return chances

    def _rates_of(
        self, drafts: SequenceDrafts, proposal: Proposal, kind: int
    ) -> tuple[AcceptanceRate, AcceptanceRate]:
        """Return the sequence's own rate for tokens of ``kind``, and the rate of all sequences."""
        key = proposal.source, kind
        for rates in (drafts.rates, self._rates):
            if key not in rates:
                rates[key] = AcceptanceRate(proposal.likely[kind])
        return drafts.rates[key], self._rates[key]
