"""Models that are downloaded or deleted while the server runs, each by a process of its own."""

from __future__ import annotations

import dataclasses
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

from engine.model.load import DEMOS, HUB_ID
from services.launcher import LaunchedProcess
from services.managed_child import describe_exit
from shared.exits import EXIT_OK
from shared.settings import ModelEntry, Settings
from shared.settings.groups import ModelSettings, SpeculationSettings

logger = logging.getLogger(__name__)

Kind = Literal["pull", "delete"]
StartJob = Callable[[Kind, str], LaunchedProcess]
"""Starts the process of a job about the model of this path or id. Raises: OSError."""

MOST_AT_ONCE = 4
KEPT_S = 30.0
"""How long the result of a job is told."""
MOST_KEPT = 64
_REASON_CHARS = 500


@dataclass
class ModelJob:
    kind: Kind
    name: str
    number: int
    process: LaunchedProcess | None = None
    state: Literal["running", "done", "failed"] = "running"
    reason: str = ""
    completed: int = 0
    total: int = 0
    ended_at: float = 0.0

    def describe(self) -> dict[str, Any]:
        """Return what the router is told."""
        names = ("kind", "number", "state", "reason", "completed", "total")
        return {name: getattr(self, name) for name in names}


class ModelJobs:
    """The jobs by the names of their models; of each model the last."""

    def __init__(self, start: StartJob) -> None:
        self._start = start
        self._jobs: dict[str, ModelJob] = {}
        self._number = 0

    def begin(self, kind: Kind, name: str, path: str, refusal: str = "") -> None:
        """Begin a job about the model called ``name``, unless there is one, or a ``refusal``."""
        if self.is_running(name):
            return
        running = [job for job in self._jobs.values() if job.state == "running"]
        ended = [job for job in self._jobs.values() if job.state != "running"]
        for old in ended[: max(0, len(ended) - MOST_KEPT)]:
            del self._jobs[old.name]
        self._number += 1
        self._jobs.pop(name, None)  # the newest is the last
        job = self._jobs[name] = ModelJob(kind, name, self._number)
        if not refusal and len(running) >= MOST_AT_ONCE:
            refusal = f"{len(running)} models are pulled or deleted already"
        try:
            if not refusal:
                job.process = self._start(kind, path)
        except OSError as error:
            refusal = f"no process could be started ({error.strerror})"
        if refusal:
            self._end(job, refusal)

    def is_running(self, name: str) -> bool:
        return name in self._jobs and self._jobs[name].state == "running"

    def cancel(self, name: str) -> None:
        """Stop a download. What has come is kept: the next one goes on from there."""
        job = self._jobs.get(name)
        if job is not None and job.process is not None and job.kind == "pull":
            job.process.stop(at_once=True)
            job.reason = "it was cancelled"

    def turn(self) -> list[ModelJob]:
        """Take what the processes say; return the jobs that have ended well since the last call."""
        done, now = [], time.monotonic()
        for job in list(self._jobs.values()):
            if job.process is None:
                if now - job.ended_at > KEPT_S:
                    del self._jobs[job.name]
                continue
            job.process.refresh(now)
            for message in job.process.take_messages():
                job.completed = int(message.get("completed", job.completed))
                job.total = int(message.get("total", job.total))
                job.reason = str(message.get("reason", job.reason))
            code = job.process.state.exit_code
            if code is None:
                continue
            job.process.close()
            self._end(
                job, "" if code == EXIT_OK else job.reason or f"its process {describe_exit(code)}"
            )
            if job.state == "done":
                done.append(job)
        return done

    def describe(self) -> dict[str, Any]:
        return {name: job.describe() for name, job in self._jobs.items()}

    def close(self) -> None:
        """End all processes, and wait until they have ended."""
        for job in self._jobs.values():
            if job.process is not None:
                job.process.stop(at_once=True)
                job.process.wait()
                job.process.close()

    def _end(self, job: ModelJob, failure: str) -> None:
        job.process, job.ended_at = None, time.monotonic()
        failure = failure[:_REASON_CHARS]
        job.state, job.reason = "failed" if failure else "done", failure
        what = f"failed: {failure}" if failure else "done"
        logger.log(
            logging.ERROR if failure else logging.INFO, "%s %s: %s", job.kind, job.name, what
        )


def can_be_pulled(name: str) -> bool:
    """Return whether the hub may have a model of this name, or it is the demo."""
    return name in DEMOS or (HUB_ID.fullmatch(name) is not None and not name.startswith("."))


def pulled_entry(settings: Settings, name: str) -> ModelEntry:
    """Return how the model ``name``, which was pulled, is served: with ``settings``, but for those
    that were made for another model. Code that comes with it is never run."""
    defaults = Settings()
    own = {
        field.name
        for group in (ModelSettings, SpeculationSettings)
        for field in dataclasses.fields(group)
    } - {"idle_unload_s", "cpu_precision", "prove"}
    values = {field: getattr(defaults, field) for field in own}
    values |= {"model": name, "served_model_name": (name,)}
    given = settings.given - own | {"model", "served_model_name"}
    return ModelEntry(settings=dataclasses.replace(settings, **values, given=given))
