"""Engines, and the models they serve."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterable
from dataclasses import dataclass

import msgspec

from router.fleet.engines.prefix_index import PrefixIndex
from router.fleet.models.tokenizer_files import acceptable_files
from router.images.preparing import ImageProcessor
from router.tokens.rendering import Renderer
from shared.adapter_names import MAX_NAMED_ADAPTERS, DecisionTable, is_sound
from shared.settings import Settings
from shared.wire import (
    AdapterDecision,
    AdapterRef,
    EngineStats,
    Heartbeat,
    Hello,
    Phase,
    StoreStats,
)


class Engine:
    """One engine process, as it last described itself."""

    def __init__(
        self, peer: bytes, hello: Hello, name: str, stall_limit_s: float, key: str | None = None
    ) -> None:
        self.peer = peer
        self.key = key
        """The public key with which it joined; None: without CURVE."""
        self.hello = hello
        self.name = name
        self.phase: Phase = "loading"
        self.phase_s = 0.0
        self.stalled_s = 0.0
        self.stats = EngineStats()
        self.store: StoreStats | None = None
        self.last_heartbeat = time.monotonic()
        self.lost_reason: str | None = None
        """The reason why the engine is gone; None while it is connected."""
        self.drained = False
        """Whether an administrator has drained it."""
        self.left = False
        """Whether the engine has announced its exit."""
        self.request_ids: dict[str, None] = {}
        """The sequences in flight here, in order of placement."""
        self.prefix_index = PrefixIndex()
        self.backoff_until = 0.0
        self._stall_limit_s = stall_limit_s

    @property
    def silence_s(self) -> float:
        """The time since the last heartbeat."""
        return time.monotonic() - self.last_heartbeat

    @property
    def trouble(self) -> str | None:
        """The reason why the engine cannot accept requests now, in words; None if it can."""
        if self.lost_reason is not None:
            return self.lost_reason
        if self.phase != "ready":
            return f"{self.phase} for {self.phase_s:.0f} s"
        if self.drained:
            return "drained by an administrator"
        if self.stalled_s > self._stall_limit_s:
            return f"stalled: no progress for {self.stalled_s:.0f} s with requests in flight"
        return None

    @property
    def takes_adapters(self) -> bool:
        """Whether requests may name adapters. An engine of an older release would ignore that."""
        return self.hello.max_adapters > 0

    @property
    def free_capacity(self) -> int:
        """The number of sequences that the engine can accept now."""
        if self.trouble is not None or time.monotonic() < self.backoff_until:
            return 0
        return max(0, self.hello.max_sequences - len(self.request_ids))

    @property
    def is_full(self) -> bool:
        """Whether it could accept another sequence if it had one less."""
        is_waited_for = time.monotonic() < self.backoff_until
        full = len(self.request_ids) >= self.hello.max_sequences
        return self.trouble is None and full and not is_waited_for

    @property
    def spare_rows(self) -> int:
        """The rows left idle if all its sequences decoded: capacity for batches."""
        rows = min(self.hello.max_batch_size, self.hello.max_sequences)
        return max(0, min(rows - len(self.request_ids), self.free_capacity))

    @property
    def memory_pressure(self) -> float:
        """The unevictable bytes as a fraction of the ledger's limit."""
        limit = self.stats.limit_bytes
        return self.stats.unevictable_bytes / limit if limit > 0 else 0.0

    def on_heartbeat(self, heartbeat: Heartbeat) -> None:
        self.phase, self.phase_s, self.stalled_s = (
            heartbeat.phase,
            heartbeat.phase_s,
            heartbeat.stalled_s,
        )
        self.stats, self.store = heartbeat.stats, heartbeat.store
        self.last_heartbeat = time.monotonic()
        self.lost_reason = None

    def on_ended(self, unevictable_bytes: int | None) -> None:
        """Record what running sequences hold, if one of them has ended."""
        if unevictable_bytes is not None:
            self.stats = msgspec.structs.replace(self.stats, unevictable_bytes=unevictable_bytes)


