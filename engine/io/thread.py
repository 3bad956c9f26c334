"""The IO thread: every socket, the beats, the signals, and the end of the process.

The main thread may be inside a computation for seconds. This thread never is: it answers the
router, tells the supervisor that the process lives, detects a main thread that makes no
progress, and can end the process without it.
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

import msgspec
import zmq

from engine.io.inbox import Inbox, NewRouter
from engine.io.status import EngineStatus, StallWatch
from engine.io.store_client import StoreClient
from engine.io.traces import SequenceTraces
from shared import wire
from shared.exits import EXIT_OK, EXIT_STUCK
from shared.logs import RateLimitedLogger
from shared.supervisor_link import SupervisorLink

logger = logging.getLogger(__name__)

BEAT_INTERVAL_S = 0.5
HIGH_WATER_MARK = 2_000
OUTBOX_LIMIT = 20_000
DROP_LOG_INTERVAL_S = 10.0


class IOThread(threading.Thread):
    """Connects the engine to its router, its kvstore and its supervisor.

    Ends the process with EXIT_STUCK after ``stall_timeout_s`` without progress. Ends it with
    EXIT_OK on a second signal, or when draining takes longer than ``drain_timeout_s``.
    """

    def __init__(
        self,
        *,
        context: zmq.Context[zmq.Socket[bytes]],
        endpoint: str,
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
        self._socket = context.socket(zmq.DEALER)
        self._socket.setsockopt(zmq.LINGER, 500)
        self._socket.setsockopt(zmq.SNDHWM, HIGH_WATER_MARK)
        self._socket.setsockopt(zmq.RCVHWM, HIGH_WATER_MARK)
        self._socket.setsockopt(zmq.IPV6, int("[" in endpoint))
        self._socket.setsockopt(zmq.RECONNECT_IVL, 50)
        self._socket.setsockopt(zmq.RECONNECT_IVL_MAX, 1000)
        self._socket.connect(endpoint)
        self._poller = zmq.Poller()
        self._poller.register(self._socket, zmq.POLLIN)
        self._wake_receiver, self._wake_sender = wake = socket.socketpair()
        self._signal_receiver, self._signal_sender = signals = socket.socketpair()
        for receiver, sender in (wake, signals):
            receiver.setblocking(False)
            sender.setblocking(False)
            self._poller.register(receiver.fileno(), zmq.POLLIN)
        self._outbox: deque[list[bytes | memoryview]] = deque()
        self._calls: deque[Callable[[], None]] = deque()
        self._store: StoreClient | None = None
        self._hello: wire.Hello | None = None  # until the model is loaded
        self._tokenizer_files: dict[str, Path] = {}
        self._router_id: str | None = None
        self._pinged = False
        self._stall = StallWatch()
        self._beats = 0
        self._dropped = 0
        self._drop_log = RateLimitedLogger(logger, DROP_LOG_INTERVAL_S)
        self._drain_until: float | None = None
        self._stopping = threading.Event()

    # -- called by the main thread ---------------------------------------------

    def catch_signals(self) -> None:
        """Make this thread handle SIGTERM and SIGINT, also while the main thread computes."""
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, lambda *_: None)
        signal.set_wakeup_fd(self._signal_sender.fileno(), warn_on_full_buffer=False)

    def introduce(self, hello: wire.Hello, files: dict[str, Path]) -> None:
        """Give routers ``hello`` and, by name, ``files``: the model is loaded."""

        def call() -> None:
            self._hello, self._tokenizer_files = hello, files
            if self._pinged:
                self._post(hello)

        self._run_on_thread(call)

    def use_store(self, store: StoreClient) -> None:
        def call() -> None:
            self._store = store
            self._poller.register(store.socket, zmq.POLLIN)

        self._run_on_thread(call)

    def send(self, messages: Sequence[wire.Message]) -> None:
        """Send ``messages`` to the router, in order."""
        encoded = [wire.encode(message) for message in messages]

        def call() -> None:
            self._outbox.extend(encoded)
            if self._traces is not None:
                self._traces.on_sent(messages)

        self._run_on_thread(call)

    def wake(self) -> None:
        try:
            self._wake_sender.send(b"w")
        except BlockingIOError:
            pass  # enough wake-ups are on the way

    def stop(self, timeout_s: float = 2.0) -> None:
        """Send the messages that wait, then end the thread."""
        self._stopping.set()
        self.wake()
        self.join(timeout_s)

    def _run_on_thread(self, call: Callable[[], object]) -> None:
        self._calls.append(lambda: (call(), None)[1])
        self.wake()

    # -- the thread ------------------------------------------------------------

    def run(self) -> None:
        next_beat = 0.0
        try:
            while not (self._stopping.is_set() and not self._calls and not self._outbox):
                now = time.monotonic()
                if now >= next_beat:
                    self._beat(now)
                    next_beat = now + BEAT_INTERVAL_S
                self._check_deadlines(now)
                self._flush()
                events = dict(self._poller.poll(max(1, int((next_beat - now) * 1000))))
                self._handle_events(events)
        except BaseException:
            logger.exception("the IO thread failed")
            os._exit(EXIT_STUCK)
        self._socket.close(500)

    def _handle_events(self, events: dict[object, int]) -> None:
        if self._wake_receiver.fileno() in events:
            _read_all(self._wake_receiver)
        while self._calls:
            self._calls.popleft()()
        if self._signal_receiver.fileno() in events:
            self._on_signal(_read_all(self._signal_receiver))
        if self._socket in events:
            self._receive()
        if self._store is not None:
            if self._store.socket in events:
                self._store.on_readable()
            self._store.tick(time.monotonic())

    def _receive(self) -> None:
        for _ in range(HIGH_WATER_MARK):
            try:
                frames = self._socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            try:
                message, _ = wire.decode(frames, wire.ToEngine)
            except wire.WireError as error:
                self._count_dropped(error)
                continue
            self._dispatch(message)

    def _dispatch(self, message: wire.ToEngine) -> None:
        if isinstance(message, wire.Ping):
            self._on_ping(message)
        elif isinstance(message, wire.FilesWanted):
            self._on_files_wanted(message)
        elif isinstance(message, wire.Submit) and self._hello is None:
            name, attempt, why = message.request_id, message.attempt, "the model is still loading"
            self._post(wire.Refused(request_id=name, attempt=attempt, reason="full", message=why))
        else:
            if self._traces is not None:
                self._traces.on_received(message)
            self._inbox.put(message)

    def _on_ping(self, ping: wire.Ping) -> None:
        if ping.protocol not in wire.SUPPORTED_VERSIONS:
            logger.error(
                "the router speaks protocol %d, this engine %s: upgrade the older one",
                ping.protocol,
                " or ".join(map(str, wire.SUPPORTED_VERSIONS)),
            )
        if ping.router_id != self._router_id:
            if self._router_id is not None:
                logger.warning("another router: the requests of the old one are dropped")
            self._router_id = ping.router_id
            self._outbox.clear()
            self._inbox.put(NewRouter())
            if self._traces is not None:
                self._traces.clear()
        self._pinged = True
        if self._hello is not None:
            self._post(self._hello)

    def _on_files_wanted(self, wanted: wire.FilesWanted) -> None:
        contents: dict[str, bytes] = {}
        for name in wire.TOKENIZER_FILES:
            if name in wanted.names and name in self._tokenizer_files:
                try:
                    contents[name] = self._tokenizer_files[name].read_bytes()
                except OSError as error:
                    logger.error("a file of the model cannot be read any more: %s", error)
        self._outbox.append(wire.encode(wire.Files(names=list(contents)), *contents.values()))

    def _post(self, message: wire.Message) -> None:
        self._outbox.append(wire.encode(message))

    def _flush(self) -> None:
        if len(self._outbox) > OUTBOX_LIMIT:
            logger.error("the router does not read: its requests are dropped")
            self._outbox.clear()
            self._inbox.put(NewRouter())
        blocked = False
        while self._outbox:
            try:
                self._socket.send_multipart(self._outbox[0], zmq.NOBLOCK)
            except zmq.Again:
                blocked = True
                break
            self._outbox.popleft()
        self._poller.modify(self._socket, zmq.POLLIN | (zmq.POLLOUT if blocked else 0))

    # -- beats, stalls, signals ------------------------------------------------

    def _beat(self, now: float) -> None:
        self._beats += 1
        status = self._status
        if self._supervisor is not None:
            self._supervisor.beat(status.phase)
        beat = wire.Beat(
            engine=self._engine,
            incarnation=self._incarnation,
            number=self._beats,
            phase=status.phase,
            phase_s=now - status.phase_since,
            stalled_s=self._stall.stalled_s(status, len(self._inbox) > 0, now),
            live=status.live,
            stats=self._with_store_stats(status.stats),
            store=self._store.stats.store if self._store is not None else None,
        )
        if not self._outbox:  # no old beats are piled up for a router that is away
            self._post(beat)

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

    def _check_deadlines(self, now: float) -> None:
        if self._drain_until is not None and now > self._drain_until:
            logger.error("draining took over %g s: ending", self._drain_timeout_s)
            os._exit(EXIT_OK)
        stalled = self._stall.stalled_s(self._status, len(self._inbox) > 0, now)
        if stalled > self._stall_timeout_s:
            logger.error("requests wait and nothing was computed for %.0f s: ending", stalled)
            os._exit(EXIT_STUCK)

    def _on_signal(self, signals: bytes) -> None:
        if not signals:
            return
        if self._drain_until is not None or self._hello is None or len(signals) > 1:
            os._exit(EXIT_OK)
        self._drain_until = time.monotonic() + self._drain_timeout_s
        self._inbox.put(wire.Drain())

    def _count_dropped(self, error: wire.WireError) -> None:
        self._dropped += 1
        self._drop_log.warning("a message was dropped (%d so far): %s", self._dropped, error)


def _read_all(receiver: socket.socket) -> bytes:
    data = b""
    try:
        while more := receiver.recv(4096):
            data += more
    except BlockingIOError:
        pass
    return data
