"""Passes that are computed in parts, a few layers at a time.

A model's own code computes all its layers in one call. To suspend it in the middle, the call runs
on its own stack, a greenlet, which is suspended where the cache of a layer is first used and
resumed later on the same thread. This works for any model that uses a cache in each of its layers,
whatever its code looks like.

Between two parts, the residual stream stays in local variables of the model's code.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, Protocol

import mlx.core as mx
from greenlet import greenlet

from engine.cache.layout import KVNode, Layout, Node, StateNode


class DividedBatch(Protocol):
    """The parts of a batch that a pass needs, an `engine.batch.ragged.RaggedBatch`."""

    layout: Layout
    attends: bool
    new_states: dict[int, mx.array]
    division: LayeredPass | None

    def pause(self) -> None: ...

    def resume(self) -> None: ...


class LayeredPass:
    """One call of a model's code, which starts with the first `advance`."""

    def __init__(self, batch: DividedBatch, compute: Callable[[], mx.array]) -> None:
        """``compute`` calls the model with the caches of ``batch``, and returns logits."""
        self._batch = batch
        self._call = greenlet(compute)
        self._of_layer, self._of_state = _places(batch.layout)
        self._entered = -1  # the place of the last layer whose cache was used
        self._end = 0
        self._new: tuple[mx.array, ...] = ()
        self.attended: mx.array | None = None
        """The result of the last attention, if known."""
        self.logits: mx.array | None = None
        """The logits, once the pass is complete."""

    def advance(self, end: int) -> list[Any]:
        """Compute until ``end`` layers are done. Return the arrays to evaluate, unless the pass is
        complete: once evaluated, nothing refers to the pages any more."""
        self._end = end
        if self._entered >= 0:
            self._batch.resume()
        self._batch.division = self
        try:
            found = self._call.switch()
        finally:
            self._batch.division = None
        if self._call.dead:
            self.logits = found
            return []
        self._batch.pause()
        attended = () if self.attended is None else (self.attended,)
        return [*self._new, *attended, *self._batch.new_states.values()]

    def enter_layer(self, number: int, *new: mx.array) -> None:
        """Record that the KV of layer ``number`` of the layout is used now. ``new`` are its new
        keys and values, which depend on all layers before it."""
        self._enter(self._of_layer[number], new)

    def enter_state(self, number: int) -> None:
        """Record that the recurrent state ``number`` of the layout is used now."""
        # The model's own attention may be pending here, with references to pages.
        if self._batch.attends:
            self._enter(self._of_state[number], ())

    def close(self) -> None:
        """Abandon the call if it is not complete."""
        if self._call and not self._call.dead:
            self._call.throw()

    def _enter(self, place: int, new: tuple[mx.array, ...]) -> None:
        """Suspend the call if only the layers before ``place`` are wanted now."""
        if place <= self._entered:
            return
        self._entered = place
        while place >= self._end:
            self._new = new
            assert self._call.parent is not None
            self._call.parent.switch()
            self._new = ()


def num_layers(layout: Layout) -> int:
    """Return the number of parts of a pass of a model with ``layout``: its layers with a cache."""
    return max(1, len(layout.tree))


def _places(layout: Layout) -> tuple[dict[int, int], dict[int, int]]:
    """Return the index of each layer's KV among the layers, and of each recurrent state."""
    layers: dict[int, int] = {}
    states: dict[int, int] = {}
    for place, node in enumerate(layout.tree):
        for leaf in _leaves(node):
            if isinstance(leaf, KVNode):
                layers[leaf.layer] = place
            else:
                states.update((number, place) for number in leaf.numbers if number is not None)
    return layers, states


def _leaves(node: Node) -> Iterator[KVNode | StateNode]:
    if isinstance(node, KVNode | StateNode):
        yield node
    else:
        for part in node:
            yield from _leaves(part)
