"""Places for adapters on the device, and which adapters have them.

Places are numbered from 1. Place 0 stands for none: what is added there is zero.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from typing import Protocol

from engine.adapters.checkpoint import AdapterError, AdapterWeights, LowRank, Shape

COLUMNS = 16
"""On a CPU, columns of a first product that are computed together. MLAS divides no fewer between
threads, and sums in other pieces where there are more."""
MAX_AHEAD = 2
"""Adapters that are read, or wait in memory for a place."""


def columns_of(rank: int) -> int:
    """Return the columns that an adapter of ``rank`` takes on a CPU: whole groups, and at least
    two, since one column takes another way, like one row."""
    width = max(2, min(rank, COLUMNS))
    return -(-rank // width) * width


class AdapterStore(Protocol):
    """What keeps the factors of the adapters in places, as passes read them."""

    def put(self, place: int, layers: Mapping[str, LowRank]) -> None:
        """Give ``place`` the factors of an adapter, by layer, in place of those before."""


class AdapterPlaces:
    """The adapters in places, by their digests. Only the main thread calls this."""

    def __init__(self, shapes: Mapping[str, Shape], count: int, max_rank: int) -> None:
        self.shapes, self.count, self.max_rank = shapes, count, max_rank
        self.store: AdapterStore | None = None
        """Set once it is known how the model is computed."""
        self._places: dict[str, int] = {}  # by digest, the one used least recently first
        self.swaps = 0
        """How often an adapter has taken the place of another."""

    @property
    def digests(self) -> list[str]:
        return list(self._places)

    @property
    def reserved_bytes(self) -> int:
        """The most that all places take, in fp32, with that of none, and adapters on their way to
        one."""
        per_column = sum(shape.inputs + shape.outputs for shape in self.shapes.values())
        return 4 * (self.count + 1 + MAX_AHEAD) * columns_of(self.max_rank) * per_column

    def find(self, digest: str) -> int | None:
        """Return the place of an adapter, which counts as used now; None if it has none."""
        place = self._places.pop(digest, None)
        if place is not None:
            self._places[digest] = place
        return place

    def put(self, weights: AdapterWeights, used: Collection[int]) -> int | None:
        """Give an adapter a place that is free, or that of the one used least recently. None if
        all are ``used``. Raises: `AdapterError` if there is no memory; the place is free then."""
        place = next(self._free(), None)
        if place is None:
            victim = self.victim(used)
            if victim is None:
                return None
            place = self._places.pop(victim)
            self.swaps += 1
        assert self.store is not None
        try:
            self.store.put(place, weights.layers)
        except Exception as error:  # of MLX, most likely because it finds no memory
            raise AdapterError(f"an adapter finds no memory: {error!r}") from error
        self._places[weights.digest] = place
        return place

    def victim(self, used: Collection[int]) -> str | None:
        """Return the adapter, used least recently, whose place is not ``used``, if any."""
        return next((d for d, place in self._places.items() if place not in used), None)

    def _free(self) -> Iterator[int]:
        taken = set(self._places.values())
        return (place for place in range(1, self.count + 1) if place not in taken)
