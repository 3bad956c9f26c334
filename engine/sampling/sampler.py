"""Sampling of one token per row from a batch of logits, each row with its own parameters.

Biases and penalties come first, then grammars, then filters, then sampling at the temperature.
Everything except grammars follows mlx-lm. Temperature 0 takes the most likely token. The token of a
row does not depend on other rows.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from functools import partial
from typing import Any, NamedTuple

import mlx.core as mx
import numpy

from engine.backend import arrays
from engine.backend.threads import in_parallel, num_threads
from engine.plan import Decode, Slot
from engine.sampling import noise
from engine.sampling.filters import Filter, filter_mask
from engine.sampling.history import TokenHistory
from engine.sampling.logprobs import PendingLogprobs, gather_logprobs
from engine.sampling.masks import GrammarMasker, PendingMasks
from engine.sampling.penalties import process_logits

MIN_TEMPERATURE = 1e-6
"""A logit divided by a lower temperature may overflow."""
WORTH_THREADS = 65_536
"""Number of logits, in rows that are sampled, above which threads pay off."""


class SamplerOutput(NamedTuple):
    """The result of sampling a batch."""

    tokens: mx.array  # (rows,), int32
    logprobs: Sequence[PendingLogprobs] = ()  # of the rows that requested them
    failed: Sequence[tuple[int, str]] = ()
    """Rows whose grammar gave no mask, and the reason. Their tokens are meaningless."""
    unverified: Collection[int] = ()
    """Rows after drafts whose grammar gave no mask: their tokens are meaningless too, and the
    result ends before them."""

    @property
    def arrays(self) -> list[mx.array]:
        """The arrays to evaluate."""
        return [self.tokens, *(array for each in self.logprobs for array in each.arrays)]


class Sampler:
    """Samples tokens, and keeps the history that penalties and grammars need.

    Slots are freed here as in the executor."""

    def __init__(self) -> None:
        self._history = TokenHistory()
        self.masker: GrammarMasker | None = None
        """None if no sequence can have a grammar."""

    def start_masks(self, decodes: Sequence[Decode], inputs: Sequence[int | None]) -> PendingMasks:
        """Start the masks of constrained rows, for the tokens after ``inputs``."""
        return None if self.masker is None else self.masker.start(decodes, inputs)

    def sample(
        self,
        logits: mx.array,
        decodes: Sequence[Decode],
        inputs: mx.array,
        masks: PendingMasks = None,
    ) -> SamplerOutput:
        """Sample one token for each of ``decodes`` from its row of ``logits`` (rows, vocab).

        The model computed these for the tokens ``inputs`` (rows,). Decodes of one slot, whose
        inputs after the first are drafts, are consecutive."""
        self._history.record(decodes, inputs)
        adjusted = process_logits(logits, decodes, self._history)
        failed: list[tuple[int, str]] = []
        unverified: Collection[int] = ()
        if masks is not None:
            found = masks.result()
            adjusted, failed, unverified = found.apply(adjusted), found.failed, found.unverified
        tokens = _with_forced(sample_tokens(adjusted, decodes), decodes)
        logprobs = _logprobs(logits, tokens, decodes)
        return SamplerOutput(tokens, logprobs, failed, unverified)

    def guess(self, logits: mx.array, decodes: Sequence[Decode], inputs: mx.array) -> mx.array:
        """Sample tokens (rows,) like `sample`. ``inputs`` may be guesses; the decodes at their
        positions will have the right ones. With a grammar this waits for them."""
        self._history.record(decodes, inputs)
        adjusted = process_logits(logits, decodes, self._history)
        if self.masker is not None and any(decode.constrained for decode in decodes):
            masks = self.masker.start(decodes, inputs.tolist(), are_guesses=True)
            adjusted = masks.result().apply(adjusted) if masks is not None else adjusted
        return sample_tokens(adjusted, decodes)

    def reset(self) -> None:
        """Drop all slots."""
        self._history = TokenHistory()
        if self.masker is not None:
            self.masker.reset()

    def free_slots(self, slots: Sequence[Slot]) -> None:
        self._history.free_slots(slots)
        if self.masker is not None:
            self.masker.free_slots(slots)


def _logprobs(
    logits: mx.array, tokens: mx.array, decodes: Sequence[Decode]
) -> list[PendingLogprobs]:
    """Return log-probabilities of the rows that requested them. Rows that name tokens are computed
    one by one: how a device adds up a row may depend on how many there are, and their
    log-probabilities are the result of their request."""
    scored = [row for row, decode in enumerate(decodes) if decode.logprobs is not None]
    found = [
        gather_logprobs(logits[row : row + 1], tokens[row : row + 1], [row], ids=ids)
        for row in scored
        if (ids := decodes[row].logprob_token_ids)
    ]
    if rows := [row for row in scored if not decodes[row].logprob_token_ids]:
        if len(rows) < len(decodes):
            logits, tokens = logits[mx.array(rows)], tokens[mx.array(rows)]
        counts = [decodes[row].logprobs or 0 for row in rows]
        found.append(gather_logprobs(logits, tokens, rows, counts))
    return found


def _with_forced(tokens: mx.array, decodes: Sequence[Decode]) -> mx.array:
    """Return ``tokens`` (rows,) with the forced ones in their rows."""
    forced = [
        (row, decode.forced) for row, decode in enumerate(decodes) if decode.forced is not None
    ]
    if forced:
        rows, values = map(list, zip(*forced, strict=True))
        tokens[mx.array(rows)] = mx.array(values, mx.int32)
    return tokens


def sample_tokens(logits: mx.array, decodes: Sequence[Decode]) -> mx.array:
    """Return tokens (rows,), int32, drawn from ``logits`` (rows, vocab) with each row's noise."""
    if arrays.array_namespace() is numpy:
        return mx.array(_sample_by_rows(numpy.asarray(logits.astype(mx.float32)), decodes))
    tokens = mx.argmax(logits, axis=-1)
    drawn = [row for row, decode in enumerate(decodes) if decode.sampling.temperature > 0]
    if drawn:
        rows = mx.array(drawn)
        some = logits[rows].astype(mx.float32)
        tokens[rows] = _draw(mx, some, [decodes[row] for row in drawn])
    return tokens.astype(mx.int32)


