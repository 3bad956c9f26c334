"""The queue of blocks to write, fair between engines."""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable
from dataclasses import dataclass

from kvstore.directory import BlockKey

MAX_QUEUED_BYTES = 512 * 1024 * 1024


@dataclass(frozen=True, eq=False)
class PendingWrite:
    """A block to write."""

    key: BlockKey
    data: bytes
    # Called on any thread with the reason if the block was not stored, or with "" once it is on
    # disk.
    on_done: Callable[[str], None]
    engine: bytes = b""  # identity of the engine that sent it


class WriteQueue:
    """Blocks by engine. Engines take turns, and a full queue drops from the engine with the most
    queued bytes.

    Not thread-safe; `Writer` holds a lock.
    """

    def __init__(self, max_blocks: int) -> None:
        self._max_blocks = max_blocks
        self._num_blocks = self._num_bytes = 0
        self._by_engine: OrderedDict[bytes, deque[PendingWrite]] = OrderedDict()

    def __len__(self) -> int:
        return self._num_blocks

    def push(self, put: PendingWrite) -> list[PendingWrite]:
        """Add ``put``. Return the blocks dropped to make room: ``put`` itself, or the last ones of
        the engine with the most queued bytes."""
        displaced: list[PendingWrite] = []
        own_bytes = _num_bytes(self._by_engine.get(put.engine, ())) + len(put.data)
        while self._is_full(put):
            longest = max(
                self._by_engine,
                key=lambda engine: _num_bytes(self._by_engine[engine]),
                default=None,
            )
            if longest is None or _num_bytes(self._by_engine[longest]) <= own_bytes:
                return [*displaced, put]
            displaced.append(self._take(longest, last=True))
        self._by_engine.setdefault(put.engine, deque()).append(put)
        self._num_blocks += 1
        self._num_bytes += len(put.data)
        return displaced

    def drop(self, namespace: str) -> list[PendingWrite]:
        """Drop the blocks of ``namespace``, and return them."""
        dropped = []
        for engine, waiting in list(self._by_engine.items()):
            kept = deque(put for put in waiting if put.key.namespace != namespace)
            dropped += [put for put in waiting if put.key.namespace == namespace]
            self._num_blocks -= len(waiting) - len(kept)
            self._num_bytes -= _num_bytes(waiting) - _num_bytes(kept)
            self._by_engine[engine] = kept
            if not kept:
                del self._by_engine[engine]
        return dropped

    def pop(self) -> PendingWrite | None:
        """Return the next block, or None."""
        for engine in self._by_engine:
            self._by_engine.move_to_end(engine)
            return self._take(engine, last=False)
        return None

    def _is_full(self, put: PendingWrite) -> bool:
        too_many = self._num_blocks >= self._max_blocks
        return too_many or self._num_bytes + len(put.data) > MAX_QUEUED_BYTES

    def _take(self, engine: bytes, *, last: bool) -> PendingWrite:
        waiting = self._by_engine[engine]
        put = waiting.pop() if last else waiting.popleft()
        if not waiting:
            del self._by_engine[engine]
        self._num_blocks -= 1
        self._num_bytes -= len(put.data)
        return put


def _num_bytes(waiting: deque[PendingWrite] | tuple[()]) -> int:
    return sum(len(put.data) for put in waiting)
