"""The order in which plans are dispatched and results are read."""

from __future__ import annotations

from collections.abc import Iterator

from engine.executor.base import Executor, PendingStep
from engine.plan import Plan, StepResult


class StepRunner:
    """Runs plans one after the other. All ranks of an engine use this order, because each must
    dispatch the same passes in the same order."""

    def __init__(self, executor: Executor) -> None:
        self.executor = executor
        self.pending: PendingStep | None = None
        """A step that was dispatched but not read."""

    def results(self, plan: Plan | None) -> Iterator[StepResult]:
        """Dispatch ``plan``, and yield the results known by then. The device computes the decodes
        while the previous plan's tokens are sent, and chunks come after both, so tokens do not wait
        for them."""
        step = None if plan is None else self.executor.dispatch(plan)
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
        """Drop everything that was computed."""
        self.pending = None
        self.executor.reset()