def _sample_by_rows(logits: Any, decodes: Sequence[Decode]) -> Any:
    """Sample from NumPy arrays, one row at a time, so that a row stays in the processor's cache."""
    tokens = numpy.zeros(len(decodes), numpy.int32)

    def share(first: int) -> None:
        for row in range(first, len(decodes), step):
            alone = numpy.ascontiguousarray(logits[row : row + 1])
            if decodes[row].sampling.temperature > 0:
                tokens[row] = _draw(numpy, alone, decodes[row : row + 1])[0]
            else:
                tokens[row] = alone.argmax()

    drawn = sum(decode.sampling.temperature > 0 for decode in decodes)
    step = num_threads() if drawn * logits.shape[-1] >= WORTH_THREADS else 1
    in_parallel([partial(share, first) for first in range(step)])
    return tokens


@numpy.errstate(invalid="ignore")  # a model's logits may be NaN
def _draw(xp: Any, logits: Any, decodes: Sequence[Decode]) -> Any:
    """Sample a token for every row. All rows have a temperature above 0."""
    filters = [_filter(decode, logits.shape[-1]) for decode in decodes]
    tokens = xp.arange(logits.shape[-1])[None]
    if not all(f.keeps_all for f in filters):
        stays = filter_mask(xp, logits, filters)
        if xp is mx:
            logits = mx.where(stays, logits, -math.inf)
        elif stays.any():  # keep only the remaining tokens, which are usually few
            tokens = stays.nonzero()[1][None]
            logits = logits[stays][None]
    temperatures = [max(d.sampling.temperature, MIN_TEMPERATURE) for d in decodes]
    keys = [noise.key(d.sampling.seed, d.output_index) for d in decodes]
    scores = logits - xp.max(logits, axis=-1, keepdims=True)
    scores = scores * xp.array([1 / t for t in temperatures], dtype=xp.float32)[:, None]
    scores = scores + noise.gumbel(xp, noise.uniform(xp, keys, tokens))
    best = xp.argmax(scores, axis=-1)
    return best if xp is mx else tokens[0, best]


def _filter(decode: Decode, vocab_size: int) -> Filter:
    s = decode.sampling
    excludes = s.xtc_probability > 0 and noise.coin(s.seed, decode.output_index) < s.xtc_probability
    return Filter(
        top_p=s.top_p,
        min_p=min(s.min_p, 1.0),
        xtc_threshold=s.xtc_threshold if excludes else None,
        exempt_ids=tuple(sorted({t for t in s.xtc_special_ids if 0 <= t < vocab_size})),
        top_k=s.top_k if s.top_k < vocab_size else 0,
    )
