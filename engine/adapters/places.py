"""Places for adapters on the device.

Places are numbered from 1. Place 0 means no adapter: its factors are zero."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Protocol

from engine.adapters.checkpoint import AdapterError, AdapterWeights, LowRank, Shape

COLUMNS = 16
"""On a CPU, columns of a first product that are computed together. MLAS splits no fewer columns
between threads, and sums more columns in different pieces."""
MAX_AHEAD = 2
"""Max number of adapters that are being read or wait in memory for a place."""


def columns_of(rank: int) -> int:
    """Return the number of columns for an adapter of ``rank`` on a CPU: whole groups, and at
    least two, because MLAS computes a single column differently, as it does a single row."""
    width = max(2, min(rank, COLUMNS))
    return -(-rank // width) * width


class AdapterStore(Protocol):
    """Stores the factors of adapters by place, where passes read them."""

    def put(self, place: int, layers: Mapping[str, LowRank]) -> None:
        """Replace the factors in ``place`` with ``layers``, which are keyed by layer name."""


class AdapterPlaces:
    """The adapters in places, by digest. Only the main thread uses this."""

    def __init__(self, shapes: Mapping[str, Shape], count: int, max_rank: int) -> None:
        self.shapes, self.count, self.max_rank = shapes, count, max_rank
        self.wait: Callable[[], None] = lambda: None
        """The `Executor.wait` of the model, set together with ``store``: otherwise an error of the
        step in flight would be taken for one of an adapter."""
        self.store: AdapterStore | None = None
        """Set once the way in which the model is computed is known."""
        self._places: dict[str, int] = {}  # by digest, least recently used first
        self.swaps = 0
        """Number of times an adapter has replaced another one."""

    @property
    def digests(self) -> list[str]:
        return list(self._places)

    @property
    def reserved_bytes(self) -> int:
        """Max size of all places in fp32, including place 0, and of adapters waiting for a
        place."""
        per_column = sum(shape.inputs + shape.outputs for shape in self.shapes.values())
        return 4 * (self.count + 1 + MAX_AHEAD) * columns_of(self.max_rank) * per_column

    def place_of(self, digest: str) -> int:
        """Return the place of an adapter that has one."""
        return self._places[digest]

    def find(self, digest: str) -> int | None:
        """Return the place of an adapter and mark it as used now; None if it has no place."""
        place = self._places.pop(digest, None)
        if place is not None:
            self._places[digest] = place
        return place

    def put(self, weights: AdapterWeights, used: Collection[int]) -> int | None:
        """Assign an adapter a free place, or the least recently used one. Return None if all
        places are in ``used``. Raises: `AdapterError` if memory runs out; the place is then
        free. Raises what `wait` does; nothing has changed then."""
        place, victim = next(self._free(), None), self.victim(used)
        if place is None and victim is None:
            return None
        self.wait()
        if place is None:
            assert victim is not None
            place = self._places.pop(victim)
            self.swaps += 1
        assert self.store is not None
        try:
            self.store.put(place, weights.layers)
        except Exception as error:  # from MLX, most likely out of memory
            size_mb = sum(down.nbytes + up.nbytes for down, up in weights.layers.values()) / 1e6
            raise AdapterError(
                f"there is no memory for an adapter of {size_mb:.1f} MB, though "
                f"{self.reserved_bytes / 1e6:.1f} MB are reserved for adapters: {error!r}"
            ) from error
        self._places[weights.digest] = place
        return place

    def victim(self, used: Collection[int]) -> str | None:
        """Return the least recently used adapter whose place is not in ``used``, None if there
        is none."""
        return next((d for d, place in self._places.items() if place not in used), None)

    @property
    def has_free(self) -> bool:
        return len(self._places) < self.count

    def _free(self) -> Iterator[int]:
        taken = set(self._places.values())
        return (place for place in range(1, self.count + 1) if place not in taken)
