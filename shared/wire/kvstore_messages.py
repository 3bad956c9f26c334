"""The messages between engine and kvstore. ``ticket`` pairs a reply with its request."""

from __future__ import annotations

from shared.wire.codec import PROTOCOL_VERSION, Message
from shared.wire.parts import StoreStats

# -- engine -> kvstore ---------------------------------------------------------


class Locate(Message, frozen=True, tag="locate"):
    """Find out whether both sides share a file system: the kvstore replies with the path of a nonce
    file, and the engine sends the content that it reads there (`Located`).
    """

    protocol: int = PROTOCOL_VERSION


class Located(Message, frozen=True, tag="located"):
    """The proof of a shared file system: with the right nonce, `Get` is answered with paths."""

    nonce: str


class Has(Message, frozen=True, tag="has"):
    """Ask how many of ``hashes``, counted from the first, are stored without a gap."""

    ticket: int
    namespace: str
    hashes: list[bytes]


class FindLast(Message, frozen=True, tag="find_last"):
    """Ask for the last of ``hashes`` that is stored, if the kvstore supports it (`Nonce`)."""

    ticket: int
    namespace: str
    hashes: list[bytes]


class Get(Message, frozen=True, tag="get"):
    """Request the blocks of ``hashes`` up to the first missing one."""

    ticket: int
    namespace: str
    hashes: list[bytes]


class Put(Message, frozen=True, tag="put"):
    """Store one block; the frame is a whole block file (see `shared.blockfile`)."""

    ticket: int
    namespace: str
    hash: bytes


class Touch(Message, frozen=True, tag="touch"):
    """Mark these blocks as recently used. No reply."""

    namespace: str
    hashes: list[bytes]


class Corrupt(Message, frozen=True, tag="corrupt"):
    """Report a block that the engine read from its path and found damaged. No reply."""

    namespace: str
    hash: bytes


class Clear(Message, frozen=True, tag="clear"):
    """Remove all blocks of ``namespace``. No reply."""

    namespace: str


class StoreStatsWanted(Message, frozen=True, tag="store_stats_wanted"):
    """Ask for `StoreStats`."""


# -- kvstore -> engine ---------------------------------------------------------


class Nonce(Message, frozen=True, tag="nonce"):
    """The reply to `Locate`."""

    path: str
    finds_last: bool = False  # whether it supports `FindLast`


class FindLastReply(Message, frozen=True, tag="find_last_reply"):
    ticket: int
    position: int | None  # index into the requested hashes; None: none of them is stored


class HasReply(Message, frozen=True, tag="has_reply"):
    ticket: int
    count: int


class GetReply(Message, frozen=True, tag="get_reply"):
    """The blocks found, as paths or as one raw frame per block."""

    ticket: int
    count: int
    paths: list[str] | None = None  # one per block; None: the blocks are in the frames


class PutReply(Message, frozen=True, tag="put_reply"):
    ticket: int
    stored: bool  # False: dropped, because the writer is behind or the disk is full
    reason: str = ""


class StoreStatsReply(Message, frozen=True, tag="store_stats"):
    stats: StoreStats


ToStore = Locate | Located | Has | FindLast | Get | Put | Touch | Corrupt | Clear | StoreStatsWanted
FromStore = Nonce | HasReply | FindLastReply | GetReply | PutReply | StoreStatsReply
