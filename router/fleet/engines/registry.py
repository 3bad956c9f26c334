"""The registry of engines, and of the models they serve."""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import Callable
from typing import Protocol

from router.fleet.engines.engine import Engine, ModelReplicas
from router.fleet.engines.model_versions import ModelVersions
from router.fleet.models.renderers import Renderers
from router.fleet.models.tokenizer_files import TokenizerFileStore
from router.tokens.template_processes import TemplateProcesses
from shared.flags import FlagError
from shared.network.allow_list import AllowedKey
from shared.settings import Settings, overlay
from shared.wire import Files, FilesWanted, Heartbeat, Hello, Message, Ping, other_version

logger = logging.getLogger(__name__)

HEARTBEAT_TIMEOUT_S = 5.0
REMOVE_AFTER_S = 600.0
_REPLACED_AFTER_S = 2.5
"""Longer than two heartbeats of an idle engine."""
_MAX_UNREGISTERED, _MAX_REJECTED = 1000, 1000
_PING_INTERVAL_S, _FILES_RETRY_S = 1.0, 10.0
_LOAD_RETRY_S, _LONGEST_LOAD_RETRY_S = 10.0, 600.0
"""The pause after a tokenizer could not be loaded, doubled each time: the cause may be one of the
machine, such as a full disk, and need not last."""


class RegistryListener(Protocol):
    """Called when engines change."""

    def on_engine_joined(self, engine: Engine) -> None:
        """``engine`` has introduced itself."""

    def on_engine_refused(self, reason: str) -> None:
        """An engine was refused, for ``reason`` in one word."""

    def on_engine_lost(self, engine: Engine, reason: str) -> None:
        """``engine`` has lost all its sequences in flight."""

    def on_engine_back(self, engine: Engine) -> None:
        """``engine`` was lost, but its process is still there."""

    def on_capacity_changed(self, model: ModelReplicas) -> None:
        """An engine of ``model`` may have more capacity than before."""

    def on_model_replaced(self, model: ModelReplicas) -> None:
        """``model`` has a successor, which gets all new requests."""

    def is_configured(self, model_id: str) -> bool:
        """Return whether the model is remembered without engines."""


