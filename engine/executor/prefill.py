"""The passes in which a plan's chunks are computed."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import mlx.core as mx

from engine.backend.file_rows import FilesChanged
from engine.batch.ragged import RaggedBatch, Row
from engine.cache.slabs import Slabs
from engine.executor.base import is_allocation_failure
from engine.executor.stopwatch import Stopwatch
from engine.plan import Chunk, Slot
from engine.sampling.logprobs import PendingLogprobs, target_logprobs


class ChunkPass(NamedTuple):
    """Chunks whose graph is built."""

    arrays: list[Any]  # to evaluate
    is_last: bool  # of its plan


@dataclass(eq=False)
class Prefill:
    """Builds the passes of ``chunks``."""

    chunks: Sequence[Chunk]
    failed: list[tuple[Slot, str]]  # chunks that raise are added
    model: Any
    slabs: Slabs
    batch: Callable[[Sequence[Row]], RaggedBatch]
    together: bool  # whether chunks may share a pass, padded to the longest
    longest: int | None  # the most tokens of a chunk, see `Layout.longest_pass`
    stopwatch: Stopwatch
    logprobs: list[tuple[Chunk, PendingLogprobs]] = field(default_factory=list)
    """What the passes so far give of the log-probabilities that chunks ask for."""

    def passes(self) -> Iterator[ChunkPass]:
        """Build one pass after the other. Each has to be dispatched before the next is built.

        Chunks with ``target_ids`` run one by one, since the logits of a whole chunk are large."""
        kv_only = [chunk for chunk in self.chunks if not chunk.target_ids]
        groups = [kv_only] if kv_only else []
        groups += [[chunk] for chunk in self.chunks if chunk.target_ids]
        for number, group in enumerate(groups, 1):
            yield from self._build(group, is_last=number == len(groups))

    def _build(self, chunks: Sequence[Chunk], *, is_last: bool) -> Iterator[ChunkPass]:
        if self.together or len(chunks) == 1:
            try:
                ordered = sorted(chunks, key=lambda chunk: chunk.slot)
                with self.stopwatch.computing():
                    built = ChunkPass(self._forward(ordered), is_last)
            except Exception as error:
                if is_allocation_failure(error) or isinstance(error, FilesChanged):
                    raise
                if len(chunks) == 1:
                    self.failed.append((chunks[0].slot, f"{type(error).__name__}: {error}"))
                    return
            else:
                yield built
                return
        # One by one. If that is because one chunk raised, the others are written again.
        for number, chunk in enumerate(chunks, 1):
            yield from self._build([chunk], is_last=is_last and number == len(chunks))

    def _forward(self, chunks: Sequence[Chunk]) -> list[Any]:
        """Build a pass. Return the arrays to evaluate."""
        width = max(len(chunk.token_ids) for chunk in chunks)
        if self.longest is not None and width > self.longest:
            raise ValueError(f"a chunk of {width} tokens does not fit into the rings of the slots")
        tokens = [list(chunk.token_ids) + [0] * (width - len(chunk.token_ids)) for chunk in chunks]
        batch = self.batch([Row(c.slot, c.start, c.start + len(c.token_ids)) for c in chunks])
        kv_only = not any(chunk.target_ids for chunk in chunks)
        logits = batch.logits(self.model, mx.array(tokens, mx.int32), kv_only=kv_only)
        asked = [
            (chunk, target_logprobs(logits[row], chunk.target_ids, chunk.logprobs))
            for row, chunk in enumerate(chunks)
            if chunk.target_ids
        ]
        states = batch.commit_states()
        self.logprobs += asked
        written = [self.slabs[number].contents for number in {c.slot.slab_id for c in chunks}]
        return [states, [scores.arrays for _, scores in asked], written]
