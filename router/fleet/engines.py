"""The engines that have introduced themselves, and the models they serve."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from router.fleet.files import FileStore, wanted_files
from router.fleet.placement import PrefixIndex
from router.tokens.rendering import Renderer
from shared.settings import Settings
from shared.wire import (
    SPOKEN_VERSIONS,
    Beat,
    EngineStats,
    Files,
    FilesWanted,
    Hello,
    Message,
    Phase,
    Ping,
    StoreStats,
)

if TYPE_CHECKING:
    from router.fleet.flight import Flight

logger = logging.getLogger(__name__)

BEAT_TIMEOUT_S = 5.0
FORGET_S = 600.0
_SUCCESSION_S = 1.5
_MAX_STRANGERS = 1000
_MAX_TURNED_AWAY = 1000
_REPEAT_S = 1.0
_FILES_AGAIN_S = 10.0


class Engine:
    """One engine process, as it last described itself."""

    def __init__(self, peer: bytes, hello: Hello, name: str, stall_limit_s: float) -> None:
        self.peer = peer
        self.hello = hello
        self.name = name
        self.phase: Phase = "loading"
        self.phase_s = 0.0
        self.stalled_s = 0.0
        self.stats = EngineStats()
        self.store: StoreStats | None = None
        self.last_beat = time.monotonic()
        self.lost: str | None = None
        """Why it is gone; None while it is there."""
        self.flights: dict[str, Flight] = {}
        self.prefixes = PrefixIndex()
        self.held_until = 0.0
        self._stall_limit_s = stall_limit_s

    @property
    def silence_s(self) -> float:
        """Since its last beat."""
        return time.monotonic() - self.last_beat

    @property
    def trouble(self) -> str | None:
        """Why no request can go there now, in words; None when one can."""
        if self.lost is not None:
            return self.lost
        if self.phase != "ready":
            return f"{self.phase} for {self.phase_s:.0f} s"
        if self.stalled_s > self._stall_limit_s:
            return f"stalled: computed nothing for {self.stalled_s:.0f} s with requests in flight"
        return None

    @property
    def places(self) -> int:
        """How many more sequences it takes now."""
        if self.trouble is not None or time.monotonic() < self.held_until:
            return 0
        return max(0, self.hello.max_sequences - len(self.flights))

    @property
    def memory_pressure(self) -> float:
        """Unevictable bytes over the ledger's limit."""
        limit = self.stats.limit_bytes
        return self.stats.unevictable_bytes / limit if limit > 0 else 0.0

    def update(self, beat: Beat) -> None:
        self.phase, self.phase_s, self.stalled_s = beat.phase, beat.phase_s, beat.stalled_s
        self.stats, self.store = beat.stats, beat.store
        self.last_beat = time.monotonic()
        self.lost = None


class Model:
    """What several replicas have in common. ``renderer`` is None until the tokenizer is loaded."""

    def __init__(self, hello: Hello) -> None:
        self.hello = hello
        self.files = wanted_files(hello.files)
        self.engines: list[Engine] = []
        self.renderer: Renderer | None = None
        self.failure: str | None = None
        self.ever_ready = False
        self._last_ready = time.monotonic()
        self.created = int(time.time())

    @property
    def id(self) -> str:
        return self.hello.model

    @property
    def names(self) -> list[str]:
        """What the API calls it; the first one is what it calls itself."""
        return [self.hello.model, *self.hello.aliases]

    @property
    def ready_engines(self) -> list[Engine]:
        if self.renderer is None:
            return []
        return [engine for engine in self.engines if engine.trouble is None]

    def note_ready(self) -> bool:
        """Whether an engine of it is ready; keeps `unready_for_s` true."""
        if not self.ready_engines:
            return False
        self.ever_ready = True
        self._last_ready = time.monotonic()
        return True

    def unready_for_s(self, now: float) -> float:
        return now - self._last_ready

    @property
    def troubles(self) -> list[str]:
        """Why no engine of it is ready, or what is wrong with single engines."""
        found = [f"engine {e.name}: {e.trouble}" for e in self.engines if e.trouble]
        if self.failure is not None:
            found.append(self.failure)
        elif self.renderer is None:
            found.append("its tokenizer is being loaded")
        if not self.engines:
            found.append("no engine is connected")
        return found

    def matches(self, hello: Hello) -> bool:
        return self.hello.fingerprint == hello.fingerprint and self.files == wanted_files(
            hello.files
        )


class RegistryListener(Protocol):
    """Who wants to know what becomes of engines."""

    def engine_lost(self, engine: Engine, reason: str) -> None:
        """Everything it had in flight is lost."""

    def capacity_changed(self, model: Model) -> None:
        """An engine of ``model`` may have places that it did not have."""


