"""The router's view of the supervisor: the configured models, and their state."""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections import Counter
from collections.abc import AsyncGenerator, Collection, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Literal, Protocol

import msgspec

from router.errors import EndpointNotSupported, Unavailable
from router.fleet.models.local_files import LocalFiles, read_local_files

_LOOK_AGAIN_S = 0.1
_BEGIN_S = 10.0

logger = logging.getLogger(__name__)

ConfiguredState = Literal["unloaded", "loading", "ready", "broken"]


class ConfiguredModel(msgspec.Struct, frozen=True, kw_only=True):
    """A configured model, as the supervisor describes it."""

    names: list[str]  # its own name first
    state: ConfiguredState
    reason: str | None = None  # why it is broken, or not loaded yet
    pinned: bool = False
    adapters: list[str] = []  # the names of those of its settings
    engines: list[str] = []
    load_s: float | None = None  # duration of its last load
    weights_bytes: int | None = None
    directory: str | None = None  # of its files, if it is on this machine
    takes_images: bool = False  # as far as known before it is loaded
    fim_layout: str = "auto"
    idle_unload_s: float = 0.0  # as configured; 0: never unloaded
    kept_s: float | None = None  # set by a request instead; negative: forever


class RemoteJob(msgspec.Struct, frozen=True, kw_only=True):
    """A model that the supervisor is pulling or deleting, or has just done."""

    kind: Literal["pull", "delete"]
    number: int
    state: Literal["running", "done", "failed", "refused", "cancelled"]
    reason: str = ""
    completed: int = 0  # bytes
    total: int = 0  # as far as known

    @property
    def has_ended(self) -> bool:
        return self.state != "running"


class SupervisorChannel(Protocol):
    """Receives the messages; for example, `shared.supervisor_link.SupervisorLink`."""

    def send(self, **message: object) -> bool:
        """Send a message; return whether it was sent."""