class Registry:
    """The engines that have introduced themselves, and the models they serve."""

    def __init__(
        self,
        settings: Settings,
        router_id: str,
        file_store: TokenizerFileStore,
        send: Callable[[bytes, Message], bool],
        listener: RegistryListener,
        templates: TemplateProcesses | None = None,
    ) -> None:
        self._settings = settings
        self._router_id = router_id
        self._send = send
        self._listener = listener
        self._file_store = file_store
        self._renderers = Renderers(file_store, templates)
        self._engines: dict[bytes, Engine] = {}
        self._model_of: dict[Engine, ModelReplicas] = {}
        self._pinged_at: dict[bytes, float] = {}
        self._unregistered: dict[bytes, tuple[float, Heartbeat]] = {}
        self._rejected: dict[str, str] = {}
        self._drained: set[str] = set()
        self._files_asked_at: dict[str, float] = {}
        self._load_tasks: set[asyncio.Task[None]] = set()
        self._versions = ModelVersions(listener.on_model_replaced)
        self.models = self._versions.current  # by name: the versions for new requests
        self.left_names = self._versions.left_names

    def find_engine(self, peer: bytes) -> Engine | None:
        return self._engines.get(peer)

    @property
    def engines(self) -> list[Engine]:
        return list(self._engines.values())

    def engines_of(self, model_id: str) -> list[Engine]:
        """Return the engines of all versions of a model."""
        return [
            engine
            for version in self.versions
            if version.id == model_id
            for engine in version.engines
        ]

    def set_drained(self, engine: Engine, drained: bool) -> None:
        """Stop or resume sending requests to ``engine``; also applies if it rejoins meanwhile."""
        engine.drained = drained
        (self._drained.add if drained else self._drained.discard)(engine.hello.incarnation)

    @property
    def unregistered_engines(self) -> list[str]:
        """Engines, in words, that send heartbeats but have not introduced themselves, because they
        are loading, or whose protocol is another one."""
        return [
            f"engine {heartbeat.engine}: "
            + (
                self._rejected.get(heartbeat.incarnation)
                or f"{heartbeat.phase} for {heartbeat.phase_s:.0f} s"
            )
            for _, heartbeat in self._unregistered.values()
        ]

    def hears(self, engine: Engine) -> bool:
        """Return whether ``engine`` sends heartbeats, or another process with its name."""
        name = engine.hello.engine
        return any(heartbeat.engine == name for _, heartbeat in self._unregistered.values()) or any(
            each.hello.engine == name and each.lost_reason is None for each in self.engines
        )

    @property
    def versions(self) -> list[ModelReplicas]:
        """All models, and their earlier and upcoming versions that have engines."""
        return self._versions.all

    def find_model(self, name: str) -> ModelReplicas | None:
        return next((model for model in self.models.values() if name in model.names), None)

    def default_model(self, may_use: Callable[[list[str]], bool]) -> ModelReplicas | None:
        """Return the configured model, else the first, of those whose names ``may_use`` accepts."""
        configured = {self._settings.model, *self._settings.served_model_name[:1]}
        return min(
            (model for model in self.models.values() if may_use(model.names)),
            key=lambda model: (model.hello.task != "generate", configured.isdisjoint(model.names)),
            default=None,
        )

    @property
    def takes_images(self) -> bool:
        """Whether any model accepts images."""
        return any(model.hello.vision is not None for model in self.models.values())

    def close(self) -> None:
        for task in self._load_tasks:
            task.cancel()
        self._file_store.close()

    # -- messages from peers ---------------------------------------------------

    def ping(self, peer: bytes) -> None:
        """Ask ``peer`` for a `Hello`, at most once per second."""
        now = time.monotonic()
        if now - self._pinged_at.get(peer, -_PING_INTERVAL_S) >= _PING_INTERVAL_S:
            if len(self._pinged_at) > 10_000:
                self._pinged_at.clear()
            self._pinged_at[peer] = now
            self._send(peer, Ping(router_id=self._router_id))

    def on_hello(self, peer: bytes, hello: Hello, key: AllowedKey | None = None) -> None:
        if key is not None and not key.may_serve([hello.model, *hello.aliases]):
            names = ", ".join([hello.model, *hello.aliases])
            self._reject(hello, f"its key may not serve {names}", "model")
            return
        if (difference := other_version(hello.protocol)) is not None:
            release = hello.version or "of an unknown release"
            self._reject(hello, f"it (mlx-lm-server {release}) {difference}", "version")
            return
        if nonsense := _invalid_hello(hello):
            self._reject(hello, nonsense, "nonsense")
            return
        known = self._engines.get(peer)
        if known is not None and known.hello == hello and known.lost_reason is None:
            return
        for other in list(self._engines.values()):
            if other.peer == peer or other.hello.incarnation == hello.incarnation:
                self._remove(other, "rejoined")
        self._retire_predecessors(hello.engine, hello.incarnation, drop=True)
        if (taken := self._versions.other_owner(hello)) is not None:
            self._reject(hello, f"{taken[1]} already has the name {taken[0]}", "model")
            return
        try:
            settings = overlay(self._settings, hello.options, f"engine {hello.engine}")
        except FlagError as error:
            self._reject(hello, str(error), "nonsense")
            return
        model = self._versions.find(hello, settings)
        name = hello.engine
        if any(engine.name == name for engine in self._engines.values()):
            name = f"{name}-{hello.incarnation[:8]}"  # two engines have the same name
        of_key = None if key is None else key.key
        engine = Engine(peer, hello, name, settings.stall_timeout_s / 2, of_key)
        engine.drained = hello.incarnation in self._drained
        self._model_of[engine] = model
        self._unregistered.pop(peer, None)
        self._engines[peer] = engine
        model.engines.append(engine)
        model.update_adapters()
        self._listener.on_engine_joined(engine)
        self._listener.on_engine_back(engine)  # if it was here before
        logger.info("engine %s joined: model %s", hello.engine, hello.model)
        # Makes it drop the requests of a router that is gone, in case it sent the `Hello` unasked.
        self.ping(peer)
        self._ensure_renderer(peer, model)

    def on_heartbeat(self, peer: bytes, heartbeat: Heartbeat) -> Engine | None:
        """Return the engine that sent the heartbeat; None if it must introduce itself first."""
        engine = self._engines.get(peer)
        if engine is None or engine.hello.incarnation != heartbeat.incarnation:
            if engine is not None:
                self._remove(engine, "restarted")
            self._retire_predecessors(heartbeat.engine, heartbeat.incarnation, drop=False)
            if len(self._unregistered) < _MAX_UNREGISTERED or peer in self._unregistered:
                self._unregistered[peer] = (time.monotonic(), heartbeat)
            self.ping(peer)
            return None
        was_lost = engine.lost_reason is not None
        changed = was_lost or engine.phase != heartbeat.phase
        engine.on_heartbeat(heartbeat)
        if was_lost:
            self._listener.on_engine_back(engine)
        model = self._model_of[engine]
        if model.renderer is None:
            self._ensure_renderer(peer, model)
        if changed:
            logger.info("engine %s is %s", engine.name, heartbeat.phase)
        self._update_readiness(model)
        return engine

    def on_files(self, files: Files, contents: list[bytes]) -> None:
        """Store files by their actual digests: a wrong file is never used."""
        wanted = {digest for model in self.versions for digest in model.tokenizer_files.values()}
        for content in contents[: len(files.names)]:
            self._file_store.put(content, wanted)
        for model in self.versions:
            if model.renderer is None and not self._file_store.missing(model.tokenizer_files):
                self._start_loading(model)

    def on_bye(self, peer: bytes) -> None:
        if engine := self._engines.get(peer):
            engine.left = True
            self._remove(engine, "left")

    def on_ended(self, name: str, *, planned: bool) -> None:
        """The supervisor reports that the process of the engine ``name`` has exited."""
        for engine in list(self._engines.values()):
            if engine.hello.engine == name and engine.lost_reason is None:
                engine.left |= planned
                if planned:
                    self._remove(engine, "ended")
                else:
                    self._mark_lost(engine, "ended")

    def expel(self, is_forbidden: Callable[[Engine], bool]) -> None:
        """Remove the engines that may not serve any more."""
        for engine in list(self._engines.values()):
            if is_forbidden(engine):
                self._remove(engine, "may not serve its model any more")

    def on_unreachable(self, engine: Engine) -> None:
        self._mark_lost(engine, "disconnected")

    # -- time ------------------------------------------------------------------

    def exclude(self, suspended_s: float) -> None:
        """Exclude a time in which no engine could be heard from its silence."""
        for engine in self._engines.values():
            engine.last_heartbeat += suspended_s
        for model in self.versions:
            model.exclude(suspended_s)

    def tick(self) -> None:
        now = time.monotonic()
        for engine in list(self._engines.values()):
            if engine.lost_reason is None and engine.silence_s > HEARTBEAT_TIMEOUT_S:
                self._mark_lost(engine, f"sent no heartbeat for {HEARTBEAT_TIMEOUT_S:.0f} s")
            elif engine.lost_reason is not None and engine.silence_s > REMOVE_AFTER_S:
                self._remove(engine, "forgotten")
        for engine in list(self._engines.values()):
            if engine.lost_reason is None and engine.silence_s < _REPLACED_AFTER_S:
                self._retire_predecessors(engine.hello.engine, engine.hello.incarnation, drop=True)
        for peer, (heard, _) in list(self._unregistered.items()):
            if now - heard > HEARTBEAT_TIMEOUT_S:
                del self._unregistered[peer]
        for model in self.versions:
            if self._is_gone(model, now):
                logger.info("model %s: all engines of this version have left", model.id)
                self._versions.drop(model)
            else:
                model.forget_adapters(now, self._settings.restart_wait_s)
                self._update_readiness(model)

    # -- inside ----------------------------------------------------------------

    def _mark_lost(self, engine: Engine, reason: str) -> None:
        if engine.lost_reason is None:
            if engine.left:
                logger.info("engine %s has left", engine.name)
            else:
                logger.warning("engine %s is lost: %s", engine.name, reason)
            engine.lost_reason = reason
            self._listener.on_engine_lost(engine, reason)

    def _remove(self, engine: Engine, reason: str) -> None:
        self._mark_lost(engine, reason)
        self._engines.pop(engine.peer, None)
        model = self._model_of.pop(engine, None)
        if model is not None:
            model.engines.remove(engine)
            if engine.hello.adapters:
                model.adapters_left_at = time.monotonic()

    def _is_gone(self, model: ModelReplicas, now: float) -> bool:
        if model.engines or model.unready_for_s(now) <= self._settings.restart_wait_s:
            return False
        return model.successor is not None or not self._listener.is_configured(model.id)

    def _retire_predecessors(self, name: str, incarnation: str, *, drop: bool) -> None:
        """Mark older engines called ``name`` as lost if they are silent, because a new one replaces
        them.

        Otherwise the router would wait for their heartbeats.
        """
        for other in list(self._engines.values()):
            is_older = other.hello.engine == name and other.hello.incarnation != incarnation
            if is_older and (other.lost_reason is not None or other.silence_s > _REPLACED_AFTER_S):
                self._mark_lost(other, "restarted")
                if drop:
                    self._remove(other, "restarted")

    def _reject(self, hello: Hello, reason: str, word: str) -> None:
        """Log ``reason`` once, and count it under ``word``.

        The engine keeps sending heartbeats and may be registered later.
        """
        if hello.incarnation not in self._rejected:
            if len(self._rejected) >= _MAX_REJECTED:
                self._rejected.clear()
            # Only a difference of versions is shown to clients.
            self._rejected[hello.incarnation] = reason if word == "version" else ""
            self._listener.on_engine_refused(word)
            logger.error("engine %s was refused: %s", hello.engine, reason)

    def _ensure_renderer(self, peer: bytes, model: ModelReplicas) -> None:
        """Load the tokenizer of ``model``, or request missing files from ``peer``."""
        missing = self._file_store.missing(model.tokenizer_files)
        if not missing:
            self._start_loading(model)
            return
        now = time.monotonic()
        if now - self._files_asked_at.get(model.id, -_FILES_RETRY_S) >= _FILES_RETRY_S:
            self._files_asked_at[model.id] = now
            self._send(peer, FilesWanted(names=missing))

    def _start_loading(self, model: ModelReplicas) -> None:
        if model.renderer is None and time.monotonic() >= model.load_at:
            model.load_at = math.inf
            task = asyncio.ensure_future(self._load_renderer(model))
            self._load_tasks.add(task)
            task.add_done_callback(self._load_tasks.discard)

    async def _load_renderer(self, model: ModelReplicas) -> None:
        try:
            model.renderer = await self._renderers.get(
                model.tokenizer_files, model.settings, model.hello.vision
            )
        except Exception as error:  # a broken tokenizer may raise anything
            logger.error("cannot load the tokenizer of %s: %s", model.id, error)
            logger.debug("the tokenizer of %s", model.id, exc_info=error)
            pause_s = min(_LOAD_RETRY_S * 2.0**model.failed_loads, _LONGEST_LOAD_RETRY_S)
            model.load_at = time.monotonic() + pause_s
            model.failed_loads = min(model.failed_loads + 1, 30)
            model.load_error = "its tokenizer cannot be loaded"
            return
        model.load_error = None
        self._update_readiness(model)

    def _update_readiness(self, model: ModelReplicas) -> None:
        if model.update_readiness():
            self._versions.on_ready(model)
            self._listener.on_capacity_changed(model)


def _invalid_hello(hello: Hello) -> str | None:
    """Return the error in ``hello``, if any."""
    sizes = ("context_length", "vocab_size", "block_size", "max_sequences")
    bad = [name for name in sizes if getattr(hello, name) < 1]
    if not all(hello.aliases) or not hello.model:
        return "it serves a model without a name"
    return f"its {bad[0]} is {getattr(hello, bad[0])}" if bad else None
