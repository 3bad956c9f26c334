"""Runs mlx-lm over the keys and values of a slot, to check a quantized KV cache.

Two ways of computing a key differ by rounding. If that gives adjacent codes, logits differ by the
effect of a whole step of the codes, or of another expert. A tolerance for that would hide a wrong
row. Each stored row must therefore be a rounding of what mlx-lm computes when its caches hold the
preceding rows as in the slot. And logits must be those that mlx-lm computes over these exact rows,
as accurately as without quantization.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import mlx.core as mx
import numpy as np
from mlx_lm.models.cache import make_prompt_cache

from engine.cache.layout import KVNode, Layout, Node, StateNode
from engine.cache.pages import StoredKV
from engine.cache.quantization import (
    Quantization,
    Quantized,
    codes_of,
    dequantize,
    quantize,
    with_biases,
)
from engine.executor.batched import BatchedExecutor
from engine.plan import Slot
from engine.proving.oracle import Reference, compute_logits, logits_distance

NOISE = 1e-4
"""Allowed difference of two ways of computing keys or values, relative to the largest."""
HALF_STEP = 0.5 * (1 + 2.0**-9)
"""Allowed distance of a value from its code, in steps. A different rounding of scales to fp16 may
make the steps that much larger."""


class RoundingMismatch(Exception):
    """A stored row is not a rounding of what mlx-lm computes. The message gives the position."""


class Replay:
    """Compares the rows and the logits of ``executor`` with those of mlx-lm's ``model``."""

    def __init__(self, model: Any, executor: BatchedExecutor) -> None:
        self._model = model
        self._executor = executor
        self._runs: dict[tuple[tuple[int, ...], int], _Run] = {}  # by tokens, and tokens at once

    def difference(self, slot: Slot, one: Reference, step: int, logits: mx.array) -> float:
        """Return the `logits_distance` of decode ``step`` of ``one`` in ``slot`` from mlx-lm's.

        The smaller distance of the two ways of computing a prompt counts (`oracle.make_reference`).
        Raises `RoundingMismatch`.
        """
        found: list[float] = []
        wrong: RoundingMismatch | None = None
        stored = self._executor.read_slot(slot, one.position(step) + 1)
        for at_once in (len(one.prompt), 1):
            try:
                found.append(logits_distance(logits, self._logits(one, step, stored, at_once)))
            except RoundingMismatch as raised:
                wrong = raised
            if found and found[-1] <= NOISE:
                break
        if not found and wrong is not None:
            raise wrong
        return min(found)

    def _logits(
        self, one: Reference, step: int, stored: Sequence[StoredKV], at_once: int
    ) -> mx.array:
        """Return mlx-lm's logits (vocab,) after decode ``step``, over the ``stored`` rows."""
        key = one.tokens, at_once
        run = self._runs.pop(key, None)
        if run is None or run.steps != step or not run.has_seen(stored):
            run = _Run(self._model, self._executor.layout)
        tokens = one.tokens[: one.position(step) + 1]
        logits = run.compute(tokens, len(one.prompt), at_once, stored)
        self._runs[key] = run
        return logits


class _Run:
    """mlx-lm computing one sequence, a few tokens at a time, over the rows in a slot.

    It continues from step to step while the rows that it has seen stay the same, byte for byte.
    """

    def __init__(self, model: Any, layout: Layout) -> None:
        self._model = model
        self._caches = make_prompt_cache(model)
        self._updates: list[_CheckedUpdate] = []
        for part, number in _kv_caches(self._caches, layout.tree):
            part.update_and_fetch = _CheckedUpdate(part.update_and_fetch, layout, number)
            self._updates.append(part.update_and_fetch)
        self.steps = 0  # how many decodes have been computed
        self._seen: list[np.ndarray] = []
        self._length = 0

    def has_seen(self, stored: Sequence[StoredKV]) -> bool:
        """Return whether ``stored`` begins with the rows of the last call of `compute`."""
        now = (rows[..., : self._length, :] for rows in _bytes_of(stored))
        return all(map(np.array_equal, self._seen, now))

    def compute(
        self, tokens: tuple[int, ...], length: int, at_once: int, stored: Sequence[StoredKV]
    ) -> mx.array:
        """Return the logits (vocab,) after the last of ``tokens``. Raises `RoundingMismatch`.

        The first call computes the prompt, which is the first ``length`` of ``tokens``; a later
        one the tokens that are new."""
        for update in self._updates:
            update.stored = stored
        new, prompt = (tokens[self._length :], 1) if self.steps else (tokens, length)
        logits = compute_logits(self._model, self._caches, new, prompt, at_once)[-1]
        for update in self._updates:
            update.stored = ()  # they may be views of what the next step writes
        self.steps += len(new) - prompt + 1
        self._seen, self._length = _bytes_of(stored), len(tokens)
        return logits


