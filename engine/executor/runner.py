"""The order in which plans are dispatched and their results are read."""

from __future__ import annotations

from collections.abc import Iterator

from engine.executor.base import Executor, PendingStep
from engine.plan import Plan, StepResult


class StepRunner:
    """Runs plans one after the other. All ranks of an engine do it in this order, since each has
    to dispatch the same passes one after the other."""

    def __init__(self, executor: Executor) -> None:
        self._executor = executor
        self.pending: PendingStep | None = None
        """A step that was dispatched and not read."""

    def results(self, plan: Plan | None) -> Iterator[StepResult]:
        """Dispatch ``plan``, and yield the results that are known by then. The device is busy
        with the decodes while those of the plan before it are sent, and chunks come after both:
        tokens do not wait for them."""
        step = None if plan is None else self._executor.dispatch(plan)
        previous, self.pending = self.pending, None
        if previous is not None:
            yield previous.read(early=True)
        if step is not None and step.may_wait:
            self.pending = step
        elif step is not None:
            yield step.read(early=True)
        if step is not None:
            step.finish()

    def reset(self) -> None:
        """Drop all that was computed."""
        self.pending = None
        self._executor.reset()
