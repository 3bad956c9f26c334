"""Rank 0's watch over other ranks, which are real processes."""

from __future__ import annotations

import json
import os
import signal
import sys
from queue import SimpleQueue

from engine.parallel.health import GroupWatch
from engine.parallel.progress import StepProgress
from services.ranks.keepers import RankJob, start_here
from shared.exits import EXIT_FAILED, EXIT_STUCK

PATIENCE_S = 60.0
Done = list[tuple[str, list[int] | None]]


class WatchedGroup:
    """Rank 0, which has run ``own``, and another rank, which has run ``other``."""

    def __init__(
        self,
        own: Done,
        other: Done,
        *then: str,
        silence_s: float = PATIENCE_S,
        lag_s: float = PATIENCE_S,
    ) -> None:
        module = "tests.engine.parallel.rank_process"
        command = [sys.executable, "-m", module, json.dumps(other), *then]
        self.rank = start_here(1, RankJob(model="", arguments=[], environment={}), command)
        assert self.rank.process is not None
        self.process = self.rank.process
        self.failures: SimpleQueue[tuple[str, int]] = SimpleQueue()
        progress = StepProgress()
        for plan, tokens in own:
            progress.begin(plan.encode())
            if tokens is not None:
                progress.finish(tokens)
        self.watch = GroupWatch(
            [self.rank],
            progress,
            lambda reason, code: self.failures.put((reason, code)),
            silence_s=silence_s,
            lag_s=lag_s,
        )
        self.watch.start()

    def exit_code(self) -> int | None:
        return self.process.poll()

    def failure(self) -> tuple[str, int]:
        found = self.failures.get(timeout=2 * PATIENCE_S)
        assert self.exit_code() is not None, "the rank is left over"
        return found


def test_a_killed_rank_ends_the_group() -> None:
    group = WatchedGroup([], [])
    os.kill(group.process.pid, signal.SIGKILL)
    assert group.failure() == ("rank 1 has exited (SIGKILL)", EXIT_FAILED)


def test_a_stopped_rank_ends_the_group() -> None:
    reason, code = WatchedGroup([], [], "stop", silence_s=1.0).failure()
    assert "sent no heartbeat" in reason and code == EXIT_FAILED


def test_a_group_that_ends_as_planned_leaves_no_rank() -> None:
    group = WatchedGroup([("first", [1])], [("first", [1])])
    group.watch.stop()
    assert group.exit_code() is not None and group.failures.empty()


def test_a_rank_that_computed_other_tokens_ends_the_group() -> None:
    group = WatchedGroup([("first", [1]), ("second", [2])], [("first", [1]), ("second", [7])])
    assert group.failure() == ("rank 1 computed something different up to plan 2", EXIT_FAILED)


def test_a_rank_that_ran_another_plan_ends_the_group() -> None:
    group = WatchedGroup([("first", [1])], [("another", [1])])
    assert group.failure() == ("rank 1 computed something different up to plan 1", EXIT_FAILED)


def test_a_rank_that_does_not_finish_a_plan_ends_the_group() -> None:
    unfinished: Done = [("first", [1]), ("second", None)]
    group = WatchedGroup([("first", [1]), ("second", [2])], unfinished, lag_s=1.0)
    assert group.failure() == ("rank 1 is stuck after plan 1", EXIT_STUCK)
