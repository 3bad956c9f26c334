"""The passes in which chunks are computed, in one plan or in several."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import mlx.core as mx

from engine.backend.device_errors import is_device_failure
from engine.batch.given import Given
from engine.batch.layered import LayeredPass
from engine.batch.ragged import RaggedBatch, Row
from engine.cache.slots import Slots
from engine.executor.base import is_allocation_failure
from engine.executor.line import DeviceLine
from engine.executor.pictures import PictureEmbeddings, PictureUnusable
from engine.executor.stopwatch import Stopwatch
from engine.model.errors import FilesChanged
from engine.plan import Chunk, Plan, Slot
from engine.sampling.logprobs import PendingLogprobs, target_logprobs

WHOLE = 1 << 30
"""More layers than any pass has."""


class BuiltPass(NamedTuple):
    """A stretch of a pass with its graph built."""

    arrays: list[Any]  # arrays to evaluate
    is_last: bool  # stretch of the pass


class ChunkPass(NamedTuple):
    """Chunks that are computed together."""

    chunks: Sequence[Chunk]
    batch: RaggedBatch
    layers: LayeredPass
    given: dict[Slot, Given]
    """The embeddings of pictures. When chunks start again, the executor may have dropped them."""


@dataclass(eq=False)
class Passes:
    """The open passes of chunks, by the number of the plan with their chunks. A `Prefill` is the
    part that one plan computes."""

    model: Any
    slots: Slots
    batch: Callable[[Sequence[Row]], RaggedBatch]
    together: bool  # whether chunks may share a pass, padded to the longest
    pictures: PictureEmbeddings | None = None  # None: the model takes no pictures
    open: dict[int, list[ChunkPass]] = field(default_factory=dict)

    def begin(self, plan: Plan) -> None:
        """Create the passes of the chunks of ``plan``.

        Chunks with ``target_ids`` run one by one, because the logits of a whole chunk are large."""
        if plan.chunks:
            unscored = [chunk for chunk in plan.chunks if not chunk.target_ids]
            simple = [chunk for chunk in unscored if not chunk.pictures]
            pictured = [chunk for chunk in unscored if chunk.pictures]
            joins = self.pictures is not None and self.pictures.joins_rows
            groups = _groups(simple, together=self.together)
            groups += _groups(pictured, together=self.together and joins)
            groups += [[chunk] for chunk in plan.chunks if chunk.target_ids]
            self.open[plan.step] = [self._pass_of(group, {}) for group in groups]

    def close(self, number: int) -> None:
        """Abandon a pass, if it exists: a pass whose chunks have raised does not."""
        for one in self.open.pop(number, ()):
            one.layers.close()

    def clear(self) -> None:
        for number in list(self.open):
            self.close(number)
        if self.pictures is not None:
            self.pictures.clear()

    def split(self, one: ChunkPass) -> list[ChunkPass]:
        """Return a pass for each chunk of ``one``, from the start: everything is written again."""
        one.layers.close()
        return [self._pass_of([chunk], one.given) for chunk in one.chunks]

    def _pass_of(self, chunks: Sequence[Chunk], given: dict[Slot, Given]) -> ChunkPass:
        ordered = sorted(chunks, key=lambda chunk: chunk.slot)
        width = max(len(chunk.token_ids) for chunk in ordered)
        tokens = [list(chunk.token_ids) + [0] * (width - len(chunk.token_ids)) for chunk in ordered]
        rows = [
            Row(c.slot, c.start, c.start + len(c.token_ids), c.shift, c.adapter) for c in ordered
        ]
        batch = self.batch(rows)
        kv_only = not any(chunk.target_ids for chunk in ordered)

        def compute() -> mx.array:
            inputs = mx.array(tokens, mx.int32)
            embeddings = self._embeddings(ordered, given)
            return batch.logits(self.model, inputs, kv_only=kv_only, given=embeddings)

        return ChunkPass(ordered, batch, LayeredPass(batch, compute), given)

    def _embeddings(self, chunks: Sequence[Chunk], given: dict[Slot, Given]) -> Given | None:
        """Return those of a pass of ``chunks``, and keep those of each chunk in ``given``."""
        if not chunks[0].pictures:
            return None
        if self.pictures is None:
            raise PictureUnusable("this model takes no pictures")
        for chunk in chunks:
            if chunk.slot not in given:
                given[chunk.slot] = self.pictures.of(chunk)
        widths = [len(chunk.token_ids) for chunk in chunks]
        return Given.joined([given[chunk.slot] for chunk in chunks], widths)


def _reason(error: Exception) -> str:
    return str(error) if isinstance(error, PictureUnusable) else f"{type(error).__name__}: {error}"


def _groups(chunks: list[Chunk], *, together: bool) -> list[list[Chunk]]:
    return [chunks] if chunks and together else [[chunk] for chunk in chunks]


class Prefill:
    """The pictures and chunks that one plan computes."""

    def __init__(
        self,
        plan: Plan,
        passes: Passes,
        failed: list[tuple[Slot, str]],
        stopwatch: Stopwatch,
        line: DeviceLine,
    ) -> None:
        """Chunks that raise are added to ``failed``."""
        self._passes, self._failed, self._stopwatch = passes, failed, stopwatch
        self._line = line
        self._encodes = plan.encodes
        self.failed_pictures: list[tuple[bytes, str]] = []
        passes.begin(plan)
        ends = {stretch.number: stretch.end for stretch in plan.stretches}
        if plan.chunks:
            ends.setdefault(plan.step, WHOLE)
        self._ends = {number: end for number, end in ends.items() if number in passes.open}
        chunks = [c for n in self._ends for one in passes.open[n] for c in one.chunks]
        self.slots = {chunk.slot for chunk in chunks}
        self.scores = any(chunk.target_ids for chunk in chunks)
        """Whether log-probabilities of a prompt are computed."""
        self.logprobs: list[tuple[Chunk, PendingLogprobs]] = []
        """The requested log-probabilities of chunks computed so far."""

    def __bool__(self) -> bool:
        return bool(self._ends or self._encodes)

    def build(self) -> Iterator[BuiltPass]:
        """Build one pass after the other. Each must be dispatched before the next is built."""
        for op in self._encodes:
            try:
                with self._stopwatch.computing():
                    found = (
                        [] if self._passes.pictures is None else self._passes.pictures.encode(op)
                    )
            except Exception as error:
                if self._may_be_of_others(error):
                    raise
                self.failed_pictures.append((op.digest, _reason(error)))
            else:
                yield BuiltPass(found, op is self._encodes[-1] and not self._ends)
        for number, end in self._ends.items():
            is_last = number == list(self._ends)[-1]
            passes = self._passes.open
            left = passes[number]
            kept: list[ChunkPass] = []
            while left:
                one, *left = left
                try:
                    with self._stopwatch.computing():
                        arrays = self._advance(one, end)
                except Exception as error:
                    if self._may_be_of_others(error):
                        raise
                    if len(one.chunks) > 1:  # one raised: running them one by one shows which
                        left = self._passes.split(one) + left
                        passes[number] = [*kept, *left]
                        continue
                    one.layers.close()
                    self._failed.append((one.chunks[0].slot, _reason(error)))
                else:
                    if one.layers.logits is None:
                        kept.append(one)
                    passes[number] = [*kept, *left]  # closed with the others if sending raises
                    yield BuiltPass(arrays, is_last and not left)
            if kept:
                passes[number] = kept
            else:
                del passes[number]

    def _may_be_of_others(self, error: Exception) -> bool:
        """Return whether ``error``, raised while a graph was built, concerns more than its picture
        or chunk.

        If the model's code evaluates something, MLX raises a `RuntimeError` there if the work in
        flight has failed, and nobody else learns of it."""
        if is_allocation_failure(error) or is_device_failure(error):
            return True
        is_mlx = type(error) is RuntimeError and self._line.piece is not None
        return is_mlx or isinstance(error, FilesChanged)

    def _advance(self, one: ChunkPass, end: int) -> list[Any]:
        """Build the graph up to layer ``end``. Return the arrays to evaluate."""
        pending = one.layers.advance(end)
        written = self._passes.slots.contents
        logits = one.layers.logits
        if logits is None:
            return [pending, written]
        asked = [
            (chunk, target_logprobs(logits[row], chunk.target_ids, chunk.logprobs))
            for row, chunk in enumerate(one.chunks)
            if chunk.target_ids
        ]
        states = one.batch.commit_states()
        self.logprobs += asked
        return [states, [scores.arrays for _, scores in asked], written]
