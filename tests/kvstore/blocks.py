"""Blocks for tests, named by numbers."""

from __future__ import annotations

import time
from collections.abc import Callable

from kvstore.directory import BlockKey
from shared.blockfile import encode
from shared.hashing import HASH_BYTES

NAMESPACE = "0a" * HASH_BYTES


def hash_of(number: int) -> bytes:
    return number.to_bytes(HASH_BYTES, "big")


def key_of(number: int, namespace: str = NAMESPACE) -> BlockKey:
    return BlockKey(namespace, hash_of(number))


def payload_of(number: int, size: int = 1000) -> tuple[bytes, ...]:
    return (bytes([number % 256]) * size, b"tail of %d" % number)


def file_of(number: int, size: int = 1000, namespace: str = NAMESPACE) -> bytes:
    return encode(hash_of(number), namespace, payload_of(number, size))


def wait_until(condition: Callable[[], bool], timeout_s: float = 60.0) -> None:
    """Fail the test if ``condition`` does not become true in time."""
    end = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < end, "it did not happen"
        time.sleep(0.01)