class Supervised:
    """The state reported by the supervisor, and the demand reported to it. Empty in a router that
    was started alone."""

    def __init__(self, channel: SupervisorChannel | None) -> None:
        self._channel = channel
        self.models_received = asyncio.Event()
        """Set once the supervisor has sent the models."""
        self.models: dict[str, ConfiguredModel] = {}
        """By their own names, in the order of the configuration."""
        self.jobs: dict[str, RemoteJob] = {}
        """By model name; only the last job of each."""
        self._followers: Counter[str] = Counter()
        self.restarting = False
        """Whether engines are being restarted."""
        self.heartbeat_due = asyncio.Event()
        """Set by the router's timer, and when the first request begins to wait for a model: the
        supervisor must learn of it at once."""
        self._waiting: dict[str, int] = {}
        self._used_at: dict[str, float] = {}
        self._files: dict[str, LocalFiles] = {}

    def on_models(self, message: Mapping[str, Any]) -> None:
        """Apply the supervisor's message about the models."""
        try:
            self.models = msgspec.convert(message["models"], dict[str, ConfiguredModel])
            self.jobs = msgspec.convert(message.get("jobs", {}), dict[str, RemoteJob])
        except msgspec.ValidationError as error:
            logger.error("unknown message from the supervisor: %s", error)
        self.restarting = bool(message.get("restarting"))
        # A model that is loaded may be downloaded again.
        self._files = {
            name: files
            for name, files in self._files.items()
            if name in self.models and self.models[name].state == "unloaded"
        }
        now = time.monotonic()
        self._used_at = {name: self._used_at.get(name, now) for name in self.models}
        self.models_received.set()

    @property
    def engines(self) -> set[str]:
        """The names of the engines that the supervisor runs."""
        return {name for model in self.models.values() for name in model.engines}

    async def read_files(self) -> None:
        """Read the files of models that were not read yet."""
        for name, model in list(self.models.items()):
            if model.directory is not None and name not in self._files:
                self._files[name] = await asyncio.to_thread(read_local_files, model.directory)

    def files(self, model_id: str) -> LocalFiles:
        """Return what the files of the model say, as far as they were read."""
        return self._files.get(model_id) or LocalFiles()

    def find(self, name: str) -> ConfiguredModel | None:
        return next((model for model in self.models.values() if name in model.names), None)

    def will_load(self, model_id: str) -> bool:
        """Return whether the supervisor will load the model on demand."""
        model = self.models.get(model_id)
        return model is not None and model.state != "broken"

    def restart(self, target: str | None = None) -> bool:
        """Restart the engine or the engines of the model ``target``, or all engines, one at a time.
        Return False if there is no supervisor to do it."""
        return self._channel is not None and self._channel.send(do="restart", target=target)

    def keep(self, model: ConfiguredModel, keep_s: float | None) -> None:
        """Unload ``model`` after ``keep_s`` without a request; infinity: never, None: as
        configured."""
        name = model.names[0]
        sent_s = keep_s if keep_s is None or math.isfinite(keep_s) else -1.0
        if keep_s != 0:
            self._used_at[name] = time.monotonic()
        if self._channel is not None and (keep_s is not None or model.kept_s is not None):
            self._channel.send(do="keep", target=name, keep_s=sent_s)

    def idle_s(self, model: ConfiguredModel) -> float:
        """Return the seconds since the last request that used ``model``."""
        now = time.monotonic()
        return now - self._used_at.get(model.names[0], now)

    async def follow_job(
        self, kind: Literal["pull", "delete"], name: str
    ) -> AsyncGenerator[RemoteJob, None]:
        """Start pulling or deleting the model ``name``, or join a running job, and yield each state
        until it has ended. A download that nobody follows any more is cancelled.

        Raises `EndpointNotSupported` if there is no supervisor to do it, and `Unavailable`.
        """
        before = self.jobs.get(name)
        ended = before.number if before is not None and before.has_ended else -1
        if self._channel is None:
            raise EndpointNotSupported("This router cannot manage its models.")
        if not self._channel.send(do=kind, target=name):
            raise Unavailable("The supervisor accepts no messages now.", retry_after_s=1)
        deadline = time.monotonic() + _BEGIN_S
        last: RemoteJob | None = None
        self._followers[name] += 1
        try:
            while not (last and last.has_ended):
                job = self.jobs.get(name)
                # A cancelled job belonged to another request: this one prevents that for its own.
                is_news = job is not None and job.number > ended and job != last
                if job is not None and is_news and job.state != "cancelled":
                    if job.kind != kind:
                        raise Unavailable(
                            f"{name} is already being "
                            f"{'pull' if job.kind == 'pull' else 'delet'}ed.",
                            retry_after_s=5,
                        )
                    last = job
                    yield job
                    continue
                if last is None and time.monotonic() > deadline:
                    raise Unavailable(
                        "The supervisor did not start the job in time.", retry_after_s=1
                    )
                await asyncio.sleep(_LOOK_AGAIN_S)
        finally:
            self._followers[name] -= 1
            if not self._followers[name]:
                del self._followers[name]
                if kind == "pull" and (last is None or not last.has_ended):
                    self._channel.send(do="cancel pull", target=name)

    # -- demand ----------------------------------------------------------------

    @contextmanager
    def waiting_for(self, model: ConfiguredModel) -> Iterator[None]:
        """Count a request that waits for ``model`` to load."""
        name = model.names[0]
        if not self._waiting.get(name):
            self.heartbeat_due.set()
        self._waiting[name] = self._waiting.get(name, 0) + 1
        try:
            yield
        finally:
            self._waiting[name] -= 1
            self._used_at[name] = time.monotonic()

    def demand(
        self, in_use: Collection[str], stranded: Mapping[str, int]
    ) -> dict[str, tuple[int, float]]:
        """Return, by model, how many requests wait for it to load, and the seconds since its last
        request: 0 while it has any, like those ``in_use``. ``stranded`` are the requests whose
        model was unloaded after they arrived."""
        now = time.monotonic()
        found = {}
        for name in self.models:
            waiting = self._waiting.get(name, 0) + stranded.get(name, 0)
            if waiting or name in in_use:
                self._used_at[name] = now
            found[name] = (waiting, round(now - self._used_at[name], 3))
        return found
