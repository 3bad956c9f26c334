"""Messages between rank 0 and the other ranks about blocks and states in the kvstore.

Each rank has its own files. Rank 0 asks the others what it asks its own client, and counts what all
of them have.
"""

from __future__ import annotations

import msgspec

from engine.parallel.plans import StoredName


class RankMessage(msgspec.Struct, frozen=True, array_like=True):
    """Base class of these messages; array_like keeps them small."""


class CountBlocks(RankMessage, frozen=True, tag=1):
    """How many of ``hashes`` are there without a gap?"""

    ticket: int
    hashes: list[bytes]


class FindLastFile(RankMessage, frozen=True, tag=2):
    """At which position in ``hashes`` is the last block, or state, that is there?"""

    ticket: int
    hashes: list[bytes]
    are_states: bool


class FetchFiles(RankMessage, frozen=True, tag=3):
    """Fetch a run of blocks, or one state, and keep it until plans release it."""

    ticket: int
    hashes: list[bytes]
    are_states: bool


class KeepFetched(RankMessage, frozen=True, tag=4):
    """Keep the first ``count`` files of a fetch, because some rank has no more."""

    ticket: int
    count: int


class TouchFiles(RankMessage, frozen=True, tag=5):
    blocks: list[bytes]
    states: list[bytes]


class ClearFiles(RankMessage, frozen=True, tag=6):
    """Have all blocks and states of this rank removed."""


class Answer(RankMessage, frozen=True, tag=7):
    ticket: int
    value: int | None
    """A count or a position. None: there is none, or the kvstore is unavailable."""


class StoreState(RankMessage, frozen=True, tag=8):
    """Changes in a rank's stores, sent after every change."""

    is_ready: bool
    files: int  # and bytes that it would take now
    size_bytes: int
    under_way: int
    stored: int  # blocks and states that it was given since the start
    not_stored: list[StoredName]


ToRank = CountBlocks | FindLastFile | FetchFiles | KeepFetched | TouchFiles | ClearFiles
FromRank = Answer | StoreState

encode = msgspec.msgpack.Encoder().encode
to_rank: msgspec.msgpack.Decoder[ToRank] = msgspec.msgpack.Decoder(ToRank)
from_rank: msgspec.msgpack.Decoder[FromRank] = msgspec.msgpack.Decoder(FromRank)
