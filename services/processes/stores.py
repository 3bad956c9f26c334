"""Connections of an engine's processes to the kvstore."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

import zmq

from engine.io.inbox import BlocksFetched, Inbox, StoresAnswered
from engine.io.store.block_fetch import FileKind
from engine.io.store.prefix_fetch import OnFetched
from shared.hashing import rank_namespace, state_namespace
from shared.network.curve import engine_keys
from shared.settings import Settings

if TYPE_CHECKING:  # these import mlx
    from engine.executor.base import ExecutorSpec
    from engine.io.store.client import StoreClient
    from engine.io.store.group_store import EngineStore
    from engine.io.store.rank_store import RankStore
    from engine.io.thread import IOThread
    from engine.parallel.leader import Leader
    from engine.replica.build import Replica

READERS = 4


def connect_store(
    options: Settings,
    context: zmq.Context[zmq.Socket[bytes]],
    replica: Replica,
    io_thread: IOThread,
    inbox: Inbox,
    leader: Leader | None,
) -> EngineStore | None:
    """Return the client of the kvstore; None if there is no kvstore, or no use for it."""
    if not options.kvstore_socket or not replica.uses_store:
        return None
    from engine.io.store.group_store import GroupStore

    client = _client(
        options,
        context,
        _kinds(replica.namespace, replica.executor.spec, 0),
        on_fetched=lambda *fetched: inbox.put(BlocksFetched(*fetched)),
        on_stores_answered=lambda not_stored: inbox.put(StoresAnswered(not_stored)),
        wake=io_thread.wake,
    )
    store: EngineStore = client
    if leader is not None:
        store = GroupStore(
            client,
            leader.stores,
            leader.group.size,
            leader.released.append,
            on_fetched=lambda *fetched: inbox.put(BlocksFetched(*fetched)),
            on_stores_answered=lambda not_stored: inbox.put(StoresAnswered(not_stored)),
            wake=io_thread.wake,
        )
    io_thread.use_store(store)
    return store


def connect_rank_store(
    options: Settings,
    context: zmq.Context[zmq.Socket[bytes]],
    channel: zmq.Socket[bytes],
    rank: int,
    namespace: bytes,
    spec: ExecutorSpec,
) -> RankStore:
    """Connect a rank other than 0 to the kvstore. ``channel`` leads to rank 0's `GroupStore`."""
    from engine.io.store.rank_store import RankStore

    def connect(store: RankStore) -> StoreClient:
        return _client(
            options,
            context,
            _kinds(namespace, spec, rank),
            on_fetched=lambda *fetched: None,  # rank 0 requests the parts of a fetch
            on_stores_answered=store.not_stored,
            wake=store.wake,
        )

    return RankStore(channel, connect)


def _client(
    options: Settings,
    context: zmq.Context[zmq.Socket[bytes]],
    kinds: tuple[FileKind, FileKind],
    *,
    on_fetched: OnFetched,
    on_stores_answered: Callable[[list[tuple[bytes, bool]]], None],
    wake: Callable[[], None],
) -> StoreClient:
    """Connect to the kvstore. ``kinds`` are the kinds of blocks and states."""
    from engine.io.store.client import StoreClient

    address, (blocks, states) = options.kvstore_socket[0], kinds
    return StoreClient(
        context,
        address,
        blocks,
        ThreadPoolExecutor(READERS, thread_name_prefix="files"),
        states=states,
        on_fetched=on_fetched,
        on_stores_answered=on_stores_answered,
        wake=wake,
        keys=engine_keys(options.curve_dir, address),
    )


def _kinds(namespace: bytes, spec: ExecutorSpec, rank: int) -> tuple[FileKind, FileKind]:
    """Return the kinds of files of a rank's blocks and states."""
    states = state_namespace(namespace, spec.state_layout)
    return (
        FileKind(rank_namespace(namespace.hex(), rank), spec.page_buffers),
        FileKind(rank_namespace(states.hex(), rank), spec.state_buffers),
    )
