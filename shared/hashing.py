"""Block hashes: the keys by which cached KV is found.

``H(parent, token ids of the block, pictures in it)``, chained from a root that covers everything
that affects the content of a block. BLAKE2b with 128 bits; stable across processes, machines and
releases.
"""

from __future__ import annotations

import sys
from array import array
from bisect import bisect_right
from collections.abc import Sequence
from hashlib import blake2b
from typing import NamedTuple

HASH_BYTES = 16


def namespace_root(
    *,
    fingerprint: str,
    kv_bits: int,
    kv_group_size: int,
    block_size: int,
    adapter: str = "",
    tensor_parallel: int = 1,
    head: str = "",
    products: Sequence[str] = (),
    software: Sequence[str] = (),
) -> bytes:
    """Return the root of all hashes of engines whose blocks are interchangeable.

    ``kv_group_size`` is ignored at 16 bits, where nothing is quantized. ``head`` names the weights
    of a multi-token prediction head, whose keys and values are in the blocks too; empty without
    one. ``products`` names how layers multiply and attend, if there is a choice: another choice
    gives keys with other bits. ``software`` names what computes layers: KV that a faulty version
    computed must not outlive it.
    """
    parts = [
        "page-v1",
        fingerprint,
        adapter,
        str(kv_bits),
        str(kv_group_size if kv_bits < 16 else 0),
        str(block_size),
        str(tensor_parallel),
        *([head] if head else []),
        *products,
        *software,
    ]
    digest = blake2b(digest_size=HASH_BYTES)
    for part in parts:
        encoded = part.encode()
        digest.update(len(encoded).to_bytes(4, "little") + encoded)
    return digest.digest()


def state_namespace(root: bytes, layout: Sequence[str]) -> bytes:
    """Return the namespace of stored recurrent states that follow blocks under ``root``.

    States have the hashes of blocks, so they need their own namespace. States whose arrays have
    another ``layout`` are in another namespace. Its first half is the first half of ``root``
    (`model_of`).
    """
    digest = blake2b(root, digest_size=HASH_BYTES // 2, person=b"state-v2")
    for part in layout:
        encoded = part.encode()
        digest.update(len(encoded).to_bytes(4, "little") + encoded)
    return root[: HASH_BYTES // 2] + digest.digest()


def rank_namespace(digits: str, rank: int) -> str:
    """Return the kvstore namespace of a rank's blocks or states. ``digits`` is the namespace of
    rank 0, and of an engine with one process.
    """
    return digits if rank == 0 else f"{digits}/rank_{rank}"


def split_namespace(namespace: str) -> tuple[str, int]:
    """Return the ``digits`` and the rank that `rank_namespace` was given."""
    digits, _, rank = namespace.partition("/rank_")
    return digits, int(rank or 0)


def model_of(namespace: str) -> str:
    """Return the common prefix of the namespaces of a model's blocks and states, as hex digits."""
    return namespace[:HASH_BYTES]


def prompt_root(namespace: bytes, adapter: str, cache_salt: str) -> bytes:
    """Return the root for requests with ``cache_salt``, and with the adapter whose digest is
    ``adapter``: empty without one."""
    if adapter:
        digest = blake2b(namespace, digest_size=HASH_BYTES, person=b"adapter-v1")
        digest.update(adapter.encode())
        namespace = digest.digest()
    return salted_root(namespace, cache_salt)


def salted_root(root: bytes, cache_salt: str) -> bytes:
    """Return the root for requests with ``cache_salt``, which share blocks only with each other.

    It is not the hash of any block: otherwise a client whose salt is the bytes of a block's token
    ids could place its own blocks after that block.
    """
    if not cache_salt:
        return root
    salted = root + cache_salt.encode()
    return blake2b(salted, digest_size=HASH_BYTES, person=b"salt").digest()


class Picture(NamedTuple):
    """The position of a picture in a prompt."""

    start: int  # of its first token
    length: int  # tokens
    digest: bytes  # hash of its content: equal content has equal tokens and embeddings


def block_hash(parent: bytes, token_ids: Sequence[int], pictures: bytes = b"") -> bytes:
    """Return the hash of the block with ``token_ids`` that follows ``parent`` and contains
    ``pictures``, as `pictures_in` describes them.
    """
    ids = array("I", token_ids)
    if sys.byteorder == "big":
        ids.byteswap()
    return blake2b(parent + ids.tobytes() + pictures, digest_size=HASH_BYTES).digest()


def pictures_in(pictures: Sequence[Picture], start: int, end: int) -> bytes:
    """Describe the parts of ``pictures`` (in order) in positions ``start`` to ``end`` (exclusive);
    empty if there are none.
    """
    first = bisect_right(pictures, start, key=lambda one: one.start + one.length)
    found = b""
    for one in pictures[first:]:
        if one.start >= end:
            break
        found += one.digest + (one.start - start).to_bytes(8, "little", signed=True)
    return found


def block_hashes(
    root: bytes, token_ids: Sequence[int], block_size: int, pictures: Sequence[Picture] = ()
) -> list[bytes]:
    """Return the chained hashes of the full blocks of ``token_ids``, first to last."""
    hashes: list[bytes] = []
    parent = root
    for end in range(block_size, len(token_ids) + 1, block_size):
        start = end - block_size
        shown = pictures_in(pictures, start, end)
        parent = block_hash(parent, token_ids[start:end], shown)
        hashes.append(parent)
    return hashes
