"""Changes of logits before sampling: biases, penalties and forbidden tokens.

Order and results equal mlx-lm's (`make_logits_processors`): bias, repetition (Keskar et al. 2019,
section 4.1), presence, frequency. Forbidden tokens come last.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

from engine.plan import Decode
from engine.sampling.history import TokenHistory

IntArray = NDArray[np.int32]


def process_logits(logits: mx.array, decodes: Sequence[Decode], history: TokenHistory) -> mx.array:
    """Return ``logits`` (rows, vocab) changed by each row's controls.

    The same array if no row has any. ``history`` already has each row's input token."""
    vocab = logits.shape[-1]
    biases = _biases(decodes, vocab)
    repeating = [row for row, d in enumerate(decodes) if d.sampling.has_repetition_penalty]
    # Before the first output there are no tokens to penalize.
    outputs = [
        row
        for row, decode in enumerate(decodes)
        if decode.sampling.has_output_penalties and decode.output_index > 0
    ]
    forbidden = _forbidden(decodes, vocab)
    if biases or repeating or outputs:
        logits = logits.astype(mx.float32)
    if biases:
        rows, tokens, values = biases
        logits = logits.at[rows, tokens].add(values)
    if repeating:
        logits = _repetition(logits, repeating, [decodes[row] for row in repeating], history)
    if outputs:
        logits = _outputs(logits, outputs, [decodes[row] for row in outputs], history)
    if forbidden:
        rows, tokens = forbidden
        logits = mx.array(logits)
        logits[rows, tokens] = -math.inf
    return logits


def _biases(decodes: Sequence[Decode], vocab: int) -> tuple[mx.array, mx.array, mx.array] | None:
    """Return rows, tokens and values of all biases; None if there are none."""
    of_each: dict[int, tuple[IntArray, NDArray[np.float32]]] = {}
    parts, values = [], []
    for row, decode in enumerate(decodes):
        given = decode.sampling.logit_bias
        if not given:
            continue
        if id(given) not in of_each:  # drafts are rows with the same biases
            tokens = np.array([token for token, _ in given], np.int64)
            known = (tokens >= 0) & (tokens < vocab)
            added = np.array([value for _, value in given], np.float32)
            of_each[id(given)] = tokens[known].astype(np.int32), added[known]
        parts.append((row, of_each[id(given)][0]))
        values.append(of_each[id(given)][1])
    places = _places(parts)
    return None if places is None else (*places, mx.array(np.concatenate(values)))


def _forbidden(decodes: Sequence[Decode], vocab: int) -> tuple[mx.array, mx.array] | None:
    """Return rows and tokens of all forbidden tokens; None if there are none."""
    parts = []
    for row, decode in enumerate(decodes):
        if decode.forbidden and not decode.constrained:  # a grammar may allow nothing else
            tokens = np.array(decode.forbidden, np.int64)
            parts.append((row, tokens[(tokens >= 0) & (tokens < vocab)].astype(np.int32)))
    return _places(parts)


def _places(parts: Sequence[tuple[int, IntArray]]) -> tuple[mx.array, mx.array] | None:
    """Return the rows and tokens of ``parts``, which are the tokens of some rows; None if there
    are no tokens."""
    if not any(len(tokens) for _, tokens in parts):
        return None
    rows = np.concatenate([np.full(len(tokens), row, np.int32) for row, tokens in parts])
    return mx.array(rows), mx.array(np.concatenate([tokens for _, tokens in parts]))


def _repetition(
    logits: mx.array, rows: Sequence[int], decodes: Sequence[Decode], history: TokenHistory
) -> mx.array:
    counts = [
        min(decode.sampling.repetition_context_size, length) or length
        for decode in decodes
        for length in (decode.position + 1,)
    ]
    tokens, _ = history.recent(decodes, counts)
    penalty = mx.array([decode.sampling.repetition_penalty for decode in decodes])[:, None]
    at = mx.array(rows)[:, None]
    found = logits[at, tokens]
    # A token that occurs twice is written twice, with the same value.
    logits = mx.array(logits)
    logits[at, tokens] = mx.where(found < 0, found * penalty, found / penalty)
    return logits


def _outputs(
    logits: mx.array, rows: Sequence[int], decodes: Sequence[Decode], history: TokenHistory
) -> mx.array:
    tokens, there = history.recent(decodes, [decode.output_index for decode in decodes])
    at = mx.array(rows)[:, None]
    if any(decode.sampling.presence_penalty for decode in decodes):
        penalty = mx.array([decode.sampling.presence_penalty for decode in decodes])[:, None]
        found = logits[at, tokens]
        logits = mx.array(logits)
        logits[at, tokens] = found - penalty
    if any(decode.sampling.frequency_penalty for decode in decodes):
        penalty = mx.array([decode.sampling.frequency_penalty for decode in decodes])[:, None]
        logits = logits.at[at, tokens].subtract(mx.where(there, penalty, 0.0))
    return logits
