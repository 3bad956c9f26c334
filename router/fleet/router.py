"""The router: routes engines' messages to the registry and the dispatcher; used by handlers."""

from __future__ import annotations

import asyncio
import importlib.util
import logging
import time
import uuid
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from router.errors import ModelNotFound, Unavailable
from router.fleet.adapters import Adapters, with_adapter
from router.fleet.administration import Administration
from router.fleet.background import BackgroundTasks
from router.fleet.body_budget import BodyBudget
from router.fleet.engines.engine import Engine, Model, ModelReplicas
from router.fleet.engines.registry import Registry
from router.fleet.engines.sockets import EngineSockets
from router.fleet.metrics.batch_figures import BatchFigures
from router.fleet.metrics.loop_lag import LoopLag
from router.fleet.metrics.prometheus import EngineCollector, Metrics
from router.fleet.model_names import ModelNames
from router.fleet.models.supervised import ConfiguredModel, Supervised, SupervisorChannel
from router.fleet.models.tokenizer_files import TokenizerFileStore
from router.fleet.queue.admission import Admission
from router.fleet.queue.dispatch import Dispatcher
from router.fleet.sequences.timeouts import not_ready
from router.fleet.tenants.rate_limits import RateLimits
from router.fleet.tenants.tenant import Tenant
from router.images.preparing import ImagePreparer
from router.tokens.rendering import warm_up
from router.tokens.template_processes import TemplateProcesses
from router.tokens.work_pool import WorkPool
from shared.network.allow_list import AllowedKey
from shared.settings import Settings
from shared.wire import (
    Accepted,
    AdapterChecked,
    AdapterDecisions,
    AdapterRef,
    Bye,
    CacheEvents,
    Encoded,
    Files,
    Heartbeat,
    Hello,
    Message,
    Refused,
    Tokens,
    ToRouter,
)

logger = logging.getLogger(__name__)

_TICK_S, _IDLE_TICK_S = 0.5, 2.0
"""While there are requests, and while there are none."""
_LOOK_AGAIN_S = 0.05
_SUSPENDED_S = 2.0

_BYTES_PER_TOKEN = 16
_UNKNOWN_CONTEXT = 262_144
"""The context of a model that was never loaded, as far as the size of a body is concerned."""
_LEAST_REQUEST_BYTES = 1024 * 1024
MOST_REQUEST_BYTES = _BYTES_PER_TOKEN * _UNKNOWN_CONTEXT