def _bytes_of(stored: Sequence[StoredKV]) -> list[np.ndarray]:
    """Return copies of the rows (..., length, bytes of a row), of values and of scales."""
    parts = [part for kept in stored for part in kept if part is not None and part.size]
    return [np.array(mx.contiguous(part).view(mx.uint8)) for part in parts]


def _kv_caches(caches: Sequence[Any], tree: Sequence[Node]) -> Iterator[tuple[Any, int]]:
    """Yield mlx-lm's caches of keys and values, each with the number of its layer."""
    for part, node in zip(caches, tree, strict=True):
        if isinstance(node, KVNode):
            yield part, node.layer
        elif not isinstance(node, StateNode):
            yield from _kv_caches(part.caches, node)


class _CheckedUpdate:
    """Replaces ``update_and_fetch``: checks keys and values, and uses those of the slot."""

    stored: Sequence[StoredKV] = ()
    """The slot's rows of all layers, keys and values in turn."""

    def __init__(self, stock: Any, layout: Layout, layer: int) -> None:
        self._stock = stock
        self._layer = layer
        self._schemes = [kind.quantization for kind in layout.arrays[2 * layer : 2 * layer + 2]]
        self._end = 0

    def __call__(self, *computed: mx.array) -> Any:
        start, self._end = self._end, self._end + computed[0].shape[2]
        ours_of_layer = self.stored[2 * self._layer : 2 * self._layer + 2]
        kept = [_stretch(whole, start, self._end) for whole in ours_of_layer]
        parts = zip(("keys", "values"), kept, computed, self._schemes, strict=True)
        for name, ours, theirs, scheme in parts:
            if theirs.size and not _is_rounding_of(ours, theirs, scheme):
                raise RoundingMismatch(
                    f"layer {self._layer} stores {name} that differ from mlx-lm's, starting at "
                    f"position {start}"
                )
        return self._stock(*(part.array for part in kept))


def _stretch(kept: StoredKV, start: int, end: int) -> StoredKV:
    scales = None if kept.scales is None else kept.scales[..., start:end, :]
    return StoredKV(kept.array[..., start:end, :], scales)


def _is_rounding_of(kept: StoredKV, computed: mx.array, scheme: Quantization | None) -> bool:
    """Return whether ``kept`` is ``computed`` (..., dim), rounded by ``scheme``.

    Values that are close enough but belong to no code do not count.
    """
    ours, wide = kept.array.astype(mx.float32), computed.astype(mx.float32)
    allowed = NOISE * mx.max(mx.abs(wide))
    of_codes = mx.array(True)
    if scheme is not None and kept.scales is not None:
        steps = mx.repeat(quantize(wide, scheme).scales[0], scheme.group_size, axis=-1)
        allowed = allowed + HALF_STEP * steps.astype(mx.float32)
        scales = with_biases(kept.scales)
        codes = codes_of(ours, scales, scheme)
        stood_for = dequantize(Quantized(codes, scales), scheme).astype(kept.array.dtype)
        of_codes = mx.array_equal(kept.array, stood_for)
    return bool((of_codes & mx.all(mx.abs(ours - wide) <= allowed)).item())
