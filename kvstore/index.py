"""The blocks on disk by last use: sizes, ages, order.

Plain data in memory. Not thread-safe; `DiskStore` holds a lock.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections import Counter, OrderedDict
from collections.abc import Iterable, Iterator
from struct import Struct

from kvstore.directory import BlockKey, FileInfo
from shared.blockfile import MAX_FILE_BYTES
from shared.hashing import HASH_BYTES, model_of, rank_namespace, split_namespace

_SIZE_BITS = (2 * MAX_FILE_BYTES - 1).bit_length()
"""With this factor, an integer of size and time needs no third digit before the year 2038."""

_ENTRY = Struct(">QI")
"""Last use (in microseconds) and size of a block, placed before its key: sorts by last use."""
_SORTED_RUN = 16384
"""Number of blocks sorted at once: sorting a million would stop all threads for a second."""
IN_USE_S = 86400.0
"""How long a model keeps its share of the space after its last use: overnight, while its users
sleep."""


class LruIndex:
    """Blocks by last use, oldest first, in namespaces: a model has one for its blocks, and another
    for its recurrent state, if any.

    An index starts incomplete: the directory may have blocks that it does not know yet. `complete`
    adds the result of a scan of the directory, as older than everything recorded since the start.

    A million blocks are common, so each is one bytes key and one integer. (A tuple per block took
    twice the memory.)
    """

    def __init__(self) -> None:
        self.bytes = 0
        self.is_complete = False
        self._namespaces: dict[str, _Namespace] = {}
        self._removed_while_loading: set[BlockKey] = set()

    @classmethod
    def of(cls, found: Iterable[tuple[BlockKey, FileInfo]], now: float) -> LruIndex:
        """Return an index of ``found``, in any order; none was used after ``now``."""
        scanned, runs = iter(found), []
        while run := [
            _ENTRY.pack(max(0, int(1e6 * min(info.last_used, now))), info.size)
            + _pack_namespace(key.namespace)
            + key.hash
            for key, info in itertools.islice(scanned, _SORTED_RUN)
        ]:
            run.sort(reverse=True)
            runs.append(run)
        index = cls()
        for entry in heapq.merge(*map(_drain, runs)):
            at_us, size = _ENTRY.unpack_from(entry)
            namespace = _unpack_namespace(entry[_ENTRY.size : -HASH_BYTES])
            key = BlockKey(namespace, entry[-HASH_BYTES:])
            index.record_use(key, size, at_us / 1e6)
        return index

    def __len__(self) -> int:
        return sum(len(namespace.blocks) for namespace in self._namespaces.values())

    def __contains__(self, key: BlockKey) -> bool:
        namespace = self._namespaces.get(key.namespace)
        return namespace is not None and key.hash in namespace.blocks

    def record_use(self, key: BlockKey, size: int, at: float) -> None:
        """Add the block, or mark it as most recently used."""
        self._discard(key)
        namespace = self._namespaces.setdefault(key.namespace, _Namespace())
        namespace.blocks[key.hash] = _pack_info(size, at)
        namespace.bytes += size
        self.bytes += size
        self._removed_while_loading.discard(key)

    def remove(self, key: BlockKey) -> None:
        self._discard(key)
        if not self.is_complete:
            self._removed_while_loading.add(key)

    def lacks(self, key: BlockKey) -> bool:
        """Return whether the block was removed, or a complete index has not got it."""
        return key in self._removed_while_loading or (self.is_complete and key not in self)

    def blocks_of(self, namespace: str) -> list[tuple[BlockKey, FileInfo]]:
        found = self._namespaces.get(namespace)
        blocks = {} if found is None else found.blocks
        return [(BlockKey(namespace, hash), _unpack_info(blocks[hash])) for hash in blocks]

    def oldest(self) -> tuple[BlockKey, FileInfo] | None:
        """Return the least recently used block."""
        return self._oldest_of(self._namespaces)

    def next_to_evict(
        self, incoming: str | None, incoming_bytes: int, now: float
    ) -> tuple[BlockKey, FileInfo] | None:
        """Return the block to evict so that ``incoming_bytes`` of the namespace ``incoming`` fit:
        the least recently used block among the models that exceed their fair share.

        A share is an equal part for each model used within `IN_USE_S`; others have none. A model
        that needs less than its share thus loses nothing, and others may borrow the rest. The time
        is linear in the number of namespaces, which is small.
        """
        sizes = Counter({} if incoming is None else {model_of(incoming): incoming_bytes})
        in_use = set(sizes)
        for name, namespace in self._namespaces.items():
            sizes[model_of(name)] += namespace.bytes
            if now - namespace.last_used < IN_USE_S:
                in_use.add(model_of(name))
        share = sizes.total() / max(1, len(in_use))
        over = {model for model, size in sizes.items() if size >= share or model not in in_use}
        candidates = [name for name in self._namespaces if model_of(name) in over]
        return self._oldest_of(candidates) or self.oldest()

    def complete(self, scanned: LruIndex) -> None:
        """Add the result of a scan, as older than everything used since the start.

        ``scanned`` is consumed. A lock is held meanwhile, so the time depends only on the blocks
        used since the start.
        """
        newer, self._namespaces, self.bytes = self._namespaces, scanned._namespaces, scanned.bytes
        for key in self._removed_while_loading:
            self._discard(key)
        for name, namespace in newer.items():
            for hash, packed in namespace.blocks.items():
                info = _unpack_info(packed)
                self.record_use(BlockKey(name, hash), info.size, info.last_used)
        self.is_complete = True
        self._removed_while_loading.clear()

    def _discard(self, key: BlockKey) -> None:
        namespace = self._namespaces.get(key.namespace)
        if namespace is None or (known := namespace.blocks.pop(key.hash, None)) is None:
            return
        size = _unpack_info(known).size
        namespace.bytes -= size
        self.bytes -= size
        if not namespace.blocks:
            del self._namespaces[key.namespace]

    def _oldest_of(self, names: Iterable[str]) -> tuple[BlockKey, FileInfo] | None:
        found = [
            (BlockKey(name, hash), _unpack_info(packed))
            for name in names
            if (namespace := self._namespaces.get(name)) is not None
            for hash, packed in itertools.islice(namespace.blocks.items(), 1)
        ]
        return min(found, key=lambda each: each[1].last_used, default=None)


class _Namespace:
    """The blocks of one namespace, least recently used first, and their size in bytes."""

    def __init__(self) -> None:
        self.blocks: OrderedDict[bytes, int] = OrderedDict()
        self.bytes = 0

    @property
    def last_used(self) -> float:
        return _unpack_info(next(reversed(self.blocks.values()))).last_used


def _pack_info(size: int, at: float) -> int:
    return max(0, math.ceil(at)) << _SIZE_BITS | size


def _pack_namespace(namespace: str) -> bytes:
    digits, rank = split_namespace(namespace)
    return bytes.fromhex(digits) + rank.to_bytes(2, "big")


def _unpack_namespace(packed: bytes) -> str:
    return rank_namespace(packed[:HASH_BYTES].hex(), int.from_bytes(packed[HASH_BYTES:], "big"))


def _unpack_info(packed: int) -> FileInfo:
    return FileInfo(packed & ((1 << _SIZE_BITS) - 1), packed >> _SIZE_BITS)


def _drain(run: list[bytes]) -> Iterator[bytes]:
    """Yield the entries of ``run`` from its end, and free each."""
    while run:
        yield run.pop()
