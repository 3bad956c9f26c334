"""Adapters that requests name, and the messages about them."""

from __future__ import annotations

import msgspec

from shared.wire.codec import Message


class AdapterRef(msgspec.Struct, frozen=True, kw_only=True):
    """A LoRA adapter that a request names."""

    name: str
    path: str  # its directory, where the engine is
    digest: str  # of its content; an engine takes no other under this name
    rank: int = 0  # the highest of its layers


class AdapterDecision(msgspec.Struct, frozen=True, kw_only=True):
    """The decision of an administrator about the name of an adapter."""

    name: str
    adapter: AdapterRef | None = None  # None: no adapter has the name any more
    version: int = 0  # of several decisions about a name the highest one holds


class CheckAdapter(Message, frozen=True, tag="check_adapter"):
    """Read an adapter, to be named by requests. The answer is `AdapterChecked`."""

    name: str
    path: str  # a directory, where the engine is
    number: int = 0  # tells it from earlier ones of the router


class AdapterChecked(Message, frozen=True, tag="adapter_checked"):
    """The answer to `CheckAdapter`."""

    name: str
    path: str
    number: int = 0  # that of the question; 0 from an engine of an older release
    adapter: AdapterRef | None = None
    error: str | None = None  # why it cannot be used


class AdapterDecisions(Message, frozen=True, tag="adapter_decisions"):
    """All decisions about names of adapters that the sender knows. Engines keep them for routers
    that start again, and for other routers."""

    decisions: list[AdapterDecision]