class ModelReplicas:
    """The engines that serve one model, and their common properties."""

    def __init__(self, hello: Hello, settings: Settings) -> None:
        self.hello = hello
        """The introduction of the engine that joined last."""
        self.settings = settings
        """The router's settings with those that the engines of this model override."""
        self.successor: ModelReplicas | None = None
        """The version of the model that has replaced this one, if any."""
        self.tokenizer_files = acceptable_files(hello.files)
        self.engines: list[Engine] = []
        self.renderer: Renderer | None = None
        """None until the tokenizer is loaded."""
        self.load_error: str | None = None
        """The fault of the tokenizer, in words."""
        self.load_at = 0.0
        """When it may be loaded (again), from ``time.monotonic``; infinity: it is loading."""
        self.failed_loads = 0
        self.model: Model | None = None
        """The data for requests; None until an engine has been ready."""
        self._last_ready = self._last_ready_for_adapters = time.monotonic()
        self.created = int(time.time())
        self.adapters: dict[str, AdapterRef] = {}
        """By the names that requests have for them."""
        self.decisions = DecisionTable()
        """The decisions of administrators about their names."""
        self.adapters_left_at: float | None = None
        """When an engine with adapters in its settings was removed, from ``time.monotonic``."""

    def update_adapters(self) -> None:
        """Name the adapters of the engines' settings, except where an administrator has decided
        on a name. An adapter that no engine has in its settings any more loses its name."""
        of_settings = [one for each in self.engines for one in _sound_adapters(each.hello)]
        self.adapters = {one.name: one for one in of_settings if one.name not in self.decisions}
        decided = (each.adapter for each in self.decisions.all)
        self.adapters |= {one.name: one for one in decided if one is not None}

    def forget_adapters(self, now: float, wait_s: float) -> None:
        """Drop names that no engine has had in its settings for ``wait_s``, in which one that
        restarts comes back. If no engine takes adapters, errors say so instead."""
        left_at = self.adapters_left_at
        if left_at is None or now - left_at <= wait_s:
            return
        if any(engine.takes_adapters for engine in self.engines):
            self.adapters_left_at = None
            self.update_adapters()

    def apply(self, decisions: Iterable[AdapterDecision]) -> bool:
        """Let names stand for what administrators have decided. Return whether any is new."""
        if not self.decisions.merge(decisions):
            return False
        for each in self.decisions.all:
            if each.adapter is None:
                self.adapters.pop(each.name, None)
            else:
                self.adapters[each.name] = each.adapter
        return True

    @property
    def id(self) -> str:
        return self.hello.model

    @property
    def names(self) -> list[str]:
        """The model's names in the API, its own name first."""
        return [self.hello.model, *self.hello.aliases]

    @property
    def max_prompt_tokens(self) -> int:
        """The longest prompt that the model accepts."""
        return min(self.settings.max_prompt_tokens or sys.maxsize, self.hello.context_length)

    @property
    def capabilities(self) -> list[str]:
        """The features enabled by the tokenizer and its template, if the model generates text."""
        if self.renderer is None or self.hello.task != "generate":
            return []
        return self.renderer.capabilities

    @property
    def ready_engines(self) -> list[Engine]:
        if self.renderer is None:
            return []
        return [engine for engine in self.engines if engine.trouble is None]

    def update_readiness(self) -> bool:
        """Return whether an engine is ready; update `model` and `unready_for_s`."""
        if self.renderer is None or not self.ready_engines:
            return False
        self.model = self.model or Model(self, self.renderer)
        self._last_ready = time.monotonic()
        if any(engine.takes_adapters for engine in self.ready_engines):
            self._last_ready_for_adapters = self._last_ready
        return True

    def exclude(self, suspended_s: float) -> None:
        """Exclude a time during which readiness could not be observed."""
        self._last_ready += suspended_s
        self._last_ready_for_adapters += suspended_s
        if self.adapters_left_at is not None:
            self.adapters_left_at += suspended_s

    def unready_for_s(self, now: float, *, for_adapters: bool = False) -> float:
        """Return how long no engine has been ready, or none that takes adapters."""
        return now - (self._last_ready_for_adapters if for_adapters else self._last_ready)

    @property
    def troubles(self) -> list[str]:
        """The reason why no engine is ready, or the problems of single engines."""
        found = [f"engine {e.name}: {e.trouble}" for e in self.engines if e.trouble]
        if self.load_error is not None:
            found.append(self.load_error)
        elif self.renderer is None:
            found.append("its tokenizer is loading")
        if not self.engines:
            found.append("no engine is connected")
        return found

    def matches(self, hello: Hello, settings: Settings) -> bool:
        """Return whether an engine with ``hello`` and ``settings`` belongs to these."""
        return (
            self.hello.fingerprint == hello.fingerprint
            and self.hello.aliases == hello.aliases
            and self.tokenizer_files == acceptable_files(hello.files)
            and self.hello.vision == hello.vision
            and self.settings == settings
        )

    def version_for(
        self,
        *,
        has_output: bool,
        has_images: bool = False,
        adapter: AdapterRef | None = None,
        prefer_successor: bool = False,
    ) -> ModelReplicas:
        """Return the version that a waiting sequence of this one goes on with: this one while it
        has a ready engine, unless the successor is preferred.

        The tokens and the images of the prompt have to mean the same there, output has to be of
        the same weights, and an adapter of those, or named there too.
        """
        other = self.successor
        if other is None or (self.ready_engines and not prefer_successor):
            return self
        same_weights = other.hello.fingerprint == self.hello.fingerprint
        same_tokens = other.tokenizer_files == self.tokenizer_files
        same_tokens &= not has_images or other.hello.vision == self.hello.vision
        same_tokens &= other.hello.text_task == self.hello.text_task
        if adapter is not None:
            same_tokens &= any(engine.takes_adapters for engine in other.engines)
            named = adapter if same_weights else other.adapters.get(adapter.name)
            same_tokens &= named is not None and named.digest == adapter.digest
        return other if same_tokens and (same_weights or not has_output) else self


def _sound_adapters(hello: Hello) -> list[AdapterRef]:
    """Return the adapters of an engine's settings that requests may name."""
    return [
        adapter
        for adapter in hello.adapters[:MAX_NAMED_ADAPTERS]
        if is_sound(AdapterDecision(name=adapter.name, adapter=adapter, version=1))
    ]


@dataclass(frozen=True)
class Model:
    """A model that has been ready, with its renderer."""

    replicas: ModelReplicas
    renderer: Renderer
    adapter: AdapterRef | None = None
    """The adapter that a request names with it."""

    @property
    def adapter_digest(self) -> str:
        """The digest of the adapter's content; empty without one."""
        return "" if self.adapter is None else self.adapter.digest

    @property
    def hello(self) -> Hello:
        return self.replicas.hello

    @property
    def names(self) -> list[str]:
        return self.replicas.names

    @property
    def settings(self) -> Settings:
        return self.replicas.settings

    @property
    def max_prompt_tokens(self) -> int:
        return self.replicas.max_prompt_tokens

    @property
    def image_processor(self) -> ImageProcessor | None:
        """How images are prepared for it; None: it accepts none."""
        vision = self.renderer.vision
        return None if vision is None else ImageProcessor(self.renderer.directory, vision)
