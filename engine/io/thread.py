"""The IO thread: every socket, the heartbeats, the signals, and the end of the process.

The main thread may be busy computing for seconds. This thread never is: it answers the router,
tells the supervisor that the process is alive, detects a main thread without progress, and can end
the process without it.
"""

from __future__ import annotations

import logging
import os
import signal
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import IO

import msgspec
import zmq

from engine.io.inbox import Inbox, InboxMessage, NewRouter, with_frames
from engine.io.ownership import Ownership
from engine.io.router_link import HIGH_WATER_MARK, RouterLink
from engine.io.router_links import RouterLinks
from engine.io.status import EngineStatus, StallWatch
from engine.io.store.group_store import EngineStore
from engine.io.traces import SequenceTraces
from shared import wire
from shared.adapter_names import DecisionTable
from shared.exits import EXIT_OK, EXIT_STUCK
from shared.logs import RateLimitedLogger
from shared.supervisor_link import SupervisorLink

logger = logging.getLogger(__name__)

HEARTBEAT_INTERVAL_S, IDLE_HEARTBEAT_INTERVAL_S = 0.5, 1.0
"""While there are requests, and while there are none."""
ROUTER_GONE_S = 10.0
"""A router without a connection for this long has given its requests to others, or is gone."""
DROP_LOG_INTERVAL_S = 10.0
SUSPENDED_S = 2.0
"""The thread wakes up at least once per second. If it is later than this, the process was
suspended."""