class Registry:
    """Keeps `engines` and `models` true to what peers say and do not say."""

    def __init__(
        self,
        settings: Settings,
        router_id: str,
        store: FileStore,
        send: Callable[[bytes, Message], bool],
        listener: RegistryListener,
    ) -> None:
        self._settings = settings
        self._router_id = router_id
        self._send = send
        self._listener = listener
        self._store = store
        self._engines: dict[bytes, Engine] = {}
        self._pinged: dict[bytes, float] = {}
        self._strangers: dict[bytes, tuple[float, Beat]] = {}
        self._turned_away: set[str] = set()
        self._asked: dict[str, float] = {}
        self._loads: set[asyncio.Task[None]] = set()
        self.models: dict[str, Model] = {}

    def find(self, peer: bytes) -> Engine | None:
        return self._engines.get(peer)

    @property
    def strangers(self) -> list[str]:
        """In words, the engines that beat and have not introduced themselves: they load."""
        return [
            f"engine {beat.engine}: {beat.phase} for {beat.phase_s:.0f} s"
            for _, beat in self._strangers.values()
        ]

    def model_named(self, name: str | None) -> Model | None:
        """The model that answers to ``name``; for None the configured one, else the first."""
        models = list(self.models.values())
        if name is None:
            configured = {self._settings.model, *self._settings.served_model_name[:1]}
            models.sort(key=lambda model: configured.isdisjoint(model.names))
            return models[0] if models else None
        return next((model for model in models if name in model.names), None)

    def close(self) -> None:
        for task in self._loads:
            task.cancel()
        for model in self.models.values():
            if model.renderer is not None:
                model.renderer.close()
        self._store.close()

    # -- what peers say --------------------------------------------------------

    def ping(self, peer: bytes) -> None:
        """Asks who ``peer`` is, not more than once a second."""
        now = time.monotonic()
        if now - self._pinged.get(peer, -_REPEAT_S) >= _REPEAT_S:
            if len(self._pinged) > 10_000:
                self._pinged.clear()
            self._pinged[peer] = now
            self._send(peer, Ping(router_id=self._router_id))

    def hello(self, peer: bytes, hello: Hello) -> None:
        if hello.protocol not in SPOKEN_VERSIONS:
            spoken = " or ".join(map(str, SPOKEN_VERSIONS))
            self._turn_away(hello, f"it speaks protocol {hello.protocol}, this router {spoken}")
            return
        if nonsense := _nonsense(hello):
            self._turn_away(hello, nonsense)
            return
        known = self._engines.get(peer)
        if known is not None and known.hello == hello and known.lost is None:
            return
        for other in list(self._engines.values()):
            if other.peer == peer or other.hello.incarnation == hello.incarnation:
                self._drop(other, "joined anew")
        self._succeed(hello.engine, hello.incarnation, drop=True)
        model = self._model_for(hello)
        if model is None:
            return
        name = hello.engine
        if any(engine.name == name for engine in self._engines.values()):
            name = f"{name}-{hello.incarnation[:8]}"  # two were given the same one
        engine = Engine(peer, hello, name, self._settings.stall_timeout_s / 2)
        self._strangers.pop(peer, None)
        self._engines[peer] = engine
        model.engines.append(engine)
        logger.info("engine %s joined: model %s", hello.engine, hello.model)
        # It drops what it has for a router that is gone, should it have come unasked.
        self.ping(peer)
        self._complete(peer, model)

    def beat(self, peer: bytes, beat: Beat) -> Engine | None:
        """The engine the beat is of; None when it has to introduce itself first."""
        engine = self._engines.get(peer)
        if engine is None or engine.hello.incarnation != beat.incarnation:
            if engine is not None:
                self._drop(engine, "restarted")
            self._succeed(beat.engine, beat.incarnation, drop=False)
            if len(self._strangers) < _MAX_STRANGERS or peer in self._strangers:
                self._strangers[peer] = (time.monotonic(), beat)
            self.ping(peer)
            return None
        changed = engine.lost is not None or engine.phase != beat.phase
        engine.update(beat)
        model = self.models[engine.hello.model]
        if model.renderer is None:
            self._complete(peer, model)
        if changed:
            logger.info("engine %s is %s", engine.name, beat.phase)
        self._note_ready(model)
        return engine

    def files(self, files: Files, contents: list[bytes]) -> None:
        """Files are kept by their real digest, so a wrong one is only never found."""
        wanted = {digest for model in self.models.values() for digest in model.files.values()}
        for content in contents[: len(files.names)]:
            self._store.put(content, wanted)
        for model in self.models.values():
            if model.renderer is None and not self._store.missing(model.files):
                self._load(model)

    def bye(self, peer: bytes) -> None:
        engine = self._engines.get(peer)
        if engine is not None:
            self._drop(engine, "left")

    def unreachable(self, engine: Engine) -> None:
        self._lose(engine, "disconnected")

    # -- what they do not say --------------------------------------------------

    def tick(self) -> None:
        now = time.monotonic()
        for engine in list(self._engines.values()):
            if engine.lost is None and engine.silence_s > BEAT_TIMEOUT_S:
                self._lose(engine, f"sent no beat for {BEAT_TIMEOUT_S:.0f} s")
            elif engine.lost is not None and engine.silence_s > FORGET_S:
                self._drop(engine, "forgotten")
        for engine in list(self._engines.values()):
            if engine.lost is None and engine.silence_s < _SUCCESSION_S:
                self._succeed(engine.hello.engine, engine.hello.incarnation, drop=True)
        for peer, (heard, _) in list(self._strangers.items()):
            if now - heard > BEAT_TIMEOUT_S:
                del self._strangers[peer]
        for model in list(self.models.values()):
            if not model.engines and model.unready_for_s(now) > self._settings.restart_wait_s:
                self._forget(model)
            else:
                self._note_ready(model)

    # -- inside ----------------------------------------------------------------

    def _lose(self, engine: Engine, reason: str) -> None:
        if engine.lost is None:
            logger.warning("engine %s is lost: %s", engine.name, reason)
            engine.lost = reason
            self._listener.engine_lost(engine, reason)

    def _drop(self, engine: Engine, reason: str) -> None:
        self._lose(engine, reason)
        self._engines.pop(engine.peer, None)
        model = self.models.get(engine.hello.model)
        if model is not None and engine in model.engines:
            model.engines.remove(engine)

    def _forget(self, model: Model) -> None:
        logger.info("model %s is no longer served: its engines have left", model.id)
        del self.models[model.id]
        if model.renderer is not None:
            model.renderer.close()

    def _succeed(self, name: str, incarnation: str, *, drop: bool) -> None:
        """An engine called ``name`` has started: an older one of that name that has
        fallen silent is what it replaces, and need not be waited for."""
        for other in list(self._engines.values()):
            is_older = other.hello.engine == name and other.hello.incarnation != incarnation
            if is_older and (other.lost is not None or other.silence_s > _SUCCESSION_S):
                self._lose(other, "restarted")
                if drop:
                    self._drop(other, "restarted")

    def _turn_away(self, hello: Hello, why: str) -> None:
        """Says so once; it goes on beating, and may come in later."""
        if hello.incarnation not in self._turned_away:
            if len(self._turned_away) >= _MAX_TURNED_AWAY:
                self._turned_away.clear()
            self._turned_away.add(hello.incarnation)
            logger.error("engine %s is not used: %s", hello.engine, why)

    def _model_for(self, hello: Hello) -> Model | None:
        model = self.models.get(hello.model)
        if model is not None and not model.matches(hello):
            if any(engine.lost is None for engine in model.engines):
                self._turn_away(hello, f"others serve another version of {hello.model}")
                return None
            for engine in list(model.engines):
                self._drop(engine, "replaced")
            self._forget(model)
            model = None
        if model is None:
            model = self.models[hello.model] = Model(hello)
        model.hello = hello
        return model

    def _complete(self, peer: bytes, model: Model) -> None:
        """Gets the model its tokenizer: asks for files, or loads when all are here."""
        missing = self._store.missing(model.files)
        if not missing:
            self._load(model)
            return
        now = time.monotonic()
        if now - self._asked.get(model.id, -_FILES_AGAIN_S) >= _FILES_AGAIN_S:
            self._asked[model.id] = now
            self._send(peer, FilesWanted(names=missing))

    def _load(self, model: Model) -> None:
        if model.renderer is None and model.failure is None:
            model.failure = "its tokenizer is being loaded"
            task = asyncio.ensure_future(self._load_renderer(model))
            self._loads.add(task)
            task.add_done_callback(self._loads.discard)

    async def _load_renderer(self, model: Model) -> None:
        settings = self._settings
        options = {
            name: value
            for name in ("eos_token", "pad_token", "bos_token")
            if (value := getattr(settings, name)) is not None
        }
        try:
            template = settings.chat_template
            if template is not None and Path(template).is_file():
                template = Path(template).read_text(encoding="utf-8")
            model.renderer = await Renderer.load(
                self._store.assemble(model.files),
                tokenizer_options=options,
                chat_template=template,
                template_args=settings.chat_template_args,
                tool_parser=settings.tool_parser,
                reasoning_parser=settings.reasoning_parser,
            )
        except Exception as error:  # whatever a broken tokenizer makes its loader raise
            logger.error("the tokenizer of %s cannot be loaded: %s", model.id, error)
            logger.debug("the tokenizer of %s", model.id, exc_info=error)
            model.failure = "its tokenizer cannot be loaded"
            return
        model.failure = None
        self._note_ready(model)

    def _note_ready(self, model: Model) -> None:
        if model.note_ready():
            self._listener.capacity_changed(model)


def _nonsense(hello: Hello) -> str | None:
    """What others would stumble over; None when there is nothing."""
    sizes = ("context_length", "vocab_size", "block_size", "max_sequences")
    bad = [name for name in sizes if getattr(hello, name) < 1]
    if not all(hello.aliases) or not hello.model:
        return "it serves a model without a name"
    return f"its {bad[0]} is {getattr(hello, bad[0])}" if bad else None
