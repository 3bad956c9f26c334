"""Downloads and deletions of models at run time, each in its own process."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

from services.supervision.launcher import LaunchedProcess
from services.supervision.managed_child import describe_exit
from shared.exits import EXIT_OK

logger = logging.getLogger(__name__)

Kind = Literal["pull", "delete"]
State = Literal["running", "done", "failed", "refused", "cancelled"]
StartJob = Callable[[Kind, str], LaunchedProcess]
"""Starts the process of a job for the model with this path or id. Raises: OSError."""

MAX_AT_ONCE = 4
KEPT_S = 30.0
"""How long the result of a job is reported."""
MAX_KEPT = 64
_REASON_CHARS = 500


@dataclass
class ModelJob:
    kind: Kind
    name: str
    path: str
    number: int
    process: LaunchedProcess | None = None
    state: State = "running"
    reason: str = ""
    completed: int = 0
    total: int = 0
    ended_at: float = 0.0

    def describe(self) -> dict[str, Any]:
        """Return the state reported to the router."""
        names = ("kind", "number", "state", "reason", "completed", "total")
        return {name: getattr(self, name) for name in names}


class ModelJobs:
    """The jobs by model name; only the last of each model."""

    def __init__(self, start: StartJob) -> None:
        self._start = start
        self._jobs: dict[str, ModelJob] = {}
        self._ending: list[tuple[str, LaunchedProcess]] = []
        """Processes of cancelled jobs, by model name. They have files open, so the next job of the
        model starts when they have exited."""
        self._number = 0

    def begin(self, kind: Kind, name: str, path: str, refusal: str = "") -> None:
        """Start a job for the model called ``name``, unless there is one, or a ``refusal``."""
        if self.is_running(name):
            return
        running = [job for job in self._jobs.values() if job.state == "running"]
        ended = [job for job in self._jobs.values() if job.state != "running"]
        for old in ended[: max(0, len(ended) - MAX_KEPT)]:
            del self._jobs[old.name]
        self._number += 1
        self._jobs.pop(name, None)  # the newest is last
        job = self._jobs[name] = ModelJob(kind, name, path, self._number)
        if refusal:
            self._end(job, "refused", refusal)
        elif len(running) >= MAX_AT_ONCE:
            reason = f"{len(running)} models are already being pulled or deleted"
            self._end(job, "failed", reason)
        else:
            self._start_process(job)

    def is_running(self, name: str, kind: Kind | None = None) -> bool:
        """Return whether a job (of this ``kind``, if given) is running for the model."""
        job = self._jobs.get(name)
        return job is not None and job.state == "running" and kind in (None, job.kind)

    def cancel(self, name: str) -> None:
        """Stop a download. Downloaded data is kept: the next download continues it."""
        job = self._jobs.get(name)
        if job is None or job.kind != "pull" or job.state != "running":
            return
        if job.process is not None:
            job.process.stop(at_once=True)
            self._ending.append((name, job.process))
        job.process, job.state, job.ended_at = None, "cancelled", time.monotonic()
        logger.info("pull %s: cancelled", name)

    def poll(self) -> list[ModelJob]:
        """Read the messages of the processes; return the jobs that have succeeded since the last
        call."""
        done: list[ModelJob] = []
        now = time.monotonic()
        for ending in list(self._ending):
            ending[1].refresh(now)
            if ending[1].state.exit_code is not None:
                ending[1].close()
                self._ending.remove(ending)
        for job in list(self._jobs.values()):
            if job.state != "running":
                if now - job.ended_at > KEPT_S:
                    del self._jobs[job.name]
            elif job.process is None:
                self._start_process(job)
            elif self._has_ended_well(job, job.process, now):
                done.append(job)
        return done

    def describe(self) -> dict[str, Any]:
        return {name: job.describe() for name, job in self._jobs.items()}

    def close(self) -> None:
        """Stop all processes, and wait until they have exited."""
        running = [job.process for job in self._jobs.values() if job.process is not None]
        for process in [*running, *(process for _, process in self._ending)]:
            process.stop(at_once=True)
            process.wait()
            process.close()

    def _start_process(self, job: ModelJob) -> None:
        """Start the process of ``job``, unless one of the same model is still stopping."""
        if any(name == job.name for name, _ in self._ending):
            return
        try:
            job.process = self._start(job.kind, job.path)
        except OSError as error:
            self._end(job, "failed", f"cannot start a process ({error.strerror})")

    def _has_ended_well(self, job: ModelJob, process: LaunchedProcess, now: float) -> bool:
        process.refresh(now)
        for message in process.take_messages():
            job.completed = int(message.get("completed", job.completed))
            job.total = int(message.get("total", job.total))
            job.reason = str(message.get("reason", job.reason))
        code = process.state.exit_code
        if code is not None:
            process.close()
            if code == EXIT_OK:
                self._end(job, "done")
            else:
                self._end(job, "failed", job.reason or f"its process {describe_exit(code)}")
        return code == EXIT_OK

    def _end(self, job: ModelJob, state: State, reason: str = "") -> None:
        job.process, job.ended_at = None, time.monotonic()
        job.state, job.reason = state, reason[:_REASON_CHARS]
        level = logging.INFO if state == "done" else logging.ERROR
        what = f"{state}: {job.reason}" if job.reason else state
        logger.log(level, "%s %s: %s", job.kind, job.name, what)
