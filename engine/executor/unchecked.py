"""Slots that may contain NaN."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from engine.cache.slabs import Slabs
from engine.plan import Plan, Slot


class UncheckedSlots:
    """The slots whose KV may have elements that are not finite.

    Masked positions have a weight of zero, but zero times NaN is NaN. What a sequence leaves in a
    slot must therefore be finite, or the next sequence there gets NaN too. A layer that attends to
    all positions reveals it: the logits of the sequence's last decode are then NaN too. A slot
    whose last pass has not shown that it is clean (a sequence aborted during prefill, a chunk that
    raised) is cleared before another sequence starts there."""

    def __init__(self, shows_all: bool) -> None:
        """``shows_all``: whether the model has such a layer."""
        self._shows_all = shows_all
        self._passes: dict[Slot, int] = {}  # the step of the last pass

    def clear_begun(self, plan: Plan, slabs: Slabs) -> None:
        """Clear the slots in which sequences start with ``plan``. Nothing is evaluated."""
        for slot in _begun(plan):
            if self._passes.pop(slot, None) is not None and slot.slab_id in slabs:
                slabs[slot.slab_id].clear_row(slot.row)
        for move in plan.moves:
            if (step := self._passes.pop(move.source, None)) is not None:
                self._passes[move.target] = step

    def computed(self, plan: Plan) -> None:
        """Record that ``plan`` computes something in its slots."""
        self._passes.update((decode.slot, plan.step) for decode in plan.decodes)
        self._passes.update((chunk.slot, plan.step) for chunk in plan.chunks)

    def checked(self, step: int, slots: Iterable[Slot]) -> None:
        """Record that the logits of ``slots`` in plan ``step`` are numbers."""
        for slot in slots:
            if self._shows_all and self._passes.get(slot) == step:
                del self._passes[slot]

    def freed(self, plan: Plan) -> None:
        """Forget the slots that ``plan`` frees with their memory."""
        rows = dict.fromkeys(plan.freed_slabs, 0) | {r.slab_id: r.rows for r in plan.resized_slabs}
        gone = [slot for slot in self._passes if slot.row >= rows.get(slot.slab_id, slot.row + 1)]
        for slot in gone:
            del self._passes[slot]


def _begun(plan: Plan) -> Iterator[Slot]:
    yield from (restore.slot for restore in plan.restores if restore.start == 0)
    yield from (move.target for move in plan.moves)
    yield from (decode.slot for decode in plan.decodes if decode.position == len(decode.before))
    yield from (chunk.slot for chunk in plan.chunks if chunk.start == 0)