class IOThread(threading.Thread):
    """Connects the engine to its routers, its kvstore and its supervisor. Each router sees only its
    own requests.

    Exits with EXIT_STUCK after ``stall_timeout_s`` without progress, and with EXIT_OK on a second
    signal or when draining takes longer than ``drain_timeout_s``.
    """

    def __init__(
        self,
        *,
        links: RouterLinks,
        engine: str,
        incarnation: str,
        inbox: Inbox,
        status: EngineStatus,
        supervisor: SupervisorLink | None,
        stall_timeout_s: float,
        drain_timeout_s: float,
        traces: SequenceTraces | None = None,
    ) -> None:
        super().__init__(name="io", daemon=True)
        self._engine, self._incarnation = engine, incarnation
        self._inbox, self._status = inbox, status
        self._supervisor = supervisor
        self._traces = traces
        self._stall_timeout_s, self._drain_timeout_s = stall_timeout_s, drain_timeout_s
        self._links = links
        self._requests: Ownership[RouterLink] = Ownership()
        self._poller = zmq.Poller()
        for link in self._links:
            self._watch(link)
        self._wake_receiver, self._wake_sender = wake = socket.socketpair()
        self._signal_receiver, self._signal_sender = signals = socket.socketpair()
        for receiver, sender in (wake, signals):
            receiver.setblocking(False)
            sender.setblocking(False)
            self._poller.register(receiver.fileno(), zmq.POLLIN)
        self._calls: deque[Callable[[], None]] = deque()
        self._store: EngineStore | None = None
        self._hello: wire.Hello | None = None  # until the model is loaded
        self._tokenizer_files: dict[str, IO[bytes]] = {}
        self._decisions = DecisionTable()
        self._stall = StallWatch()
        self._wakes_at = time.monotonic()
        """The latest time at which the thread continues, unless the process is suspended."""
        self._heartbeats = 0
        self._next_heartbeat = 0.0
        self._dropped = 0
        self._drop_log = RateLimitedLogger(logger, DROP_LOG_INTERVAL_S)
        self._drain_until: float | None = None
        self._stopping = threading.Event()

    # -- called by the main thread ---------------------------------------------

    def catch_signals(self) -> None:
        """Handle SIGTERM and SIGINT on this thread, even while the main thread computes."""
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, lambda *_: None)
        signal.set_wakeup_fd(self._signal_sender.fileno(), warn_on_full_buffer=False)

    def introduce(self, hello: wire.Hello, files: dict[str, Path]) -> None:
        """Give routers ``hello`` and the named ``files``, even if others replace them. Called once
        the model is loaded."""
        opened: dict[str, IO[bytes]] = {name: file.open("rb") for name, file in files.items()}

        def call() -> None:
            self._hello, self._tokenizer_files = hello, opened
            for link in self._links:
                if link.pinged:
                    link.post(hello)

        self._run_on_thread(call)

    def use_store(self, store: EngineStore) -> None:
        def call() -> None:
            self._store = store
            for each in store.sockets:
                self._poller.register(each, zmq.POLLIN)

        self._run_on_thread(call)

    def send(self, messages: Sequence[wire.Message]) -> None:
        """Send ``messages``, in order, each to the router it concerns."""

        def call() -> None:
            for message in messages:
                for owner, part in self._requests.route(message):
                    for link in self._links if owner is None else (owner,):
                        link.post(part)
            if self._traces is not None:
                self._traces.on_sent(messages)

        self._run_on_thread(call)

    def wake(self) -> None:
        try:
            self._wake_sender.send(b"w")
        except BlockingIOError:
            pass  # enough wake-ups are pending

    def stop(self, timeout_s: float = 2.0) -> None:
        """Send the queued messages, then stop the thread."""
        self._stopping.set()
        self.wake()
        self.join(timeout_s)

    def _run_on_thread(self, call: Callable[[], object]) -> None:
        self._calls.append(lambda: (call(), None)[1])
        self.wake()

    # -- the thread ------------------------------------------------------------

    def run(self) -> None:
        self._links.start()
        try:
            while not (self._stopping.is_set() and not self._calls and self._sent_all):
                now = time.monotonic()
                self._exclude(now - self._wakes_at)
                if now >= self._next_heartbeat:
                    self._heartbeat(now)
                    self._next_heartbeat = now + self._heartbeat_interval_s
                self._check_deadlines(now)
                self._check_links(now)
                self._flush()
                self._wakes_at = max(now, self._next_heartbeat)
                events = dict(self._poller.poll(max(1, int((self._wakes_at - now) * 1000))))
                self._handle_events(events)
        except BaseException:
            logger.exception("the IO thread failed")
            os._exit(EXIT_STUCK)
        self._links.close()

    @property
    def _sent_all(self) -> bool:
        """Whether messages are queued only for disconnected routers."""
        return not any(link.is_backed_up for link in self._links if link.is_connected)

    def _handle_events(self, events: dict[object, int]) -> None:
        if self._wake_receiver.fileno() in events:
            _read_all(self._wake_receiver)
        while self._calls:
            self._calls.popleft()()
        if self._signal_receiver.fileno() in events:
            self._on_signal(_read_all(self._signal_receiver))
        for link in self._links:
            if link.monitor in events:
                link.on_event()
                self._next_heartbeat = 0.0  # it may just have connected
            if link.socket in events:
                self._receive(link)
        if self._store is not None:
            if any(each in events for each in self._store.sockets):
                self._store.on_readable()
            self._store.tick(time.monotonic())

    def _receive(self, link: RouterLink) -> None:
        for _ in range(HIGH_WATER_MARK):
            frames = link.receive()
            if frames is None:
                return
            try:
                message, payload = wire.decode(frames, wire.ToEngine)
            except wire.WireError as error:
                self._count_dropped(error)
                continue
            self._dispatch(link, message, payload)

    def _dispatch(self, link: RouterLink, message: wire.ToEngine, payload: list[bytes]) -> None:
        if isinstance(message, wire.Ping):
            self._on_ping(link, message)
        elif isinstance(message, wire.FilesWanted):
            self._on_files_wanted(link, message)
        elif isinstance(message, wire.AdapterDecisions):
            self._on_decisions(link, message)
        elif isinstance(message, wire.Submit | wire.Encode) and self._hello is None:
            name, attempt, why = message.request_id, message.attempt, "the model is still loading"
            link.post(wire.Refused(request_id=name, attempt=attempt, reason="full", message=why))
        elif not isinstance(message, wire.Abort) or self._requests.is_of(message, link):
            if isinstance(message, wire.Submit | wire.Encode):
                self._requests.add(message, link)
                due = time.monotonic() + HEARTBEAT_INTERVAL_S
                self._next_heartbeat = min(self._next_heartbeat, due)
            if self._traces is not None:
                self._traces.on_received(message)
            self._put(with_frames(message, payload))

    def _put(self, item: InboxMessage) -> None:
        """Pass ``item`` to the main thread. If it was idle until now, that time is not a stall."""
        self._stall.observe(self._status, len(self._inbox) > 0, time.monotonic())
        self._inbox.put(item)

    def _on_ping(self, link: RouterLink, ping: wire.Ping) -> None:
        link.compare(ping.protocol)
        if ping.router_id != link.router_id:
            if link.router_id is not None:
                logger.warning("new router: the requests of the previous one are dropped")
            link.router_id = ping.router_id
            self._drop_requests(link)
        link.pinged = True
        if self._hello is not None:
            link.post(self._hello)
            if decisions := self._decisions.all:
                link.post(wire.AdapterDecisions(decisions=decisions))

    def _on_decisions(self, link: RouterLink, message: wire.AdapterDecisions) -> None:
        """Store an administrator's decision made at one router, and send it to the others."""
        if self._decisions.merge(message.decisions):
            for other in self._links:
                if other is not link and other.pinged:
                    other.post(wire.AdapterDecisions(decisions=self._decisions.all))

    def _drop_requests(self, link: RouterLink) -> None:
        """Drop the requests of a router that no longer reads their tokens."""
        link.clear()
        requests = self._requests.take_all_of(link)
        self._put(NewRouter(requests))
        if self._traces is not None:
            self._traces.on_dropped(requests)

    def _on_files_wanted(self, link: RouterLink, wanted: wire.FilesWanted) -> None:
        contents: dict[str, bytes] = {}
        for name in wire.TOKENIZER_FILES:
            if name in wanted.names and name in self._tokenizer_files:
                try:
                    self._tokenizer_files[name].seek(0)
                    contents[name] = self._tokenizer_files[name].read()
                except OSError as error:
                    logger.error("cannot read a file of the model any more: %s", error)
        link.post(wire.Files(names=list(contents)), *contents.values())

    def _flush(self) -> None:
        for link in self._links:
            if link.is_overfull:
                logger.error("the router at %s does not read: its requests are dropped", link)
                self._drop_requests(link)
            blocked = not link.flush()
            self._poller.modify(link.socket, zmq.POLLIN | (zmq.POLLOUT if blocked else 0))

    def _watch(self, link: RouterLink) -> None:
        self._poller.register(link.socket, zmq.POLLIN)
        self._poller.register(link.monitor, zmq.POLLIN)

    def _check_links(self, now: float) -> None:
        new, gone = self._links.follow_names()
        for link in new:
            self._watch(link)
        for link in gone:
            self._drop_requests(link)
            self._poller.unregister(link.socket)
            self._poller.unregister(link.monitor)
            link.close()
        for link in self._links:
            link.tick(now, is_idle=not self._requests.has_any_of(link))
            if link.gone_since is not None and now - link.gone_since > ROUTER_GONE_S:
                logger.warning("the router at %s is gone: its requests are dropped", link)
                link.gone_since = None
                self._drop_requests(link)

    # -- heartbeats, stalls, signals ------------------------------------------------

    @property
    def _heartbeat_interval_s(self) -> float:
        status = self._status
        has_work = len(self._requests) or status.live or len(self._inbox) or status.phase != "ready"
        is_storing = self._store is not None and self._store.num_stores_under_way
        return HEARTBEAT_INTERVAL_S if has_work or is_storing else IDLE_HEARTBEAT_INTERVAL_S

    def _heartbeat(self, now: float) -> None:
        self._heartbeats += 1
        status = self._status
        if self._supervisor is not None:
            facts = {"reason": status.reason} if status.phase == "loading" else {}
            self._supervisor.heartbeat(status.phase, device_bytes=status.device_bytes, **facts)
        live = status.live
        if not len(self._inbox):  # messages that wait there are not live yet
            self._requests.on_heartbeat(live)
        heartbeat = wire.Heartbeat(
            engine=self._engine,
            incarnation=self._incarnation,
            number=self._heartbeats,
            phase=status.phase,
            phase_s=now - status.phase_since,
            stalled_s=self._stall.stalled_s(status, len(self._inbox) > 0, now),
            live=[],
            stats=self._with_store_stats(status.stats),
            store=self._store.stats.store if self._store is not None else None,
        )
        for link in self._links:
            # No outdated heartbeats are queued for a disconnected router.
            if link.is_connected and not link.is_backed_up:
                own = self._requests.live_of(link, live)
                link.post(msgspec.structs.replace(heartbeat, live=own))

    def _with_store_stats(self, stats: wire.EngineStats) -> wire.EngineStats:
        stats = msgspec.structs.replace(stats, dropped_messages_total=self._dropped)
        if self._store is None:
            return stats
        figures = self._store.stats
        return msgspec.structs.replace(
            stats,
            store_reads_total=figures.reads,
            store_writes_total=figures.writes,
            store_drops_total=figures.drops,
            store_corrupt_total=figures.corrupt,
            store_read_bytes_total=figures.read_bytes,
            store_written_bytes_total=figures.written_bytes,
        )

    def _exclude(self, suspended_s: float) -> None:
        """Exclude a time in which this thread, and so the main thread, was suspended: by a signal,
        or with its container."""
        if suspended_s > SUSPENDED_S:
            level = logging.DEBUG if self._hello is None else logging.WARNING  # loading does it too
            logger.log(
                level, "this process was suspended for %.0f s, which is not counted", suspended_s
            )
            self._stall.exclude(suspended_s)
            if self._drain_until is not None:
                self._drain_until += suspended_s

    def _check_deadlines(self, now: float) -> None:
        if self._drain_until is not None and now > self._drain_until:
            logger.error("draining took longer than %g s: exiting", self._drain_timeout_s)
            os._exit(EXIT_OK)
        stalled = self._stall.stalled_s(self._status, len(self._inbox) > 0, now)
        if stalled > self._stall_timeout_s:
            logger.error("requests wait, but nothing was computed for %.0f s: exiting", stalled)
            os._exit(EXIT_STUCK)

    def _on_signal(self, signals: bytes) -> None:
        if not signals:
            return
        if self._drain_until is not None or self._hello is None or len(signals) > 1:
            os._exit(EXIT_OK)
        self._drain_until = time.monotonic() + self._drain_timeout_s
        self._put(wire.Drain())

    def _count_dropped(self, error: wire.WireError) -> None:
        self._dropped += 1
        self._drop_log.warning("dropped an invalid message (%d so far): %s", self._dropped, error)


def _read_all(receiver: socket.socket) -> bytes:
    data = b""
    try:
        while more := receiver.recv(4096):
            data += more
    except BlockingIOError:
        pass
    return data
