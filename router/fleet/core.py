"""The router itself: what engines say goes to the registry and the dispatcher, and what HTTP
handlers ask for is found here."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import uuid
from pathlib import Path

from router.errors import ModelNotFound, Unavailable
from router.fleet.admission import Admission
from router.fleet.dispatch import Dispatcher
from router.fleet.engines import Engine, Model, Registry
from router.fleet.files import FileStore
from router.fleet.metrics import Metrics
from router.fleet.port import EnginePort
from router.tokens.rendering import warm_up
from shared.settings import Settings
from shared.wire import (
    Accepted,
    Beat,
    Bye,
    CacheEvents,
    Files,
    Hello,
    Message,
    Refused,
    Tokens,
    ToRouter,
)

logger = logging.getLogger(__name__)

_TICK_S = 0.25


class Router:
    """Created before the event loop runs (it binds the engines' socket: `PortError`);
    ``start`` and ``stop`` are called on the loop."""

    def __init__(self, settings: Settings, engine_socket: str, version: str) -> None:
        self.settings = settings
        self.version = version
        self.metrics = Metrics(version)
        self.port = EnginePort(engine_socket, self._receive, self.metrics.dropped_messages.inc)
        self.dispatcher = Dispatcher(settings, self._send_to, self.metrics)
        # Beside the socket, whose lock makes it ours alone, also after a kill.
        scheme, _, path = engine_socket.partition("://")
        store = FileStore(Path(path + ".files") if scheme == "ipc" else None)
        self.registry = Registry(settings, uuid.uuid4().hex, store, self._send, self)
        self.admission = Admission(settings, self.dispatcher.drain_rate)
        self.draining = False
        self.clean = True
        """False once a shutdown has cut requests."""
        self._tasks: list[asyncio.Task[None]] = []
        self.metrics.watch(
            lambda: list(self.registry.models.values()),
            self.dispatcher.waiting,
            lambda: self.clean,
        )

    async def start(self) -> None:
        self.port.start()
        self._tasks = [
            asyncio.create_task(self._tick()),
            asyncio.create_task(asyncio.to_thread(warm_up)),
        ]

    async def stop(self) -> None:
        self.cut("The server is shutting down.")
        for task in self._tasks:
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await task
        self.port.close()
        self.registry.close()

    async def drain(self, timeout_s: float) -> None:
        """Takes nothing new and waits for what is in flight; cuts it after ``timeout_s``."""
        self.draining = True
        waited_s = 0.0
        while self.admission.requests and waited_s < timeout_s:
            await asyncio.sleep(0.05)
            waited_s += 0.05
        self.cut("The server is shutting down and did not wait longer.")

    def cut(self, message: str) -> None:
        """Takes nothing new and ends what is in flight with an error that says ``message``."""
        self.draining = True
        count = self.dispatcher.fail_all(lambda: Unavailable(message, code="shutting_down"))
        if count:
            self.clean = False
            logger.warning("%d sequences were cut", count)

    # -- for HTTP handlers -----------------------------------------------------

    def model_for(self, name: str | None) -> Model:
        """The model that is asked for, when it can take a request now or soon. Raises
        `ModelNotFound` and `Unavailable`."""
        settings = self.settings
        if self.draining:
            raise Unavailable(
                "The server is shutting down.",
                code="shutting_down",
                retry_after_s=settings.drain_timeout_s,
            )
        model = self.registry.model_named(name)
        if model is None:
            if name is not None and self.registry.models:
                raise ModelNotFound(f"The model '{name}' is not served here.", param="model")
            raise _not_ready("; ".join(["no engine has joined yet", *self.registry.strangers]))
        if not model.ever_ready:
            raise self.not_ready(model)
        self.admission.check_memory(model)
        return model

    def not_ready(self, model: Model) -> Unavailable:
        return _not_ready("; ".join(model.troubles))

    # -- RegistryListener ------------------------------------------------------

    def engine_lost(self, engine: Engine, reason: str) -> None:
        self.metrics.restarts.labels(engine.name).inc()
        self.dispatcher.engine_lost(engine, reason)

    def capacity_changed(self, model: Model) -> None:
        self.dispatcher.place(model)

    # -- wire ------------------------------------------------------------------

    def _receive(self, peer: bytes, message: ToRouter, payload: list[bytes]) -> None:
        match message:
            case Hello():
                self.registry.hello(peer, message)
            case Beat():
                beating = self.registry.beat(peer, message)
                if beating is not None:
                    self.dispatcher.live(beating, message.live)
            case Files():
                self.registry.files(message, payload)
            case Bye():
                self.registry.bye(peer)
            case _:
                engine = self.registry.find(peer)
                if engine is None:
                    self.registry.ping(peer)
                else:
                    self._hear_engine(engine, message)

    def _hear_engine(self, engine: Engine, message: ToRouter) -> None:
        match message:
            case Tokens():
                for delta in message.deltas:
                    self.dispatcher.moved(engine, delta)
            case Accepted():
                self.dispatcher.accepted(engine, message)
            case Refused():
                self.dispatcher.refused(engine, message)
            case CacheEvents():
                engine.prefixes.update(message)

    def _send(self, peer: bytes, message: Message) -> bool:
        return bool(self.port.send(peer, message))

    def _send_to(self, engine: Engine, message: Message) -> bool:
        sent = self.port.send(engine.peer, message)
        if sent is None:
            self.registry.unreachable(engine)
        return bool(sent)

    async def _tick(self) -> None:
        while True:
            await asyncio.sleep(_TICK_S)
            try:
                self.port.drain()  # first: beats may wait there after the loop was held up
                self.registry.tick()
                self.dispatcher.tick()
            except Exception:
                logger.exception("housekeeping")


def _not_ready(why: str) -> Unavailable:
    return Unavailable(f"The model is not ready: {why}.", code="no_engine_ready", retry_after_s=5)
