"""The tokens of running sequences on the device, for penalties."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import mlx.core as mx

from engine.plan import Decode, Slot

MIN_ROWS = 8
MIN_CAPACITY = 512


class TokenHistory:
    """A row for each slot whose sampling looks back, with the token of position p at index p.

    The first decode in a slot provides the tokens so far. Every decode adds its own input, which
    the host may not know yet. Because a token's index is its position, rewinding a sequence needs
    no change here."""

    def __init__(self) -> None:
        self._rows: dict[Slot, int] = {}
        self._free: list[int] = []
        self._tokens = mx.zeros((0, MIN_CAPACITY), mx.int32)

    def record(self, decodes: Sequence[Decode], inputs: mx.array) -> None:
        """Add the tokens ``inputs`` (rows,) of those of ``decodes`` that look back."""
        members = [i for i, decode in enumerate(decodes) if decode.sampling.needs_history]
        if not members:
            return
        for i in members:
            self._begin(decodes[i])
        rows = mx.array([self._rows[decodes[i].slot] for i in members])
        positions = mx.array([decodes[i].position for i in members])
        if len(members) < len(decodes):
            inputs = inputs[mx.array(members)]
        self._tokens[rows, positions] = inputs

    def recent(self, decodes: Sequence[Decode], counts: Sequence[int]) -> tuple[mx.array, mx.array]:
        """Return the last ``counts`` tokens of each decode, (rows, most), and which are real.

        The last token is the decode's input. Shorter rows are padded with it. A slot may start in
        the middle of its sequence: then there are fewer.
        """
        counts = [min(c, d.position + 1) for c, d in zip(counts, decodes, strict=True)]
        rows = mx.array([self._rows[decode.slot] for decode in decodes])[:, None]
        last = mx.array([decode.position for decode in decodes])[:, None]
        positions = last - mx.array(counts)[:, None] + 1 + mx.arange(max(counts))
        there = positions <= last
        return self._tokens[rows, mx.where(there, positions, last)], there

    def free_slots(self, slots: Iterable[Slot]) -> None:
        """Drop the rows of those of ``slots`` that have one."""
        self._free += [self._rows.pop(slot) for slot in slots if slot in self._rows]

    def _begin(self, decode: Decode) -> None:
        """Make room for the tokens of ``decode``, and write its history."""
        if decode.slot not in self._rows:
            if not self._free:
                self._grow(max(MIN_ROWS, 2 * self._tokens.shape[0]), self._tokens.shape[1])
            self._rows[decode.slot] = self._free.pop()
        rows, capacity = self._tokens.shape
        if decode.position >= capacity:
            self._grow(rows, max(2 * capacity, decode.position + 1))
        if decode.history:
            count = len(decode.history)
            self._tokens[self._rows[decode.slot], :count] = mx.array(decode.history, mx.int32)

    def _grow(self, rows: int, capacity: int) -> None:
        old_rows, old_capacity = self._tokens.shape
        self._free += range(old_rows, rows)
        self._tokens = mx.pad(self._tokens, [(0, rows - old_rows), (0, capacity - old_capacity)])
