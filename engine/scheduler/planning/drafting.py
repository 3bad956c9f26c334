"""Drafts in plans: how many a sequence may have, and their outcome."""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf

from engine.scheduler.config import SchedulerConfig
from engine.scheduler.planning.plan_builder import InFlightStep
from engine.scheduler.sequences.sequence import Sequence
from engine.speculation.sequence_drafts import DraftRow, SequenceDrafts
from engine.speculation.source import Proposal
from engine.speculation.speculator import Speculator
from shared import wire


class Drafting:
    """Limits the proposals of a `Speculator` to what a plan may verify. Without one it does
    nothing."""

    def __init__(self, config: SchedulerConfig, speculator: Speculator | None) -> None:
        self._config = config
        self._speculator = speculator
        self._waiting: list[SequenceDrafts] = []
        """Sequences that are left out of the next plan."""

    def begin(self, request: wire.Submit, grammar: object) -> SequenceDrafts | None:
        return None if self._speculator is None else self._speculator.begin(request, grammar)

    def waits(self, seq: Sequence, num_rows: int) -> bool:
        """Return whether ``seq`` is left out of this plan, because its drafts are in flight, or
        because its next token, after which drafts are likely, is."""
        if self._speculator is None or not seq.num_inflight or seq.drafts is None:
            return False
        waits = bool(seq.num_inflight_drafts or seq.awaits_guesses)
        if not waits:
            limit = self._limit(seq) + 1  # the first stands for the token in flight
            row = DraftRow(seq.drafts, seq.token_ids, limit)
            waits = self._speculator.waits(row, num_rows)
        if waits:
            self._waiting.append(seq.drafts)
            seq.drafts.has_waited = True
        return waits

    def note_waits(self, step: InFlightStep, rows: SequenceOf[Sequence]) -> None:
        """Note which of ``rows``, the decodes of ``step``, waited for it, and whether all did."""
        in_flight = any(seq.num_inflight for seq in rows)
        step.begins_alone = self._config.look_ahead and not in_flight
        for seq in rows:
            if seq.drafts is not None and seq.drafts.has_waited:
                seq.drafts.has_waited = False
                step.has_waited.add(seq)

    def choose(self, rows: SequenceOf[Sequence]) -> dict[Sequence, Proposal]:
        """Return drafts for those of ``rows`` that get any. ``rows`` are all sequences that
        decode in this plan."""
        if self._speculator is None:
            return {}
        if rows:
            for drafts in self._waiting:
                self._speculator.waited(drafts, len(rows))
        self._waiting.clear()
        asked = {
            seq: DraftRow(seq.drafts, seq.token_ids, 0 if seq.num_inflight else self._limit(seq))
            for seq in rows
            if seq.drafts is not None
        }
        chosen = self._speculator.choose(len(rows), list(asked.values()))
        found = zip(asked, chosen, strict=True)
        cut = {seq: self._cut(seq, proposal) for seq, proposal in found if proposal is not None}
        return {seq: proposal for seq, proposal in cut.items() if proposal.tokens}

    def guesses_after(self, seq: Sequence, num_drafts: int, num_rows: int) -> int:
        """Return how many tokens the executor should guess after the next decode of ``seq``.
        ``num_rows`` rows decode in the plan, and this decode has ``num_drafts`` drafts."""
        if self._speculator is None or seq.drafts is None:
            return 0
        end = seq.next_position + 1 + num_drafts  # if all drafts are accepted
        limit = min(seq.capacity, seq.max_positions) - end - 1
        return self._speculator.guesses_after(DraftRow(seq.drafts, seq.token_ids, limit), num_rows)

    def guessed(self, seq: Sequence, guesses: tuple[int, ...]) -> None:
        """Record the executor's guesses for the tokens after those of ``seq``."""
        if seq.drafts is not None and seq.drafts.guesses is not None:
            seq.drafts.guesses.take(len(seq.token_ids), guesses)

    def verified(self, seq: Sequence, proposal: Proposal, accepted: int) -> None:
        """Record how many tokens of a ``proposal`` for ``seq`` were accepted."""
        if self._speculator is not None and seq.drafts is not None:
            row = DraftRow(seq.drafts, seq.token_ids, 0)
            self._speculator.verified(row, proposal, accepted)

    def observe_step(self, step: InFlightStep, drafted: int, elapsed_s: float | None) -> None:
        if self._speculator is not None:
            known = [(seq, seq.drafts) for seq in step.decodes if seq.drafts is not None]
            self._speculator.observe_step(
                len(step.decodes),
                drafted,
                elapsed_s,
                [drafts for _, drafts in known],
                [drafts for seq, drafts in known if seq in step.guessing],
                alone=step.begins_alone,
                waited=[drafts for seq, drafts in known if seq in step.has_waited],
            )

    def stats(self) -> wire.DraftStats | None:
        return None if self._speculator is None else self._speculator.stats()

    def _limit(self, seq: Sequence) -> int:
        """Return the max number of drafts for the next decode of ``seq``."""
        config, request, position = self._config, seq.request, seq.next_position
        if position > seq.num_computed_tokens:  # this decode computes the end of its prompt
            return 0
        index = position + 1 - seq.num_prompt_tokens
        limits = [min(seq.capacity, seq.max_positions) - position - 1]
        if index < request.min_tokens:  # ``forbidden`` applies after every draft
            limits.append(request.min_tokens - 1 - index)
        if config.reuses_states:
            # The state at some positions needs a snapshot, taken by a decode without drafts.
            limits.append(config.state_tokens - 2 - position % config.state_tokens)
        return min(limits)

    def _cut(self, seq: Sequence, proposal: Proposal) -> Proposal:
        """Cut ``proposal`` at a token that ends ``seq``, and before the first forced token."""
        ends = {*seq.request.stop_token_ids}
        if seq.request.grammar is not None:
            ends.update(self._config.eos_token_ids)
        tokens = proposal.tokens
        bad = (t in ends or not 0 <= t < self._config.vocab_size for t in tokens)
        tokens = tokens[: next((i for i, is_bad in enumerate(bad) if is_bad), len(tokens))]
        if (thinking := seq.follow_thinking()) is not None:
            tokens = tokens[: thinking.num_unforced(tokens)]
        return proposal._replace(tokens=tokens)
