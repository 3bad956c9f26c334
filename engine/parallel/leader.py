"""Rank 0: it decides for all ranks, and sends each plan before running it."""

from __future__ import annotations

import dataclasses
import sys
from collections import deque
from dataclasses import dataclass, field
from typing import NoReturn

import zmq

from engine.executor.base import Executor, PendingStep
from engine.parallel.errors import RankFailed
from engine.parallel.group import RankGroup
from engine.parallel.plans import PlanSender, StoredName, pack
from engine.parallel.progress import StepProgress
from engine.plan import Plan, StepResult
from engine.sampling.masks import GrammarMasker


@dataclass(frozen=True)
class Leader:
    """The means of rank 0 to lead its group."""

    group: RankGroup
    plans: PlanSender
    stores: zmq.Socket[bytes]
    """The socket on which the other ranks answer questions about their blocks
    (`engine.io.store`)."""
    progress: StepProgress
    smallest_bytes: int = sys.maxsize
    """The smallest memory among the other ranks."""

    released: deque[StoredName] = field(default_factory=deque)
    """Files that the other ranks have fetched and rank 0 has dropped since the last plan. Any
    thread may append."""


class LeadingExecutor(Executor):
    """Runs plans on all ranks, on this one with its ``own`` executor.

    A step that raises here may have left the others in the middle of a collective, so only a new
    group helps: `reset` raises."""

    def __init__(self, own: Executor, leader: Leader) -> None:
        self._own, self._progress = own, leader.progress
        self._plans, self._released = leader.plans, leader.released
        self.spec = dataclasses.replace(own.spec, guesses="")

    @property
    def host_bytes(self) -> int:
        return self._own.host_bytes

    def use_grammars(self, masker: GrammarMasker) -> None:
        self._own.use_grammars(masker)

    def dispatch(self, plan: Plan) -> PendingStep:
        packed = pack(plan, [self._released.popleft() for _ in range(len(self._released))])
        self._progress.begin(packed)
        self._plans.send(packed)
        return _LedStep(plan, self._own.dispatch(plan), self._progress)

    def wait(self) -> None:
        self._own.wait()

    def reset(self) -> NoReturn:
        raise RankFailed("a step failed on rank 0: the group ends")


class _LedStep(PendingStep):
    def __init__(self, plan: Plan, own: PendingStep, progress: StepProgress) -> None:
        self._plan, self._own, self._progress = plan, own, progress
        self.may_wait = own.may_wait

    def read(self, *, early: bool = False) -> StepResult:
        result = self._own.read(early=early)
        self._progress.finish(result.tokens)
        # A sequence without a mask, or without its state, fails alone: it is computed like the
        # others.
        alone = {restore.slot for restore in self._plan.state_restores}
        alone |= {decode.slot for decode in self._plan.decodes}
        for slot, reason in result.failed:
            if slot not in alone:
                raise RankFailed(f"a chunk failed on rank 0: {reason}")
        return result

    def finish(self) -> None:
        self._own.finish()
