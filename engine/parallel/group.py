"""The ranks of one engine, connected by MLX.

Collectives happen only in the forward pass, so a group without work waits for nothing. Our own
collective, `RankGroup.of_first`, is also part of the pass.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property
from typing import Any, Literal

import mlx.core as mx

from engine.parallel.errors import RankFailed
from engine.plan import Decode
from engine.sampling.masks import PendingMasks
from engine.sampling.sampler import Sampler, SamplerOutput

UNVERIFIED = -1


class RankGroup:
    """This process as a rank of its group."""

    def __init__(self, group: mx.distributed.Group) -> None:
        self.mlx = group
        self.rank = group.rank()
        self.size = group.size()

    @classmethod
    def join(cls, backend: Literal["ring", "jaccl"] = "ring") -> RankGroup:
        """Connect to the other ranks according to MLX's variables. Returns once all are connected.
        Raises: `RankFailed`."""
        try:
            return cls(mx.distributed.init(strict=True, backend=backend))
        except RuntimeError as error:
            raise RankFailed(f"cannot connect the ranks: {error}") from error

    def barrier(self) -> None:
        """Wait until all ranks are here. The CPU waits: a GPU that waits for seconds, for example
        for a rank that still loads, is stopped by macOS."""
        mx.eval(mx.distributed.all_sum(mx.ones(1), group=self.mlx, stream=mx.cpu))

    def of_first(self, array: mx.array, after: mx.array) -> mx.array:
        """Return rank 0's value of ``array`` on every rank. The ranks exchange it once ``after`` is
        computed, so that all collectives of a pass have the same order."""
        own = array if self.rank == 0 else mx.zeros_like(array)
        ordered = mx.depends([own], [after])[0]
        return mx.distributed.all_sum(ordered, group=self.mlx)

    @contextmanager
    def same_logits(self, model: Any) -> Iterator[None]:
        """Inside this context, let every call of ``model`` return rank 0's logits on all ranks.

        Every rank then makes the same decisions from them, as in a proof. Otherwise, sums over more
        than two ranks may differ in the last bit."""
        original = type(model)

        def call(self: Any, *args: Any, **named: Any) -> mx.array:
            logits = original.__call__(self, *args, **named)
            return group.of_first(logits, logits)

        group = self
        members = {"__call__": call, "__module__": original.__module__}
        model.__class__ = type(original.__name__, (original,), members)
        try:
            yield
        finally:
            model.__class__ = original


class RankSampler(Sampler):
    """Samples on rank 0 only. Its tokens reach the others in the graph, with -1 for tokens that no
    grammar has verified."""

    def __init__(self, group: RankGroup) -> None:
        super().__init__()
        self._group = group

    def start_masks(self, decodes: Sequence[Decode], inputs: Sequence[int | None]) -> PendingMasks:
        return super().start_masks(decodes, inputs) if self._group.rank == 0 else None

    def sample(
        self,
        logits: mx.array,
        decodes: Sequence[Decode],
        inputs: mx.array,
        masks: PendingMasks = None,
    ) -> SamplerOutput:
        if self._group.rank == 0:
            found = super().sample(logits, decodes, inputs, masks)
            if found.unverified:
                rows = mx.array(sorted(found.unverified))
                found.tokens[rows] = mx.full(rows.shape, UNVERIFIED, found.tokens.dtype)
        else:
            found = SamplerOutput(mx.zeros(len(decodes), mx.int32))
        tokens = self._group.of_first(found.tokens, after=logits)
        unverified = found.unverified if self._group.rank == 0 else _UnverifiedRows(tokens)
        return found._replace(tokens=tokens, unverified=unverified)


class _UnverifiedRows(Collection[int]):
    """Rows marked by rank 0. They are read on demand."""

    def __init__(self, tokens: mx.array) -> None:
        self._tokens = tokens

    @cached_property
    def _rows(self) -> frozenset[int]:
        tokens: list[int] = self._tokens.tolist()
        return frozenset(row for row, token in enumerate(tokens) if token == UNVERIFIED)

    def __contains__(self, row: object) -> bool:
        return row in self._rows

    def __iter__(self) -> Iterator[int]:
        return iter(self._rows)

    def __len__(self) -> int:
        return len(self._rows)
