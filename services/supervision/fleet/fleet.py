"""Decides which engines run: loads models on demand, unloads them, and restarts them."""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from services.supervision.fleet.engine_pool import ChildRunner, EnginePool, SpecMaker
from services.supervision.fleet.memory import budgets, entry_bytes, placed_bytes, total_bytes
from services.supervision.fleet.model import FleetModel
from services.supervision.fleet.model_jobs import Kind, ModelJobs
from services.supervision.fleet.pulled import delete_refusal, pull_refusal, pulled_entry
from services.supervision.fleet.rolling_restart import RollingRestart
from services.supervision.launcher import LaunchedProcess
from services.supervision.managed_child import ManagedChild
from shared.exits import EXIT_CONFIG, EXIT_FAILED
from shared.settings import ModelEntry, Settings, model_changes

logger = logging.getLogger(__name__)

ROUTER = "router"
TAKEOVER_AFTER_S = 10.0
"""After this wait, a model may take memory from a model that has requests."""
SHORTEST_STAY_S = 10.0
"""Min time that a model with requests keeps its memory."""


class EngineFleet:
    """The engines of all models. `update` is called at least once per second."""

    def __init__(
        self,
        supervisor: ChildRunner,
        make_spec: SpecMaker,
        settings: Settings,
        entries: Sequence[ModelEntry],
        jobs: ModelJobs | None = None,
    ) -> None:
        """``jobs`` pulls and deletes models at run time."""
        self._jobs = jobs
        self._configured = tuple(entries)
        self._pulled: list[ModelEntry] = []
        self._supervisor = supervisor
        self._settings = settings
        self._device_bytes: int | None = None
        self._pool = EnginePool(supervisor, make_spec)
        self._restart = RollingRestart(self._pool)
        self._models = [FleetModel(entry, entry_bytes(entry)) for entry in entries]
        self._router: LaunchedProcess | None = None
        self._sent_models: dict[str, Any] | None = None
        self._size_budgets()
        self._load_what_fits()

    def update(self) -> None:
        now = time.monotonic()
        self._listen(now)
        self._learn_device()
        for model in self._models:
            if line := model.follow_engines():
                logger.info(line)
        self._finish_jobs()
        self._pool.forget_ended()
        self._restart.update()
        self._unload_idle()
        self._scale(now)
        for model in sorted(self._models, key=lambda model: model.waiting_since or now):
            self._load(model, now)
        self._tell_router()
        if all(model.state == "broken" for model in self._models):
            codes = {model.exit_code for model in self._models}
            self._supervisor.end(EXIT_FAILED if EXIT_FAILED in codes else EXIT_CONFIG)

    def on_exit(self, child: ManagedChild) -> None:
        """Tell the router that a process has exited, so that it need not wait for missing
        heartbeats."""
        if self._router is not None and child.name != ROUTER:
            self._tell_of_end(child, planned=child.retired_until is not None)

    def _tell_of_end(self, child: ManagedChild, *, planned: bool) -> None:
        if self._router is not None:
            self._router.send({"ended": child.joins_as, "planned": planned})

    def reconfigure(self, settings: Settings, entries: Sequence[ModelEntry]) -> None:
        """From now on serve ``entries`` and the pulled models: load new models, unload removed
        ones, restart changed ones."""
        for model in self._models:
            model.retry()  # what was missing may be there now
        taken = {name for entry in entries for name in entry.names}
        self._pulled = [entry for entry in self._pulled if taken.isdisjoint(entry.names)]
        self._settings = settings
        self._serve(entries)

    def _serve(self, entries: Sequence[ModelEntry]) -> None:
        """Serve ``entries`` of the configuration, and the pulled models."""
        self._configured = tuple(entries)
        if self._pulled:  # they share the memory
            entries = [replace(entry, alone=False) for entry in entries]
        known = {model.id: model for model in self._models}
        self._models = []
        for entry in [*entries, *self._pulled]:
            model = known.pop(entry.id, None)
            if model is None:
                model = FleetModel(entry, entry_bytes(entry))
                logger.info("model %s was added", model.id)
            elif changes := model_changes(model.entry, entry):
                logger.info("model %s has changed: %s", model.id, ", ".join(sorted(changes)))
                model.entry = entry
                model.retry()
                model.weights_bytes = entry_bytes(entry)
                self._restart.add(model)
            model.entry = entry
            self._models.append(model)
        for model in known.values():
            logger.info("model %s was removed", model.id)
            self._restart.forget(model)
            self._pool.retire(model, model.engines)
        self._size_budgets()
        self._load_what_fits()

    def close(self) -> None:
        """Stop the downloads and deletions of models."""
        if self._jobs is not None:
            self._jobs.close()

    # -- the router ------------------------------------------------------------

    def _listen(self, now: float) -> None:
        """Handle the router's messages: demand in its heartbeats, and commands."""
        (router,) = (child for child in self._supervisor.children if child.name == ROUTER)
        if router.process is not self._router:
            self._router, self._sent_models = router.process, None
        if self._router is None:
            return
        demand = self._router.state.facts.get("models", {})
        for model in self._models:
            waiting, idle_s = demand.get(model.id, (0, 0.0))
            model.note_demand(int(waiting), float(idle_s), now)
            for child in model.engines:
                for message in () if child.process is None else child.process.take_messages():
                    if message.get("lost"):  # and started again, so it does not exit
                        self._tell_of_end(child, planned=False)
            model.scaling.note_load(*self._router.state.facts.get("load", {}).get(model.id, ()))
        for message in self._router.take_messages():
            match message:
                case {"do": "restart", "target": target}:
                    self.restart(target)
                case {"do": "keep", "target": str(target), "keep_s": keep_s}:
                    for model in self._models:
                        if model.id == target:
                            model.keep(keep_s)
                case {"do": "pull" | "delete" as kind, "target": str(target)}:
                    self._begin_job(kind, target)
                case {"do": "cancel pull", "target": str(target)}:
                    if self._jobs is not None:
                        self._jobs.cancel(target)
                case _:
                    logger.error("unknown command from the router: %s", message)

    def _learn_device(self) -> None:
        """Recompute the memory budgets once an engine has reported its device."""
        for model in self._models:
            for child in model.engines:
                facts = {} if child.process is None else child.process.state.facts
                if self._device_bytes is None and isinstance(facts.get("device_bytes"), int):
                    self._device_bytes = facts["device_bytes"]
                    self._size_budgets()

    def _tell_router(self) -> None:
        if self._router is None or self._router.state.last_heartbeat_at is None:
            return
        models = {model.id: model.describe() for model in self._models}
        message = {"models": models, "restarting": not self._restart.is_idle}
        if self._jobs is not None:
            message["jobs"] = self._jobs.describe()
        if message != self._sent_models and self._router.send(message):
            self._sent_models = message

    def restart(self, target: str | None) -> None:
        """Restart the engines that ``target`` names: an engine, a model, or None for all."""
        for model in self._models:
            if target is None or target in model.entry.names:
                model.retry()
                if model.engines:
                    self._restart.add(model)
                elif target is not None:
                    model.waiting_since = model.waiting_since or time.monotonic()
                    self._load(model, time.monotonic(), asked=True)
            for child in model.engines:
                if target in (child.name, child.joins_as):
                    self._restart.add_engine(model, child)

    # -- models that come and go -----------------------------------------------

    def _begin_job(self, kind: Kind, name: str) -> None:
        if self._jobs is None:
            logger.error("the router requested a model, which is not possible here: %s", name)
            return
        refusal, path = "", name
        served = [model.entry for model in self._models]
        known = next((model for model in self._models if name in model.entry.names), None)
        if kind == "delete":
            refusal = delete_refusal(name, served, self._pulled)
            if known is not None and any(not child.is_ready for child in known.engines):
                refusal = refusal or f"an engine of {name} is starting"
        elif known is None:
            refusal = pull_refusal(name, served, self._pulled)
        else:
            path = known.entry.settings.model
        self._jobs.begin(kind, name, path, refusal)

    def _finish_jobs(self) -> None:
        """Serve pulled models, and stop serving deleted ones."""
        for job in () if self._jobs is None else self._jobs.poll():
            found = [model for model in self._models if job.name in model.entry.names]
            for model in found:
                model.retry()
            if job.kind == "pull" and not found:
                self._pulled.append(pulled_entry(self._settings, job.name))
                self._serve(self._configured)
            elif job.kind == "delete":
                self._pulled = [entry for entry in self._pulled if entry.id != job.name]
                self._serve(self._configured)

    # -- memory ----------------------------------------------------------------

    def _size_budgets(self) -> None:
        if self._settings.cluster != "none":  # Ray manages the memory of its machines
            self._pool.total_bytes = sys.maxsize
            for model in self._models:
                model.budget_bytes = placed_bytes(model.entry, model.weights_bytes)
            return
        self._pool.total_bytes = total_bytes(self._settings, self._device_bytes)
        entries = [model.entry for model in self._models]
        sizes = [model.weights_bytes for model in self._models]
        for model, size in zip(
            self._models, budgets(entries, sizes, self._pool.total_bytes), strict=True
        ):
            model.budget_bytes = size
            if int((model.entry.settings.memory_gb or 0.0) * 1e9) > size:
                given_gb = model.entry.settings.memory_gb
                line = "model %s gets %.2f GB of memory, because there is no more (--memory-gb %g)"
                logger.warning(line, model.id, size / 1e9, given_gb)

    def _load_what_fits(self) -> None:
        """Start engines of the models that were not put away, in the order of the configuration,
        pinned models first.

        A model that fits only when others shrink to their current budgets is loaded once they do. A
        pulled model is not: nobody has requested it yet, and engines would restart for it.
        """
        planned = sum(len(model.engines) * model.budget_bytes for model in self._models)
        wanted = [model for model in self._models if not model.put_away]
        for model in sorted(wanted, key=lambda model: not model.entry.pinned):
            while self._lacks_engines(model) and self._pool.fits(model):
                self._pool.start(model)
                planned += model.budget_bytes
            if model.engines and self._lacks_engines(model):
                count, engines = len(model.engines), model.scaling.wanted
                logger.warning("model %s: %d of %d engines fit in memory", model.id, count, engines)
            if not model.engines:
                planned += model.budget_bytes
                will_fit = planned <= self._pool.total_bytes and model.entry not in self._pulled
                model.awaits_memory = will_fit and self._lacks_engines(model)
            if not model.engines and not model.awaits_memory:
                logger.info("model %s will be loaded on demand", model.id)

    def _lacks_engines(self, model: FleetModel) -> bool:
        return (
            model.trouble is None
            and len(model.engines) + model.given_up < model.scaling.wanted
            and not self._restart.concerns(model)
            and not (self._jobs is not None and self._jobs.is_running(model.id, "delete"))
        )

    def _load(self, model: FleetModel, now: float, *, asked: bool = False) -> None:
        """Start the missing engines of ``model``, if requests wait for it or it is
        partly loaded."""
        wanted = model.engines or model.waiting or model.awaits_memory or asked
        if not self._lacks_engines(model) or not wanted:
            return
        if self._pool.fits(model):
            if not model.engines:
                self._measure(model)
            model.put_away = False
            self._pool.start(model)
        elif not model.engines:
            self._make_room(model, now)

    def _scale(self, now: float) -> None:
        """Follow the queues: `_load` starts the engines that are needed, this stops the others."""
        for model in self._models:
            ready = sum(child.is_ready for child in model.engines)
            if line := model.scaling.follow(model.entry.settings, ready, now):
                logger.info("model %s: %s", model.id, line)
            if len(model.engines) > model.scaling.wanted and not self._restart.concerns(model):
                self._pool.retire(model, model.engines[model.scaling.wanted :])

    def _measure(self, model: FleetModel) -> None:
        """Determine the size of an unknown model again: its first load has downloaded it."""
        if model.weights_bytes is None:
            model.weights_bytes = entry_bytes(model.entry)

    def _make_room(self, model: FleetModel, now: float) -> None:
        """Unload the least recently used models, so that ``model`` fits."""
        pool = self._pool
        pinned = [each for each in self._models if each.entry.pinned and each is not model]
        # A model that is restarted, or has more engines for a while, is counted without these.
        kept = sum(
            each.budget_bytes * min(len(each.engines), each.entry.settings.engines)
            for each in pinned
        )
        if kept + model.budget_bytes > pool.total_bytes:
            model.trouble = (
                f"it needs {model.budget_bytes / 1e9:.2f} GB of memory, but pinned models use "
                f"{kept / 1e9:.2f} of {pool.total_bytes / 1e9:.2f} GB"
            )
            logger.error("model %s cannot be loaded: %s", model.id, model.trouble)
            return
        lacking = pool.used_bytes - pool.leaving_bytes + model.budget_bytes - pool.total_bytes
        if lacking <= 0 or self._shrink(lacking) or not model.waiting_since:
            return
        waited_s = now - (model.waiting_since or now)
        for victim in sorted(self._models, key=lambda each: -each.idle_s):
            if lacking <= 0:
                return
            if victim.engines and victim not in (*pinned, model) and _may_go(victim, waited_s, now):
                logger.info("unloading model %s to make room for %s", victim.id, model.id)
                lacking -= pool.bytes_of(victim)
                victim.put_away = True
                pool.retire(victim, victim.engines)

    def _shrink(self, lacking_bytes: int) -> bool:
        """Restart engines whose budgets are larger than new ones would get, if that frees enough.
        Return whether that is in progress."""
        excess = self._pool.excess_bytes
        large = [model for model in self._models if excess(model) and not model.given_up]
        if any(map(self._restart.concerns, large)):
            return True
        if sum(map(excess, large)) < lacking_bytes:
            return False
        for model in large:
            logger.info("restarting model %s with less memory, to make room for others", model.id)
            self._restart.add(model)
        return True

    def _unload_idle(self) -> None:
        for model in self._models:
            in_use = model.entry.pinned or model.state != "ready" or self._restart.concerns(model)
            if model.is_due and not in_use:
                logger.info("unloading model %s: idle for %.0f s", model.id, model.idle_s)
                model.kept_s, model.put_away = None, True
                self._pool.retire(model, model.engines)


def _may_go(model: FleetModel, waited_s: float, now: float) -> bool:
    """Return whether ``model`` is unloaded for another model, for which requests have waited
    long enough."""
    if model.idle_s > 0:
        return True
    stay_s = 0.0 if model.ready_since is None else now - model.ready_since
    return waited_s > TAKEOVER_AFTER_S and stay_s > SHORTEST_STAY_S
