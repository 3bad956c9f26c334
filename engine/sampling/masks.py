"""Masks of the tokens that grammars allow, and logits without the others.

A mask depends on the previous token, so it is computed between two samplings. A separate thread
computes it while the device computes the logits.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, NamedTuple

import mlx.core as mx
import numpy
from llguidance import LLExecutor, LLMatcher
from llguidance.numpy import fill_next_token_bitmask, fill_next_token_bitmask_par

from engine.backend import arrays
from engine.grammar.cache import GrammarCache
from engine.grammar.compiled import SLOW_MASK_S, GrammarError, MaskTime, raise_if_error
from engine.grammar.matcher import GrammarMatcher
from engine.plan import Decode, GrammarFault, Slot

MAX_THREADS = 4
USUAL_MASK_S = 0.001
"""Masks that take no longer on average are no sign of a slow one among them."""


@dataclass(frozen=True)
class TokenMasks:
    """The allowed tokens in the constrained rows of a batch."""

    rows: list[int]
    bits: Any
    """(rows, words), int32: one bit per token, starting at the lowest bit of the first word."""
    allowed: Any  # the same as bools (rows, vocab) if the host applies the mask, else None
    failed: list[tuple[int, str]]  # rows without a mask, and the reason
    unverified: frozenset[int] = frozenset()
    """Rows without a mask after a draft that the grammar does not allow, or cannot judge."""

    def apply(self, logits: mx.array) -> mx.array:
        """Return ``logits`` (rows, vocab) with -inf at tokens that must not be chosen."""
        if not self.rows:
            return logits
        on_host = self.allowed is not None
        allowed = mx.array(self.allowed) if on_host else _allowed(mx, self.bits, logits.shape[-1])
        if len(self.rows) == logits.shape[0]:
            return mx.where(allowed, logits, -math.inf)
        rows = mx.array(self.rows)
        bound = mx.where(allowed, logits[rows], -math.inf)
        logits = mx.array(logits)
        logits[rows] = bound
        return logits


PendingMasks = Future[TokenMasks] | None
"""The masks of a step, None if no row is constrained."""


class GrammarMasker:
    """The matchers of slots whose sequences have a grammar.

    Slots are freed here as in the executor.
    """

    def __init__(self, grammars: GrammarCache, vocab_size: int) -> None:
        """``vocab_size`` is the width of the logits."""
        self._grammars = grammars
        self._vocab_size = vocab_size
        self._words = -(-grammars.vocab_size // 32)
        self._ends = frozenset(grammars.eos_token_ids)
        self._matchers: dict[Slot, GrammarMatcher] = {}
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="masks")
        self._executor = LLExecutor(max(1, min(MAX_THREADS, (os.cpu_count() or 1) // 2)))

    def start(
        self, decodes: Sequence[Decode], inputs: Sequence[int | None], are_guesses: bool = False
    ) -> PendingMasks:
        """Start computing the masks for the tokens after ``inputs``, one input for each of
        ``decodes``.

        Called in the order of the steps. Inputs that ``are_guesses`` may be wrong; the decodes at
        their positions will have the right ones. Nothing is masked after an end token, or after one
        that the grammar does not allow."""
        constrained = [
            _ConstrainedRow(
                row,
                decode,
                inputs[row],
                self._matcher_for(decode),
                row > 0 and decodes[row - 1].slot == decode.slot,
            )
            for row, decode in enumerate(decodes)
            if decode.constrained and not (are_guesses and inputs[row] in self._ends)
        ]
        if not constrained:
            return None
        return self._thread.submit(self._compute, constrained, are_guesses)

    def follow(self, slot: Slot, matcher: GrammarMatcher) -> None:
        """Use ``matcher`` for the sequence in ``slot``, until the slot is freed."""
        self._matchers[slot] = matcher

    def reset(self) -> None:
        self._matchers.clear()

    def free_slots(self, slots: Iterable[Slot]) -> None:
        """Drop the matchers of ``slots``, because each may take a hundred megabytes."""
        for slot in slots:
            self._matchers.pop(slot, None)

    def _matcher_for(self, decode: Decode) -> GrammarMatcher | None:
        """Return the matcher of a slot, None if there is none and none can be created."""
        if decode.grammar is not None:
            self._matchers.pop(decode.slot, None)
            with suppress(GrammarError):
                grammar = self._grammars.get(decode.grammar)
                self._matchers[decode.slot] = GrammarMatcher(grammar, decode.grammar.after)
        return self._matchers.get(decode.slot)

    # -- the thread ------------------------------------------------------------

    def _compute(self, constrained: Sequence[_ConstrainedRow], are_guesses: bool) -> TokenMasks:
        bits = numpy.full((len(constrained), self._words), -1, numpy.int32)
        valid: set[int] = set()
        errors: dict[int, str] = {}
        for places in _rounds(constrained):
            possible = {
                place: constrained[place]
                for place in places
                if not constrained[place].is_draft
                or (place - 1 in valid and _has(bits[place - 1], constrained[place].token))
            }
            found = self._fill(possible, bits)
            errors |= found
            valid |= possible.keys() - found.keys()
        drafts = {place for place, each in enumerate(constrained) if each.is_draft}
        doubtful = set(range(len(constrained))) if are_guesses else drafts
        for place in errors.keys() & doubtful:
            constrained[place].forget_failure()
        failed = {place: errors[place] for place in sorted(errors.keys() - doubtful)}
        places = [place for place in range(len(constrained)) if place not in failed]
        bits = bits[places]
        on_host = arrays.array_namespace() is numpy
        return TokenMasks(
            rows=[constrained[place].row for place in places],
            bits=bits,
            allowed=_allowed(numpy, bits, self._vocab_size) if on_host else None,
            failed=[(constrained[place].row, why) for place, why in failed.items()],
            unverified=frozenset(constrained[place].row for place in drafts - valid),
        )

    def _fill(self, rows: Mapping[int, _ConstrainedRow], bits: Any) -> dict[int, str]:
        """Advance ``rows``, at most one per slot, and fill ``bits`` at their keys. Return the
        errors of those without a mask."""
        errors: dict[int, str] = {}
        awake: list[_Awake] = []
        for place, each in rows.items():
            try:
                inner = each.advance()
            except GrammarError as error:
                errors[place] = _reason(error)
                continue
            if inner is not None and each.matcher is not None:
                awake.append(_Awake(inner, place, each.matcher.mask_time))
            else:
                _clear(bits[place], self._grammars.eos_token_ids)
        errors |= self._fill_awake(awake, bits)
        for place, each in rows.items():
            if each.matcher is not None and place not in errors:
                _keep_only(bits[place], each.matcher.forced_token(bits[place]))
            before = bits[place].copy()
            _clear(bits[place], each.decode.forbidden)
            if not bits[place].any():  # the grammar allows only forbidden tokens
                bits[place] = before
        return errors

    def _fill_awake(self, awake: Sequence[_Awake], bits: Any) -> dict[int, str]:
        """Fill ``bits`` at the places of ``awake``. Return the errors of those without a mask.

        Together they take less time, but do not show which of them was slow."""
        alone = {each.place for each in awake if each.mask_time.is_suspect}
        together = [each for each in awake if each.place not in alone]
        began = time.perf_counter()
        if together:
            places = [(each.inner, each.place) for each in together]
            fill_next_token_bitmask_par(self._executor, places, bits)
        if time.perf_counter() - began > SLOW_MASK_S + USUAL_MASK_S * len(together):
            for each in together:
                each.mask_time.suspect()
        errors: dict[int, str] = {}
        for each in awake:
            try:
                if each.place in alone:
                    began = time.thread_time()
                    fill_next_token_bitmask(each.inner, bits, each.place)
                    each.mask_time.add(time.thread_time() - began)
                raise_if_error(each.inner)
            except GrammarError as error:
                errors[each.place] = _reason(error)
        return errors


class _Awake(NamedTuple):
    """A matcher that a row of the masks is for."""

    inner: LLMatcher
    place: int
    mask_time: MaskTime  # of its grammar


class _ConstrainedRow(NamedTuple):
    """A row with a grammar, and its input token."""

    row: int
    decode: Decode
    token: int | None
    matcher: GrammarMatcher | None
    is_draft: bool  # whether the input is a draft, and the row before has the same slot

    def advance(self) -> LLMatcher | None:
        """Advance the matcher to the input token. Return None while it is inactive.

        Raises `GrammarError` if there is no matcher, or if it has lost tokens or rejects one."""
        matcher, known = self.matcher, self.decode.output_index
        if matcher is None or self.token is None:
            raise GrammarError("the executor does not know the grammar", transient=True)
        if self.decode.grammar is not None:
            tokens = (*(self.decode.history or ()), self.token)
            matcher.advance(tokens[len(tokens) - known :])
        elif known:
            matcher.return_to(min(matcher.num_outputs, known - 1))
            if matcher.num_outputs == known - 1:
                matcher.advance([self.token])
        if matcher.num_outputs != known:
            raise GrammarError("the executor has lost part of the answer", transient=True)
        return matcher.inner

    def forget_failure(self) -> None:
        """Make the matcher forget that it failed at the input."""
        if self.matcher is not None:
            with suppress(GrammarError):  # then it fails again in the next step
                self.matcher.begin_again(self.decode.output_index - 1)


def _reason(error: GrammarError) -> str:
    return str(error) if error.transient else GrammarFault(error)


def _rounds(constrained: Sequence[_ConstrainedRow]) -> Iterable[list[int]]:
    """Return the indices of ``constrained``, grouped by their number of preceding drafts."""
    rounds: dict[int, list[int]] = {}
    number = 0
    for place, each in enumerate(constrained):
        number = number + 1 if each.is_draft else 0
        rounds.setdefault(number, []).append(place)
    return rounds.values()


def _has(bits: Any, token: int | None) -> bool:
    """Return whether a mask (words,), int32, has the bit of ``token``."""
    if token is None or token // 32 >= len(bits):
        return False
    return bool(bits[token // 32] >> (token % 32) & 1)


def _keep_only(bits: Any, token: int | None) -> None:
    """Clear the bits of all tokens except ``token`` in a mask (words,), int32."""
    if token is not None:
        bits.fill(0)
        bits.view(numpy.uint32)[token // 32] = 1 << token % 32


def _clear(bits: Any, tokens: Iterable[int]) -> None:
    """Clear the bits of ``tokens`` in a mask (words,), int32."""
    words = bits.view(numpy.uint32)
    for token in tokens:
        if token // 32 < len(words):
            words[token // 32] &= ~numpy.uint32(1 << token % 32)


def _allowed(xp: Any, bits: Any, vocab_size: int) -> Any:
    """Return ``bits`` (rows, words) as bools (rows, vocab). Tokens without a bit are False."""
    missing = max(0, vocab_size - 32 * bits.shape[-1])
    if xp is numpy:
        unpacked = numpy.unpackbits(bits.view(numpy.uint8), axis=1, bitorder="little")
    else:
        unpacked = (mx.array(bits)[:, :, None] >> mx.arange(32)) & 1
        unpacked = unpacked.reshape(len(bits), -1)
    unpacked = unpacked[:, :vocab_size].astype(xp.bool_)
    return xp.pad(unpacked, [(0, 0), (0, missing)]) if missing else unpacked
