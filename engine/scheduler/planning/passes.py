"""Passes of chunks that are computed over several plans."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from engine.scheduler.memory import Memory
from engine.scheduler.sequences.sequence import Sequence, Status
from engine.scheduler.timing.time_share import MUCH_SHORTER


class PlannedChunk(NamedTuple):
    """Positions ``start`` to ``end`` (exclusive) of a sequence."""

    seq: Sequence
    start: int
    end: int

    @property
    def tokens(self) -> int:
        return self.end - self.start


class OpenPass:
    """A pass in progress. Until it is complete or dropped, its sequences keep their slots and their
    pages, and `Sequence.num_computed_tokens` does not change."""

    def __init__(self, number: int, chunks: list[PlannedChunk], reserved_bytes: int) -> None:
        self.number = number  # of the plan that started it
        self.chunks = chunks
        self.reserved_bytes = reserved_bytes  # in the ledger, for activations
        self.layers_done = 0  # once every plan made so far has run

    @property
    def sizes(self) -> list[tuple[int, int]]:
        """Start and tokens of each chunk."""
        return [(chunk.start, chunk.tokens) for chunk in self.chunks]

    @property
    def tokens(self) -> int:
        return sum(chunk.tokens for chunk in self.chunks)


class OpenPasses:
    """The open passes, and those for the next plan to drop."""

    def __init__(self, memory: Memory) -> None:
        self._memory = memory
        self._by_sequence: dict[Sequence, OpenPass] = {}
        self._passes: dict[int, OpenPass] = {}
        self.dropped: list[int] = []

    def __iter__(self) -> Iterator[OpenPass]:
        return iter(self._passes.values())

    def __len__(self) -> int:
        return len(self._passes)

    def of(self, seq: Sequence) -> OpenPass | None:
        """Return the pass that contains a chunk of ``seq``, None if there is none."""
        return self._by_sequence.get(seq)

    def claimed(self, block_size: int, layers: int) -> dict[bytes, int]:
        """Return the hashes of the blocks that the passes compute: they can be shared afterwards.

        The value is how many of them in a row are worth the wait. To compute fewer again takes less
        than a quarter of the time that their pass still takes."""
        found: dict[bytes, int] = {}
        for one in self:
            left = one.tokens * (layers - one.layers_done) // layers
            worth = max(1, left // (MUCH_SHORTER * block_size))
            for seq, start, end in one.chunks:
                if seq.status is not Status.FINISHED:  # it publishes nothing any more
                    hashes = seq.block_hashes[start // block_size : end // block_size]
                    found |= dict.fromkeys(hashes, worth)
        return found

    def begin(self, one: OpenPass) -> None:
        self._passes[one.number] = one
        for chunk in one.chunks:
            self._by_sequence[chunk.seq] = one
            chunk.seq.pass_end = chunk.end
            self._memory.fix(chunk.seq)

    def drop(self, seq: Sequence) -> None:
        """Abandon the pass of ``seq``, if there is one. The other sequences in it restart
        theirs."""
        if (one := self.of(seq)) is not None:
            self.forget(one)
            self.dropped.append(one.number)

    def leave(self, seq: Sequence, number: int | None) -> None:
        """Remove ``seq``, whose chunk raised in pass ``number``. The executor continues the rest
        of that pass. A pass started since then is dropped, because the executor still has the
        chunk in it."""
        if (one := self.of(seq)) is None:
            return
        if one.number != number:
            self.drop(seq)
            return
        one.chunks = [chunk for chunk in one.chunks if chunk.seq is not seq]
        self._release(seq)
        if not one.chunks:
            self.forget(one)

    def drop_abandoned(self) -> None:
        """Drop the passes whose sequences have all ended in the meantime."""
        for one in list(self._passes.values()):
            if all(chunk.seq.status is Status.FINISHED for chunk in one.chunks):
                self.drop(one.chunks[0].seq)

    def take_dropped(self) -> list[int]:
        taken, self.dropped = self.dropped, []
        return taken

    def clear(self) -> None:
        """Forget all passes, because the executor has lost them too."""
        for one in list(self._passes.values()):
            self.forget(one)
        self.dropped.clear()

    def forget(self, one: OpenPass) -> None:
        """Forget ``one``, which is complete or abandoned."""
        del self._passes[one.number]
        for chunk in one.chunks:
            self._release(chunk.seq)
        self._memory.release_pass(one.reserved_bytes)

    def _release(self, seq: Sequence) -> None:
        del self._by_sequence[seq]
        seq.pass_end = 0
        self._memory.unfix(seq)