class Router:
    """The state of the router process for HTTP handlers, and the receiver of its
    engines' messages."""

    def __init__(
        self,
        settings: Settings,
        addresses: Sequence[str],
        version: str,
        supervisor: SupervisorChannel | None = None,
    ) -> None:
        """Bind the engines' sockets, before the event loop runs.

        Raises `EngineSocketError` and `LimitsStoreError`.
        """
        self.settings = settings
        self.version = version
        self.metrics = Metrics(version)
        self.rate_limits = RateLimits(settings.limits_url, self.metrics)
        self.engine_sockets = EngineSockets(
            addresses,
            settings.curve_dir,
            self._on_message,
            self.metrics.dropped_messages.inc,
            lambda reason: self.metrics.engines_refused.labels(reason).inc(),
        )
        self.supervised = Supervised(supervisor)
        self.dispatcher = Dispatcher(
            settings,
            self._send_to,
            self.metrics,
            self.rate_limits.on_generated,
            lambda model: not model.engines and self.supervised.will_load(model.id),
        )
        # Next to the socket, whose lock keeps other routers out of the directory.
        paths = [address[6:] for address in addresses if address.startswith("ipc://")]
        store = TokenizerFileStore(Path(paths[0] + ".files") if paths else None)
        self.templates = TemplateProcesses()
        self.registry = Registry(
            settings, uuid.uuid4().hex, store, self._send, self, self.templates
        )
        self.administration = Administration(
            self.registry, self.dispatcher, self.supervised, self._send_to
        )
        self.adapters = Adapters(self.registry, self.supervised, self._send_to)
        self.model_names = ModelNames(self.registry, self.supervised, self.adapters)
        self.admission = Admission(settings, self.dispatcher.departure_rate)
        self.work = WorkPool(on_refused=self.metrics.work_refused.inc)
        """Threads for slow work."""
        self.bodies = BodyBudget(
            lambda: max(settings.body_memory_mb << 20, 4 * self.max_request_bytes)
        )
        self.images = ImagePreparer(settings, self.metrics.images)
        self.batches = BatchFigures()
        self.loop_lag = LoopLag(self.metrics.loop_lag)
        self.started = int(time.time())
        self.background: list[Callable[[], Coroutine[Any, Any, None]]] = []  # background tasks
        self.closers: list[Callable[[], None]] = [
            self.images.close,
            self.templates.close,
        ]  # run on threads at the end
        self.leaving = False
        """Whether load balancers should use other servers, because this one will drain soon."""
        self.draining = False
        self.ending = asyncio.Event()
        """Set when answers without an end of their own must end."""
        self.shutdown_clean = True  # False after a shutdown has cancelled requests
        self._tasks, self._stopped = BackgroundTasks(), False
        self._add_gauges()

    def _add_gauges(self) -> None:
        """Add the metrics that are evaluated only when Prometheus scrapes."""
        self.batches.add_gauges(self.metrics)
        self.metrics.add_gauge(
            "event_loop_lag_max_seconds",
            "Max delay of the event loop in the last minute",
            self.loop_lag.worst_s,
        )
        self.metrics.add_gauge(
            "work_waiting",
            "Requests queued for a preparation thread",
            lambda: self.work.num_waiting,
        )
        self.metrics.add_gauge(
            "request_body_bytes",
            "Bytes of request bodies that are being received or parsed",
            lambda: self.bodies.used_bytes,
        )
        engines = EngineCollector(
            self.registry.models,
            lambda: self.registry.versions,
            self.dispatcher.num_waiting,
            lambda: self.shutdown_clean,
        )
        self.metrics.registry.register(engines)

    async def start(self) -> None:
        self.engine_sockets.start()
        self._tasks.start(self._tick(), self.rate_limits.run(), asyncio.to_thread(self._warm_up))
        self._tasks.start(*(run() for run in self.background))

    def _warm_up(self) -> None:
        self.templates.start()
        warm_up()

    async def stop(self) -> None:
        self.abort_all("The server is shutting down.")
        self.administration.close()
        await self._tasks.stop()
        self.loop_lag.close()
        self.work.close()
        await self.rate_limits.close()
        self._stopped = True
        self.engine_sockets.close()
        self.registry.close()
        for close in self.closers:
            try:
                await asyncio.to_thread(close)
            except Exception:
                logger.exception("closing %r", close)

    async def drain(self, timeout_s: float, delay_s: float = 0.0) -> None:
        """Refuse new requests and wait for those in flight. Cancel them after ``timeout_s``.

        Before that, keep serving for ``delay_s`` and tell load balancers to use other servers.
        """
        self.leaving = True
        self.ending.set()
        await asyncio.sleep(delay_s)
        self.draining = True
        deadline = time.monotonic() + timeout_s
        while self.admission.num_requests and time.monotonic() < deadline:
            await asyncio.sleep(0.05)
        self.abort_all("The server shut down before the answer was complete.")

    def abort_all(self, message: str) -> None:
        """Refuse new requests and end those in flight with the error ``message``."""
        self.draining = True
        self.ending.set()
        if count := self.dispatcher.fail_all(lambda: Unavailable(message, code="shutting_down")):
            self.shutdown_clean = False
            logger.warning("%d sequences were cancelled", count)

    # -- for HTTP handlers -----------------------------------------------------

    @asynccontextmanager
    async def admit(
        self, tenant: Tenant, model: Model, headers: dict[str, str]
    ) -> AsyncIterator[None]:
        """Count a request of ``tenant`` to ``model`` against all limits of requests, while it is
        served.

        Puts the remaining limits into ``headers``. Raises `TooManyRequests`.
        """
        limit = model.settings.max_concurrent_requests
        with self.admission.limit_concurrency(tenant, model.replicas.id, limit):
            await self.rate_limits.admit_request(tenant, headers)
            yield

    def unloaded_model(self, name: str | None, tenant: Tenant) -> ConfiguredModel | None:
        """Return the model called ``name`` if it has to be loaded for a request of ``tenant``.
        Raises `ModelNotFound` and `ModelForbidden`."""
        if self.draining or (wanted := self.model_names.wanted(name, tenant)) is None:
            return None
        configured = self.adapters.find_configured(wanted)
        if configured is None:
            return None
        model = self.registry.models.get(configured.names[0])
        # If it has engines, even lost ones, its queue accepts requests.
        is_known = model is not None and model.model is not None and bool(model.engines)
        return None if is_known else configured

    async def wait_until_loaded(
        self, configured: ConfiguredModel, name: str | None, tenant: Tenant
    ) -> None:
        """Wait until the supervisor has loaded a model, which a request calls ``name``. Raises
        `Unavailable` if that fails or times out, and `TooManyRequests`."""
        model_id, limit_s = configured.names[0], self.settings.first_token_timeout_s
        deadline, limit = time.monotonic() + limit_s, self.settings.max_concurrent_requests
        with (
            self.admission.limit_concurrency(tenant, model_id, limit),
            self.supervised.waiting_for(configured),
        ):
            while (unloaded := self.unloaded_model(name, tenant)) is not None:
                if unloaded.state == "broken":
                    raise Unavailable(
                        f"The model {model_id} cannot be loaded: {unloaded.reason}.",
                        code="model_broken",
                        retry_after_s=limit_s,
                    )
                if unloaded.state == "loading" and unloaded.reason:
                    raise not_ready(unloaded.reason)
                if time.monotonic() > deadline:
                    raise not_ready(f"it did not load within {limit_s:g} s")
                await asyncio.sleep(_LOOK_AGAIN_S)

    @property
    def longest_prompt(self) -> int:
        """The longest prompt in tokens that any model may accept, loaded or not."""
        joined = self.registry.models
        limits = [each.max_prompt_tokens for each in joined.values()]
        if not limits or any(name not in joined for name in self.supervised.models):
            limits.append(self.settings.max_prompt_tokens or _UNKNOWN_CONTEXT)
        return max(limits)

    @property
    def max_request_bytes(self) -> int:
        """The max size of a body, without images: a few bytes for each token of the longest prompt,
        which may be written with escapes, and never less than the usual limit."""
        if self.settings.max_request_bytes is not None:
            return self.settings.max_request_bytes
        return max(_LEAST_REQUEST_BYTES, _BYTES_PER_TOKEN * self.longest_prompt)

    @property
    def max_request_values(self) -> int:
        """How many JSON values a larger body may have: to decode them blocks this process. Long
        conversations have few."""
        return self.settings.max_request_bytes or _LEAST_REQUEST_BYTES

    @property
    def takes_images(self) -> bool:
        """Whether any model accepts images, or will once it is loaded."""
        configured = self.supervised.models.values()
        return self.registry.takes_images or any(each.takes_images for each in configured)

    async def loaded_model(self, name: str | None, tenant: Tenant) -> Model:
        """Like `model_for`, after waiting until the model is loaded."""
        if (unloaded := self.unloaded_model(name, tenant)) is not None:
            await self.wait_until_loaded(unloaded, name, tenant)
        return self.model_for(name, tenant)

    def model_for(self, name: str | None, tenant: Tenant) -> Model:
        """Return the model called ``name``, if it can accept a request of ``tenant`` now or soon.
        Raises `ModelNotFound`, `ModelForbidden` or `Unavailable`."""
        settings = self.settings
        if self.draining:
            raise Unavailable(
                "The server is shutting down.",
                code="shutting_down",
                retry_after_s=settings.drain_timeout_s,
            )
        replicas, adapter = self._find(self.model_names.wanted(name, tenant))
        if replicas is None:
            if tenant.background and name in self.registry.left_names:  # a line of a batch waits
                raise not_ready("its engines have left")
            if name is not None and self.registry.models:
                raise ModelNotFound(f"The model '{name}' is not served here.", param="model")
            raise not_ready(
                "; ".join(["no engine has joined yet", *self.registry.unregistered_engines])
            )
        if replicas.model is None:
            raise not_ready("; ".join(replicas.troubles))
        if not tenant.background:
            self.admission.check_memory(replicas)
        return replicas.model if adapter is None else with_adapter(replicas.model, adapter)

    def _find(self, name: str | None) -> tuple[ModelReplicas | None, AdapterRef | None]:
        """Return the joined model called ``name``, or the one with an adapter called so."""
        if name is None:
            return None, None
        configured = self.supervised.find(name)
        replicas = self.registry.find_model(configured.names[0] if configured else name)
        return (replicas, None) if replicas else self.adapters.find(name) or (None, None)

    # -- the supervisor --------------------------------------------------------

    def on_supervisor_message(self, message: Mapping[str, Any]) -> None:
        if self._stopped:  # the link's thread still has messages
            return
        if "models" in message:
            self.supervised.on_models(message)
        elif "ended" in message:
            self.engine_sockets.receive_pending()  # its last messages
            self.registry.on_ended(str(message["ended"]), planned=bool(message.get("planned")))

    # -- RegistryListener ------------------------------------------------------

    def on_engine_joined(self, engine: Engine) -> None:
        self.metrics.engines_joined.labels(engine.hello.model).inc()
        if engine.hello.vision is not None and importlib.util.find_spec("mlx_vlm") is None:
            logger.warning(
                "%s takes images, but this router cannot prepare them: install its extra, "
                "mlx-lm-server[vision]",
                engine.hello.model,
            )
        self.metrics.recent.note(engine.name, "joined", is_error=False)
        self.adapters.on_engine_joined(engine)

    def on_engine_refused(self, reason: str) -> None:
        self.metrics.engines_refused.labels(reason).inc()
        self.metrics.recent.note("an engine", f"refused: {reason}")

    def on_engine_lost(self, engine: Engine, reason: str) -> None:
        planned = engine.phase == "draining" or engine.left
        self.metrics.engines_left.labels("left" if planned else "lost").inc()
        if not planned:
            self.metrics.restarts.labels(engine.name).inc()
            self.metrics.recent.losses[engine.name] += 1
        self.metrics.recent.note(engine.name, reason, is_error=not planned)
        self.adapters.on_engine_lost(engine)
        self.dispatcher.on_engine_lost(engine, reason, planned=planned)

    def on_engine_back(self, engine: Engine) -> None:
        self.dispatcher.on_engine_back(engine)

    def on_model_replaced(self, model: ModelReplicas) -> None:
        self.dispatcher.on_model_replaced(model)

    def is_configured(self, model_id: str) -> bool:
        return model_id in self.supervised.models

    def on_capacity_changed(self, model: ModelReplicas) -> None:
        self.dispatcher.place(model)

    # -- wire ------------------------------------------------------------------

    def _on_message(
        self, peer: bytes, message: ToRouter, payload: list[bytes], key: AllowedKey | None
    ) -> None:
        match message:
            case Hello():
                self.registry.on_hello(peer, message, key)
            case Heartbeat():
                heartbeating = self.registry.on_heartbeat(peer, message)
                if heartbeating is not None:
                    self.dispatcher.reconcile(heartbeating, message.live)
            case Files():
                self.registry.on_files(message, payload)
            case Bye():
                self.registry.on_bye(peer)
            case _:
                engine = self.registry.find_engine(peer)
                if engine is None:
                    self.registry.ping(peer)
                else:
                    self._on_engine_message(engine, message)

    def _on_engine_message(self, engine: Engine, message: ToRouter) -> None:
        match message:
            case Tokens():
                engine.on_ended(message.unevictable_bytes)
                self.dispatcher.on_tokens(engine, message.deltas)
            case AdapterChecked():
                self.adapters.on_checked(engine, message)
            case AdapterDecisions():
                self.adapters.on_decisions(engine, message)
            case Accepted():
                self.dispatcher.on_accepted(engine, message)
            case Encoded():
                self.dispatcher.on_encoded(engine, message)
            case Refused():
                self.dispatcher.on_refused(engine, message)
            case CacheEvents():
                engine.prefix_index.update(message)

    def _send(self, peer: bytes, message: Message) -> bool:
        return bool(self.engine_sockets.send(peer, message))

    def _send_to(self, engine: Engine, message: Message, *payload: bytes | memoryview) -> bool:
        sent = self.engine_sockets.send(engine.peer, message, *payload)
        if sent is None:
            self.registry.on_unreachable(engine)
        return bool(sent)

    async def _tick(self) -> None:
        while True:
            before = time.monotonic()
            tick_s = _TICK_S if self.dispatcher.num_in_flight else _IDLE_TICK_S
            await asyncio.sleep(tick_s)
            try:
                suspended_s = time.monotonic() - before - tick_s
                if suspended_s > _SUSPENDED_S:
                    self._exclude(suspended_s)
                # First: heartbeats may wait in the socket after the loop was blocked.
                self.engine_sockets.receive_pending()
                self.registry.expel(
                    lambda engine: not self.engine_sockets.may_serve(engine.key, engine.hello)
                )
                self.registry.tick()
                self.dispatcher.tick()
            except Exception:
                logger.exception("housekeeping")
            self.supervised.heartbeat_due.set()

    def _exclude(self, suspended_s: float) -> None:
        """Ignore a time in which this process was suspended, by a signal or with its container:
        engines could not be heard."""
        logger.warning(
            "this process was suspended for %.0f s; engines' silence is not counted",
            suspended_s,
        )
        self.registry.exclude(suspended_s)
        self.dispatcher.exclude(suspended_s)
