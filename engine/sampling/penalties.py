"""Changes of logits before sampling: biases, penalties and forbidden tokens.

Order and results equal mlx-lm's (`make_logits_processors`): bias, repetition (Keskar et al. 2019,
section 4.1), presence, frequency. Forbidden tokens come last.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import mlx.core as mx

from engine.plan import Decode
from engine.sampling.history import TokenHistory


def process_logits(logits: mx.array, decodes: Sequence[Decode], history: TokenHistory) -> mx.array:
    """Return ``logits`` (rows, vocab) changed by each row's controls.

    The same array if no row has any. ``history`` already has each row's input token."""
    vocab = logits.shape[-1]
    biases = [
        (row, token, value)
        for row, decode in enumerate(decodes)
        for token, value in decode.sampling.logit_bias
        if 0 <= token < vocab
    ]
    repeating = [row for row, d in enumerate(decodes) if d.sampling.has_repetition_penalty]
    # Before the first output there are no tokens to penalize.
    outputs = [
        row
        for row, decode in enumerate(decodes)
        if decode.sampling.has_output_penalties and decode.output_index > 0
    ]
    forbidden = [
        (row, token)
        for row, decode in enumerate(decodes)
        if not decode.constrained  # its grammar may allow nothing else
        for token in decode.forbidden
        if 0 <= token < vocab
    ]
    if biases or repeating or outputs:
        logits = logits.astype(mx.float32)
    if biases:
        rows, tokens, values = (mx.array(list(side)) for side in zip(*biases, strict=True))
        logits = logits.at[rows, tokens].add(values)
    if repeating:
        logits = _repetition(logits, repeating, [decodes[row] for row in repeating], history)
    if outputs:
        logits = _outputs(logits, outputs, [decodes[row] for row in outputs], history)
    if forbidden:
        rows, tokens = (mx.array(list(side)) for side in zip(*forbidden, strict=True))
        logits = mx.array(logits)
        logits[rows, tokens] = -math.inf
    return logits


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
