"""A supervisor and a launcher without processes: children are ready, and end, when a test says."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from services.supervision.fleet.fleet import EngineFleet
from services.supervision.fleet.model_jobs import ModelJobs
from services.supervision.launcher import ChildSpec, ProcessState
from services.supervision.managed_child import ManagedChild
from shared.settings import ModelEntry, Settings


class PretendedProcess:
    """A `LaunchedProcess` that does what it is told."""

    def __init__(self, spec: ChildSpec) -> None:
        self.spec = spec
        self.state = ProcessState(started_at=0.0, last_heartbeat_at=0.0, phase="loading")
        self.told: list[Mapping[str, Any]] = []
        self.messages: list[Mapping[str, Any]] = []

    def fileno(self) -> int:
        return -1

    def refresh(self, now: float) -> bool:
        return True

    def take_messages(self) -> list[Mapping[str, Any]]:
        taken, self.messages = self.messages, []
        return taken

    def send(self, message: Mapping[str, Any]) -> bool:
        self.told.append(message)
        return True

    def stop(self, *, at_once: bool = False) -> None: ...
    def hang_up(self) -> None: ...
    def wait(self) -> None: ...
    def close(self) -> None: ...


class FleetRun:
    """A fleet of ``models``, by name and memory in bytes, and its router."""

    def __init__(self, total_bytes: int, entries: Sequence[ModelEntry]) -> None:
        self.children: list[ManagedChild] = []
        self.log: list[str] = []
        """What was started (+name), retired (-name) and has ended (.name)."""
        self.ended_with: int | None = None
        router = self.add(ChildSpec(name="router", command=()))
        self.router = PretendedProcess(router.spec)
        router.process = self.router
        self.log.clear()
        self.settings = Settings(fleet_memory_gb=total_bytes / 1e9)
        self.job_processes: list[PretendedProcess] = []
        jobs = ModelJobs(self._start_job)
        self.fleet = EngineFleet(self, self._make_spec, self.settings, entries, jobs)

    def _start_job(self, kind: str, path: str) -> PretendedProcess:
        process = PretendedProcess(ChildSpec(name=kind, command=(path,)))
        self.job_processes.append(process)
        return process

    def _make_spec(self, entry: ModelEntry, name: str, budget_bytes: int) -> ChildSpec:
        return ChildSpec(name=name, command=(entry.settings.model, str(budget_bytes)))

    @classmethod
    def settled(cls, total_bytes: int, *entries: ModelEntry) -> FleetRun:
        """Return a fleet whose first engines are ready."""
        run = cls(total_bytes, entries)
        run.settle()
        return run

    # -- ChildRunner -----------------------------------------------------------

    def add(self, spec: ChildSpec) -> ManagedChild:
        child = ManagedChild(spec)
        child.process = PretendedProcess(spec)
        self.children.append(child)
        self.log.append(f"+{spec.name}")
        return child

    def retire(self, child: ManagedChild) -> None:
        if child.gave_up is not None:
            self.children.remove(child)
        elif child.retired_until is None:
            child.retired_until = 1.0
            self.log.append(f"-{child.name}")

    def end(self, code: int) -> None:
        self.ended_with = code

    # -- for tests -------------------------------------------------------------

    @property
    def engines(self) -> list[str]:
        """The names of the engines that run, those that end included."""
        return [child.name for child in self.children[1:]]

    def child(self, name: str) -> ManagedChild:
        return next(child for child in self.children if child.name == name)

    def make_ready(self, *names: str) -> None:
        for child in self.children[1:]:
            if not names or child.name in names:
                assert child.process is not None
                child.process.state.phase = "ready"

    def pass_time(self, seconds: float) -> None:
        """Let ready models have been loaded for so much longer."""
        for model in self.fleet._models:
            if model.ready_since is not None:
                model.ready_since -= seconds

    def end_retired(self) -> None:
        for child in list(self.children):
            if child.retired_until is not None:
                self.children.remove(child)
                self.log.append(f".{child.name}")
                self.fleet.on_exit(child)

    def settle(self, **demand: tuple[int, float]) -> None:
        """Let engines become ready and end, with this demand by model, until nothing happens."""
        self.router.state.facts = {"models": demand}
        before = None
        while before != self.log:
            before = list(self.log)
            for _ in range(3):
                self.fleet.update()
            self.end_retired()
            self.make_ready()
            self.fleet.update()

    @property
    def states(self) -> dict[str, str]:
        """The state of each model, as the router was told last."""
        told = next(message for message in reversed(self.router.told) if "models" in message)
        return {name: model["state"] for name, model in told["models"].items()}

    @property
    def jobs(self) -> dict[str, Any]:
        """The jobs, as the router was told last."""
        told = next(message for message in reversed(self.router.told) if "jobs" in message)
        return dict(told["jobs"])

    def reason(self, name: str) -> str:
        told = next(message for message in reversed(self.router.told) if "models" in message)
        return str(told["models"][name]["reason"])


def entry(
    name: str,
    gigabytes: float | None = 1.0,
    *,
    pinned: bool = False,
    alone: bool = False,
    **fields: Any,
) -> ModelEntry:
    usual = {"model": f"/nowhere/{name}", "served_model_name": (name,), "memory_gb": gigabytes}
    return ModelEntry(settings=Settings(**{**usual, **fields}), pinned=pinned, alone=alone)
